"""Stands in for the package of FlashAttention-3: the operator with its own schema, computed by the reference.

The schema is that of hopper/flash_api.cpp of Dao-AILab/flash-attention; what it checks of its arguments, this checks.
"""

import torch
from torch import Tensor

from tiercel.engine.attention.sdpa import attend_sequence
from tiercel.engine.forward.state import AttentionParams

SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, Tensor? q_v = None, "
    "Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, "
    "int? max_seqlen_k = None, Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, "
    "Tensor? rotary_cos = None, Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, "
    "Tensor? k_descale = None, Tensor? v_descale = None, float? softmax_scale = None, bool is_causal = False, "
    "int window_size_left = -1, int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, "
    "bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, int num_splits = 0, "
    "bool? pack_gqa = None, int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)

splits_asked: list[int] = []  # of every call, for the tests to look at
tables_seen: list[Tensor] = []


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    names = [argument.name for argument in torch.ops.flash_attn_3.fwd.default._schema.arguments]
    given = dict(zip(names[3:], rest, strict=False))
    starts, lengths, table = given["cu_seqlens_q"], given["seqused_k"], given["page_table"]
    assert isinstance(starts, Tensor)
    assert isinstance(lengths, Tensor)
    assert isinstance(table, Tensor)
    assert all(tensor.dtype is torch.int32 and tensor.is_contiguous() for tensor in (starts, lengths, table))
    assert len(starts) == len(lengths) + 1 == len(table) + 1
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert k.shape == v.shape
    assert (k.storage_offset() * 2) % 16 == (v.storage_offset() * 2) % 16 == 0
    assert all(stride * 2 % 16 == 0 for stride in (*k.stride()[:-1], *v.stride()[:-1]))
    assert given["is_causal"] is True
    assert given["window_size_right"] == 0
    assert given["max_seqlen_q"] == int(starts.diff().max())
    left, softcap, scale = given["window_size_left"], given["softcap"], given["softmax_scale"]
    assert isinstance(left, int)
    assert isinstance(softcap, float)
    assert isinstance(scale, float)
    splits_asked.append(int(str(given["num_splits"])))
    tables_seen.append(table)
    params = AttentionParams(scale, window=None if left < 0 else left + 1, softcap=softcap or None)
    out = torch.empty(q.shape, dtype=q.dtype)
    for index, length in enumerate(lengths.tolist()):
        first, last = starts[index : index + 2].tolist()
        keys, values = (tensor[table[index].long()].flatten(0, 1)[:length].float() for tensor in (k, v))
        out[first:last] = attend_sequence(q[first:last].float(), keys, values, params).to(q.dtype)
    nothing = q.new_empty(0)
    return out, nothing, nothing.clone(), nothing.clone()


_library = torch.library.Library("flash_attn_3", "DEF")
_library.define(SCHEMA)
_library.impl("fwd", _forward, "CPU")
