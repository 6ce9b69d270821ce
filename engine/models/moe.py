"""The mixture of experts of a layer: a router chooses for each token the experts that compute it."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tiercel.engine.models.layers import Linear, Target
from tiercel.engine.models.mixture_config import MixtureConfig
from tiercel.engine.models.ops import ExpertParts, ExpertRunner, Ops
from tiercel.engine.models.precision import Precision
from tiercel.engine.models.quantized_parts import WeightKernels

_PIECE_BYTES = 64 << 20  # of the chosen experts' outputs that are in memory at once on a CPU


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
    ) -> None:
        inner = config.inner_size
        self._ops = ops
        self._config = config
        self._piece_bytes = piece_bytes
        self._router = Linear(hidden_size, (config.experts,), False, precision, device)
        self._experts = tuple(
            ExpertParts(
                Linear(hidden_size, (inner, inner), False, precision, device),
                Linear(inner, (hidden_size,), False, precision, device),
            )
            for _ in range(config.experts)
        )
        self._joined: ExpertRunner | None = None  # all experts in a few launches, where the ops offer it

    def targets(self, prefix: str) -> Iterator[Target]:
        """Yield the checkpoint's tensors of this layer and their memory. `prefix`: that of the decoder's layer."""
        names = self._config.names
        yield from self._router.targets(f"{prefix}{names.block}gate")
        for index, expert in enumerate(self._experts):
            place = f"{prefix}{names.block}experts.{index}."
            yield from expert.gate_up.targets(f"{place}{names.gate}", f"{place}{names.up}")
            yield from expert.down.targets(f"{place}{names.down}")

    def pack(self, library_of: Callable[[Linear], WeightKernels | None]) -> None:
        """See `Linear.pack`."""
        for linear in (self._router, *(linear for expert in self._experts for linear in expert)):
            linear.pack(library_of(linear))

    def join(self) -> bool:
        """Compute experts that are not quantised in a few launches, where the ops offer it. Return whether they do."""
        if any(linear.is_quantized for expert in self._experts for linear in expert):
            return False
        self._joined = self._ops.join_experts(self._experts)
        return self._joined is not None

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x [T, hidden] -> same."""
        chosen, shares = choose_experts(self._router.forward(x), self._config)
        if self._joined is not None:
            return weigh(self._joined.forward(x, chosen), shares)
        pair_bytes = chosen.shape[1] * x.shape[1] * x.element_size()
        tokens = max(1, self._piece_bytes // pair_bytes)
        pieces = zip(x.split(tokens), chosen.split(tokens), shares.split(tokens), strict=True)
        sums = [weigh(run_hit_experts(self._ops, self._experts, *piece[:2]), piece[2]) for piece in pieces]
        return sums[0] if len(sums) == 1 else torch.cat(sums)


def run_hit_experts(ops: Ops, experts: Sequence[ExpertParts], x: Tensor, chosen: Tensor) -> Tensor:
    """Return the outputs of the chosen experts, each computed once for all of its tokens; the others are not read.

    Shapes: x [T, hidden], chosen [T, per_token]; returns [T, per_token, hidden].
    Cost:   a few operators for each expert that is hit. Waits for the device: the sizes depend on the choice.
    """
    tokens, per_token = chosen.shape
    pairs = chosen.flatten()
    order = torch.argsort(pairs, stable=True)
    ends = torch.bincount(pairs, minlength=len(experts)).cumsum(0).tolist()
    sources = order // per_token
    outputs = x.new_empty(tokens * per_token, x.shape[1])
    start = 0
    for expert, end in zip(experts, ends, strict=True):
        if end == start:
            continue
        activated = ops.silu_mul(expert.gate_up.forward(x[sources[start:end]]))
        outputs[order[start:end]] = expert.down.forward(activated)
        start = end
    return outputs.view(tokens, per_token, -1)
