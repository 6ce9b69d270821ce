"""Check at loading that an architecture computes through the paged attention, with the same results as its own."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tiercel.engine.forward.state import ForwardState
from tiercel.engine.models.base import Model
from tiercel.engine.models.bridge import INTERFACE_NAME, Bridge, LayerCall
from tiercel.values.errors import ConfigError

RECORDED_TOKENS = 4
_BLOCK_SIZE = 4  # tokens
_LENGTHS = (11, 7)  # tokens of the two prompts
_FIRST = (6, 6)  # tokens of each prompt in the first forward; the second forward is a chunk and a decode
_TOLERANCE_BY_DTYPE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}


def record_calls(model: PreTrainedModel, bridge: Bridge, layers: int) -> tuple[tuple[LayerCall, ...], int]:
    """Run a few tokens; return the attention call of each layer, in the order of the layers, and the logits' width.

    Errors: ConfigError if the paged function was not called exactly once for each layer (some architectures warn and
            keep their own attention; others have layers of another kind), or the layers' caches differ in shape.
    """
    calls = bridge.start_record()
    try:
        tokens = torch.arange(RECORDED_TOKENS, device=model.device)[None]
        logits = model(input_ids=tokens, position_ids=tokens, use_cache=False).logits
    finally:
        bridge.stop_record()
    name = type(model).__name__
    if not calls:
        raise ConfigError("model.unsupported", f"{name} keeps its own attention: it never calls the paged one")
    if sorted(call.layer for call in calls) != list(range(layers)):
        raise ConfigError(
            "model.unsupported",
            f"{name} called the paged attention for layers {sorted(call.layer for call in calls)}, not once for each "
            f"of its {layers} layers: its cache is not attention only",
        )
    shapes = {(call.kv_heads, call.head_dim) for call in calls}
    if len(shapes) != 1:
        raise ConfigError("model.unsupported", f"{name}: kv heads and head_dim differ between layers: {sorted(shapes)}")
    return tuple(sorted(calls, key=lambda call: call.layer)), logits.shape[-1]


def probe_prompts(vocab_size: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return two short prompts of fixed, spread token ids."""
    return tuple(
        (torch.arange(length, device=device) * 7919 + 31 * index + 5) % vocab_size
        for index, length in enumerate(_LENGTHS)
    )


def own_logits(model: PreTrainedModel, prompts: Sequence[Tensor]) -> list[Tensor]:
    """Compute logits with transformers' own attention. Shapes: [tokens] -> [tokens, vocab] float32."""
    model.set_attn_implementation("eager")
    try:
        return [model(input_ids=prompt[None], use_cache=False).logits[0].float() for prompt in prompts]
    finally:
        model.set_attn_implementation(INTERFACE_NAME)


def check_paged_logits(model: Model, prompts: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Compute both prompts together on a paged cache, in two forwards, and compare the logits.

    The cache has the type of the activations: the probe shows whether attention can be paged, and the rounding of a
    narrower cache is no fault of the architecture.
    Errors: ConfigError if the logits of a forward differ: the architecture mixes tokens or positions in a way that
            paged attention does not.
    """
    device = prompts[0].device
    slots = sum(-(-len(prompt) // _BLOCK_SIZE) for prompt in prompts) + 1
    shape = (slots, model.layers, _BLOCK_SIZE, model.kv_heads, 2 * model.head_dim)
    kv = torch.zeros(shape, dtype=model.precision.activations, device=device)
    starts = (0,) * len(prompts)
    for ends in (_FIRST, _LENGTHS):
        state = _probe_state(starts, ends, device)
        pairs = list(zip(starts, ends, strict=True))
        tokens = torch.cat([prompt[start:end] for prompt, (start, end) in zip(prompts, pairs, strict=True)])
        wanted = torch.cat([logits[start:end] for logits, (start, end) in zip(expected, pairs, strict=True)])
        got = model.logits(model.forward(tokens, kv, state))
        error = ((got - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-6)).median().item()
        if not error <= _TOLERANCE_BY_DTYPE[model.precision.activations]:
            raise ConfigError(
                "model.unsupported",
                f"the paged attention does not compute what this architecture computes by itself "
                f"(relative error {error:.2g} after tokens {list(starts)} to {list(ends)})",
            )
        starts = ends


def _probe_state(starts: Sequence[int], ends: Sequence[int], device: torch.device) -> ForwardState:
    width = max(-(-length // _BLOCK_SIZE) for length in _LENGTHS)
    tables = torch.zeros(len(_LENGTHS), width, dtype=torch.int64, device=device)
    slot = 1
    for index, length in enumerate(_LENGTHS):
        blocks = -(-length // _BLOCK_SIZE)
        tables[index, :blocks] = torch.arange(slot, slot + blocks, device=device).flip(0)
        slot += blocks
    return ForwardState.of_slices(tables, starts, ends, _BLOCK_SIZE)
