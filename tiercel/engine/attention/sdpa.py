"""The reference backend: one sequence at a time, in plain torch, on every device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tiercel.engine.attention.cache_rows import gather_rows, write_rows
from tiercel.engine.forward.state import AttentionParams, ForwardState


def causal_mask(length: int, context: int, window: int | None, device: torch.device) -> Tensor:
    """Return the causal mask for queries at the last `length` positions of `context`.

    Shapes: returns [length, context] bool, True where query i (at position context - length + i) sees key j.
    """
    keys = torch.arange(context, device=device)
    queries = keys[context - length :, None]
    mask = keys <= queries
    if window is not None:
        mask &= keys > queries - window
    return mask


def attend_sequence(query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
    """Causal attention of one sequence's slice over its whole context.

    Shapes: query [length, heads, head_dim] of the last tokens of the context;
            key, value [context, kv_heads, head_dim]; returns [length, heads, head_dim].
    Cost:   plain layers go through torch's fused kernel; softcap and sinks build the scores in float32.
    """
    (length, heads, head_dim), (context, kv_heads) = query.shape, key.shape[:2]
    window = params.window
    if window is not None and window < context - length:
        first = context - length - window  # no query of this slice sees earlier keys
        key, value, context = key[first:], value[first:], context - first
    if window is not None and window >= context:
        window = None
    queries = query.reshape(length, kv_heads, heads // kv_heads, head_dim)
    keys, values = key.transpose(0, 1).unsqueeze(1), value.transpose(0, 1).unsqueeze(1)
    is_square = length == context and window is None
    needs_mask = not is_square and (length > 1 or window is not None)
    mask = causal_mask(length, context, window, query.device) if needs_mask else None
    if params.softcap is not None or params.sinks is not None:
        if is_square:
            mask = causal_mask(length, context, None, query.device)
        return (
            attend_by_scores(queries.permute(1, 2, 0, 3), keys, values, mask, params).permute(2, 0, 1, 3).flatten(1, 2)
        )
    if length == 1:
        rows = queries.transpose(0, 1)  # [kv_heads, 1, group, head_dim]: a group's heads are the rows of one query
        out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=params.scale)
        return out.reshape(1, heads, head_dim)
    rows = queries.permute(1, 2, 0, 3)  # [kv_heads, group, length, head_dim]: a group shares keys by stride 0
    keys, values = (tensor.expand(-1, rows.shape[1], -1, -1) for tensor in (keys, values))
    out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, is_causal=is_square, scale=params.scale)
    return out.permute(2, 0, 1, 3).reshape(length, heads, head_dim)


def attend_by_scores(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, params: AttentionParams) -> Tensor:
    """Compute attention from explicit scores, in float32: for soft-capped scores and for sinks.

    Shapes: query [..., kv_heads, group, length, head_dim]; key, value [..., kv_heads, 1, context, head_dim];
            mask broadcasts to [..., kv_heads, group, length, context], True where seen; returns query's shape.
    Source: Gemma 2 (arXiv 2408.00118) for softcap; sinks as in gpt-oss (arXiv 2508.10925).
    """
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2)) * params.scale
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if params.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = params.sinks.float().view(*query.shape[-4:-2], 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    return torch.matmul(weights, value.float()).to(query.dtype)


class SdpaAttention:
    """Gathers the blocks of each sequence and attends over them. The other backends are tested against this one."""

    name = "sdpa"

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams
    ) -> Tensor:
        """See `Attention.attend`."""
        write_rows(key, value, kv, state)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for index, context in enumerate(state.context_lengths):
            start, end = state.query_starts[index], state.query_starts[index + 1]
            keys, values = gather_rows(kv, state.block_tables[index], context, query.dtype)
            out[start:end] = attend_sequence(query[start:end], keys, values, params)
        return out
