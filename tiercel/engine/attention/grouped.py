"""The fast backend in plain torch for the CPU: decodes in groups, longer slices one by one.

Decoding reads every block once and computes little, so memory traffic is its cost. Sequences of similar length are
gathered together into a scratch buffer, which stays in the processor's cache between gathering and attending. The heads
that share a key are the rows of one query (torch's own grouped-query path is seven to ten times slower on the CPU).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tiercel.engine.attention.cache_rows import gather_rows, read_blocks, write_rows
from tiercel.engine.attention.sdpa import attend_by_scores, attend_sequence
from tiercel.engine.forward.kv_cache import is_quantized
from tiercel.engine.forward.state import AttentionParams, ForwardState

_SCRATCH_BYTES = 4 * 1024 * 1024  # of one group, unless a single sequence needs more
_PADDING = 1.25  # a group's longest sequence over its shortest, in blocks


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """Decoding sequences of similar length, and their blocks.

    Shapes: queries [n] int64, rows of the forward; slots [n * blocks] int64; unseen [u] int64, rows of the gathered
            [n * blocks * block_size] that belong to no visible key; mask [n, 1, 1, blocks * block_size] bool, None if
            all keys are visible.
    """

    queries: Tensor
    slots: Tensor
    unseen: Tensor
    mask: Tensor | None


class GroupedAttention:
    """Batches the decodes of a step. Caches the layout of the last step, and keeps one scratch buffer."""

    name = "grouped"
    is_capturable = False

    def __init__(self) -> None:
        self._state: ForwardState | None = None
        self._groups_by_window: dict[int | None, tuple[LengthGroup, ...]] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams
    ) -> Tensor:
        """See `Attention.attend`."""
        write_rows(key, value, kv, state)
        return self.read(query, kv, state, params)

    def read(self, query: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams) -> Tensor:
        """See `PagedReader.read`."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in self._groups(kv, state, params.window):
            out[group.queries] = self._attend_group(query[group.queries], kv, group, params)
        if not state.is_decode:
            for index, context in enumerate(state.context_lengths):
                start, end = state.query_starts[index], state.query_starts[index + 1]
                if end - start == 1:
                    continue
                keys, values = gather_rows(kv, state.block_tables[index], context, query.dtype)
                out[start:end] = attend_sequence(query[start:end], keys, values, params)
        return out

    def _attend_group(self, query: Tensor, kv: Tensor, group: LengthGroup, params: AttentionParams) -> Tensor:
        kv_heads, width = kv.shape[2:]
        sequences, heads, head_dim = query.shape
        gathered = self._borrow(kv, group.slots.numel())
        torch.index_select(kv.view(torch.uint8).view(kv.shape[0], -1), 0, group.slots, out=gathered)
        blocks = gathered.view(kv.dtype).view(-1, *kv.shape[1:])
        # Stale rows may hold NaN, so those that no query sees are zeroed.
        if is_quantized(kv):
            parts = tuple(part.index_fill_(0, group.unseen, 0) for part in read_blocks(blocks, query.dtype))
            keys, values = (part.view(sequences, -1, kv_heads, head_dim).transpose(1, 2) for part in parts)
        else:
            blocks.view(-1, kv_heads * width).index_fill_(0, group.unseen, 0)
            rows = blocks.view(sequences, -1, kv_heads, width).transpose(1, 2).to(query.dtype)
            keys, values = rows[..., :head_dim], rows[..., head_dim:]
        queries = query.view(sequences, kv_heads, heads // kv_heads, head_dim)
        if params.softcap is None and params.sinks is None:
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask, scale=params.scale)
        else:
            mask = None if group.mask is None else group.mask.unsqueeze(1)
            out = attend_by_scores(queries.unsqueeze(3), keys.unsqueeze(2), values.unsqueeze(2), mask, params)
        return out.reshape(sequences, heads, head_dim)

    def _borrow(self, kv: Tensor, blocks: int) -> Tensor:
        """Return scratch memory for `blocks` blocks, which the next group overwrites. It grows as needed.

        Shapes: returns [blocks, bytes of a block] uint8.
        """
        count = blocks * kv[0].numel() * kv.element_size()
        if self._scratch.numel() < count or self._scratch.device != kv.device:
            with torch.inference_mode(False):  # an inference tensor could only be written in inference mode
                self._scratch = torch.empty(count, dtype=torch.uint8, device=kv.device)
        return self._scratch[:count].view(blocks, -1)

    def _groups(self, kv: Tensor, state: ForwardState, window: int | None) -> tuple[LengthGroup, ...]:
        """Return the layout of this step's decodes, which the first layer computes and the others reuse."""
        if self._state is not state:
            self._state, self._groups_by_window = state, {}
        groups = self._groups_by_window.get(window)
        if groups is None:
            block_bytes = kv[0].numel() * kv.element_size()
            groups = lay_out_decodes(state, kv.shape[1], block_bytes, window)
            self._groups_by_window[window] = groups
        return groups


def lay_out_decodes(
    state: ForwardState, block_size: int, block_bytes: int, window: int | None
) -> tuple[LengthGroup, ...]:
    """Sort the slices of one token into groups of similar length that fit the scratch buffer."""
    spans: list[tuple[int, int, int]] = []  # visible blocks, first visible block, sequence
    for index, context in enumerate(state.context_lengths):
        if state.query_starts[index + 1] - state.query_starts[index] == 1:
            first = 0 if window is None else max(0, context - window) // block_size
            spans.append((-(-context // block_size) - first, first, index))
    spans.sort()
    groups: list[LengthGroup] = []
    start = 0
    for end in range(1, len(spans) + 1):
        if end < len(spans):
            longest, shortest = spans[end][0], spans[start][0]
            is_similar = longest <= max(shortest * _PADDING, shortest + 1)
            if is_similar and longest * (end + 1 - start) * block_bytes <= _SCRATCH_BYTES:
                continue
        groups.append(_make_group(state, spans[start:end], block_size, window))
        start = end
    return tuple(groups)


def _make_group(
    state: ForwardState, spans: list[tuple[int, int, int]], block_size: int, window: int | None
) -> LengthGroup:
    device = state.block_tables.device
    sequences = torch.tensor([index for _, _, index in spans], device=device)
    firsts = torch.tensor([first for _, first, _ in spans], device=device)[:, None]
    contexts = torch.tensor([state.context_lengths[index] for _, _, index in spans], device=device)[:, None]
    columns = firsts + torch.arange(spans[-1][0], device=device)
    columns.clamp_max_(state.block_tables.shape[1] - 1)  # padding reads an arbitrary block; its rows are not visible
    slots = state.block_tables[sequences[:, None], columns]
    positions = firsts * block_size + torch.arange(spans[-1][0] * block_size, device=device)
    mask = positions < contexts
    if window is not None:
        mask &= positions >= contexts - window
    queries = torch.tensor([state.query_starts[index] for _, _, index in spans], device=device)
    unseen = (~mask).flatten().nonzero().squeeze(1)
    return LengthGroup(queries, slots.flatten(), unseen, mask[:, None, None, :] if unseen.numel() else None)
