"""The mixture of experts of a layer: a router chooses for each token the experts that compute it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tiercel.engine.models.layers import Linear, Target
from tiercel.engine.models.mixture_config import MixtureConfig
from tiercel.engine.models.ops import ExpertParts, ExpertRunner, Ops
from tiercel.engine.models.precision import Precision
from tiercel.engine.models.quantized_parts import QuantizedTarget
from tiercel.engine.models.tiered_experts import ExpertTier, LibraryOf, TieredLayer

Take = Callable[[Sequence[int]], Iterable[int]]

_PIECE_BYTES = 64 << 20  # of the chosen experts' outputs that are in memory at once on a CPU


class ExpertRouter(Protocol):
    """Tells how well each expert suits a token."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits. Shapes: x [T, hidden] -> [T, experts]."""
        ...


def choose_experts(logits: Tensor, config: MixtureConfig) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, the likeliest first, and their shares in its output.

    Probabilities and their sum are float32; shares are rounded as the family's code in transformers rounds them.

    Shapes: logits [T, experts]; returns [T, per_token] int64 and [T, per_token] in float32 or the type of the logits.
    """
    shares, chosen = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), config.per_token, dim=-1)
    if config.normalizes:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return chosen, shares.to(logits.dtype) if config.rounds_shares else shares


def weigh(outputs: Tensor, shares: Tensor) -> Tensor:
    """Return the sums of the experts' outputs, multiplied by their shares.

    A product is rounded to the wider of both types; the sum runs in float32 over the experts of a token from the
    likeliest on, and is rounded to the type of the outputs.

    Shapes: outputs [T, per_token, hidden], shares [T, per_token]; returns [T, hidden].
    """
    return (outputs * shares[:, :, None]).sum(dim=1).to(outputs.dtype)


class MixtureMLP:
    """The experts of a layer, each an MLP, and their router. It has the place of a `GatedMLP`."""

    def __init__(
        self,
        hidden_size: int,
        config: MixtureConfig,
        ops: Ops,
        precision: Precision,
        device: torch.device,
        piece_bytes: int = _PIECE_BYTES,
        tier: ExpertTier | None = None,
    ) -> None:
        """`tier`: has the experts that are not in memory; None: all are."""
        inner = config.inner_size
        self._ops = ops
        self._config = config
        self._piece_bytes = piece_bytes
        self._router_layer = Linear(hidden_size, (config.experts,), False, precision, device)
        self.router: ExpertRouter = self._router_layer
        self._shape = hidden_size, precision
        make = _make_expert(hidden_size, inner, precision, device)
        self._experts = tuple(make() for _ in range(config.experts))
        self._tiered = None if tier is None else tier.open_layer(self._experts, config.per_token)
        self._next: MixtureMLP | None = None  # of the next layer with a mixture, if experts are not all in memory
        self._joined: ExpertRunner | None = None  # all experts in a few launches, where the ops offer it

    def targets(self, prefix: str) -> Iterator[Target]:
        """Yield the checkpoint's tensors of this layer and their memory. `prefix`: that of the decoder's layer.

        Experts of a tier are left out: see `parts`.
        """
        yield from self._router_layer.targets(f"{prefix}{self._config.names.block}gate")
        if self._tiered is None:
            for index, expert in enumerate(self._experts):
                yield from self._targets_of(prefix, index, expert)

    def parts(self, prefix: str, library_of: LibraryOf | None) -> Iterator["ExpertPart"]:
        """Yield the experts of a tier, which are loaded one after the other. `library_of`: see `TieredLayer.store`."""
        if self._tiered is not None:
            hidden_size, precision = self._shape
            nowhere = _make_expert(hidden_size, self._config.inner_size, precision, torch.device("meta"))
            for index, expert in enumerate(self._experts):
                shown = dict(self._targets_of(prefix, index, nowhere()))
                yield ExpertPart(
                    shown, partial(self._targets_of, prefix, index, expert), self._tiered, index, library_of
                )

    def _targets_of(self, prefix: str, index: int, expert: ExpertParts) -> Iterator[Target]:
        names = self._config.names
        place = f"{prefix}{names.block}experts.{index}."
        yield from expert.gate_up.targets(f"{place}{names.gate}", f"{place}{names.up}")
        yield from expert.down.targets(f"{place}{names.down}")

    def precede(self, following: "MixtureMLP") -> None:
        """Have the experts of the next layer fetched ahead, those that its router chooses for this layer's input."""
        self._next = following

    def pack(self, library_of: LibraryOf) -> None:
        """See `Linear.pack`. Experts of a tier were packed when they were loaded."""
        self._router_layer.pack(library_of(self._router_layer))
        for linear in (linear for expert in self._experts if self._tiered is None for linear in expert):
            linear.pack(library_of(linear))

    def join(self) -> bool:
        """Compute experts that are not quantised in a few launches, where the ops offer it. Return whether they do."""
        if self._tiered is not None or any(linear.is_quantized for expert in self._experts for linear in expert):
            return False
        self._joined = self._ops.join_experts(self._experts)
        return self._joined is not None

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x [T, hidden] -> same."""
        chosen, shares = choose_experts(self.router.forward(x), self._config)
        if self._joined is not None:
            return weigh(self._joined.forward(x, chosen), shares)
        pair_bytes = chosen.shape[1] * x.shape[1] * x.element_size()
        tokens = max(1, self._piece_bytes // pair_bytes)
        pieces = zip(x.split(tokens), chosen.split(tokens), shares.split(tokens), strict=True)
        take = None if self._tiered is None else partial(self._tiered.take, ahead=self._predict(x))
        sums = [weigh(run_hit_experts(self._ops, self._experts, *piece[:2], take), piece[2]) for piece in pieces]
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def _predict(self, x: Tensor) -> list[int]:
        """Return the records of the experts that the next layer is likely to choose, the likeliest first.

        The input of one layer is close to that of the next one, because a layer adds little to the residual.
        """
        following = self._next
        if following is None or following._tiered is None:
            return []
        chosen = following.router.forward(x).topk(following._config.per_token, dim=-1).indices
        counts = torch.bincount(chosen.flatten(), minlength=following._config.experts)
        likeliest = counts.argsort(descending=True)[: int(counts.count_nonzero())]
        return following._tiered.records(likeliest.tolist())


class ExpertPart:
    """One expert of a tier while the model is loaded: its memory exists from `targets` to `finish`."""

    def __init__(
        self,
        shown: Mapping[str, Tensor | QuantizedTarget],
        targets: Callable[[], Iterator[Target]],
        tiered: TieredLayer,
        index: int,
        library_of: LibraryOf | None,
    ) -> None:
        self.shown = shown
        self._targets = targets
        self._tiered = tiered
        self._index = index
        self._library_of = library_of

    def targets(self) -> dict[str, Tensor | QuantizedTarget]:
        """See `DeferredPart`."""
        return dict(self._targets())

    def finish(self) -> None:
        """See `DeferredPart`."""
        self._tiered.store(self._index, self._library_of)


def _make_expert(hidden_size: int, inner: int, precision: Precision, device: torch.device) -> Callable[[], ExpertParts]:
    def make() -> ExpertParts:
        return ExpertParts(
            Linear(hidden_size, (inner, inner), False, precision, device),
            Linear(inner, (hidden_size,), False, precision, device),
        )

    return make


def run_hit_experts(
    ops: Ops, experts: Sequence[ExpertParts], x: Tensor, chosen: Tensor, take: Take | None = None
) -> Tensor:
    """Return the outputs of the chosen experts, each computed once for all of its tokens; the others are not read.

    `take`: yields the experts that are hit, in any order, each as long as it is in memory; None: all are in memory.

    Shapes: x [T, hidden], chosen [T, per_token]; returns [T, per_token, hidden].
    Cost:   a few operators for each expert that is hit. Waits for the device: the sizes depend on the choice.
    """
    tokens, per_token = chosen.shape
    pairs = chosen.flatten()
    order = torch.argsort(pairs, stable=True)
    ends = [0, *torch.bincount(pairs, minlength=len(experts)).cumsum(0).tolist()]
    sources = order // per_token
    outputs = x.new_empty(tokens * per_token, x.shape[1])
    hit = [index for index, (start, end) in enumerate(pairwise(ends)) if start < end]
    for index in hit if take is None else take(hit):
        expert, its = experts[index], slice(ends[index], ends[index + 1])
        activated = ops.silu_mul(expert.gate_up.forward(x[sources[its]]))
        outputs[order[its]] = expert.down.forward(activated)
    return outputs.view(tokens, per_token, -1)
