"""Read the mixture of experts of a config.json: which layers have one, and how tokens choose their experts."""

from dataclasses import dataclass
from typing import Protocol

from tiercel.values.errors import ConfigError
from tiercel.values.facts import Facts

_MAX_EXPERTS = 4096
_COUNT_NAMES = ("num_experts", "num_local_experts")  # transformers reads either for every family


class MixtureFields(Protocol):
    """The fields of a config.json, as `ConfigFields` reads them; errors name the field."""

    source: str

    def has(self, name: str) -> bool:
        """Return whether the field is present and not null."""
        ...

    def raw(self, name: str) -> object:
        """Return the JSON value of the field; None if it is missing."""
        ...

    def read(self, name: str, kind: type[bool], default: bool) -> bool:
        """Return a field, or the default if it is missing or null. Errors: ConfigError naming the field."""
        ...

    def count(self, name: str, default: int | None = None, most: int = ...) -> int:
        """Return an integer field from 1 to `most`. Errors: ConfigError naming the field."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of a mixture's tensors in checkpoints that have one tensor for each expert and layer."""

    block: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class MixtureFamily:
    """The defaults of transformers' configuration class, and what its modelling code does without asking."""

    names: ExpertNames
    experts: int
    per_token: int
    inner_size: int | None = None  # default of moe_intermediate_size; None: experts have the size of a dense MLP
    normalizes: bool | None = None  # None: the value of norm_topk_prob
    rounds_shares: bool = True
    has_dense_layers: bool = False  # decoder_sparse_step and mlp_only_layers count


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """The mixtures of a decoder. A token takes the `per_token` likeliest of the experts of its layer."""

    experts: int
    per_token: int
    inner_size: int  # of an expert, between gate and down
    normalizes: bool  # the shares of the chosen experts are divided by their sum
    rounds_shares: bool  # shares are rounded to the type of the activations before they weigh an output
    layers: tuple[bool, ...]  # for each layer: whether it has a mixture; the others have a dense MLP
    names: ExpertNames

    @property
    def facts(self) -> Facts:
        """The mixtures by names of their own, for the fingerprint of a model; names of tensors change no result."""
        return {
            "experts": self.experts,
            "per_token": self.per_token,
            "inner_size": self.inner_size,
            "normalizes": self.normalizes,
            "rounds_shares": self.rounds_shares,
            "layers": self.layers,
        }


_QWEN_NAMES = ExpertNames("mlp.", "gate_proj", "up_proj", "down_proj")
QWEN3_MIXTURE = MixtureFamily(_QWEN_NAMES, experts=128, per_token=8, inner_size=768, has_dense_layers=True)
OLMOE_MIXTURE = MixtureFamily(_QWEN_NAMES, experts=64, per_token=8)
MIXTRAL_MIXTURE = MixtureFamily(
    ExpertNames("block_sparse_moe.", "w1", "w3", "w2"),
    experts=8,
    per_token=2,
    normalizes=True,
    rounds_shares=False,
)


def parse_mixture(fields: MixtureFields, family: MixtureFamily, layers: int) -> MixtureConfig:
    """Read the fields of a mixture. Those of the loss in training are ignored. Errors: ConfigError naming the field."""
    experts = _count_experts(fields, family)
    per_token = fields.count("num_experts_per_tok", family.per_token)
    if per_token > experts:
        raise ConfigError(
            "model.field_wrong",
            f"{fields.source}: num_experts_per_tok ({per_token}) must be at most the number of experts ({experts})",
        )
    inner_size = (
        fields.count("intermediate_size")
        if family.inner_size is None
        else fields.count("moe_intermediate_size", family.inner_size)
    )
    normalizes = fields.read("norm_topk_prob", bool, False) if family.normalizes is None else family.normalizes
    has_mixture = _parse_layers(fields, layers) if family.has_dense_layers else (True,) * layers
    return MixtureConfig(experts, per_token, inner_size, normalizes, family.rounds_shares, has_mixture, family.names)


def _count_experts(fields: MixtureFields, family: MixtureFamily) -> int:
    counts = {name: fields.count(name, most=_MAX_EXPERTS) for name in _COUNT_NAMES if fields.has(name)}
    if len(set(counts.values())) > 1:
        shown = " and ".join(f"{name} ({count})" for name, count in counts.items())
        raise ConfigError("model.field_wrong", f"{fields.source}: {shown} differ, but mean the same")
    return next(iter(counts.values()), family.experts)


def _parse_layers(fields: MixtureFields, layers: int) -> tuple[bool, ...]:
    step = fields.count("decoder_sparse_step", 1)
    dense = fields.raw("mlp_only_layers") if fields.has("mlp_only_layers") else []
    if not isinstance(dense, list) or not all(type(index) is int and 0 <= index < layers for index in dense):
        raise ConfigError(
            "model.field_wrong", f"{fields.source}: mlp_only_layers must list numbers from 0 to {layers - 1}"
        )
    without = set(dense)
    return tuple(index not in without and (index + 1) % step == 0 for index in range(layers))
