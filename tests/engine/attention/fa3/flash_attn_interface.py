"""Stands in for the packages with FlashAttention-3: the operators with their own schemas, computed by the reference.

What the operators check of their arguments, this checks.
"""

from functools import partial

import torch
from torch import Tensor

from tests.engine.attention.fa3.schemas import SCHEMA, VLLM_SCHEMA
from tiercel.engine.attention.sdpa import attend_sequence
from tiercel.engine.forward.state import AttentionParams

NAMES_BY_SCHEMA = {
    schema: [part.split(" = ")[0].split()[-1] for part in schema[4 : schema.index(") ->")].split(", ")]
    for schema in (SCHEMA, VLLM_SCHEMA)
}

given_by_call: list[dict[str, object]] = []
splits_asked: list[int] = []  # of every call, for the tests to look at
tables_seen: list[Tensor] = []


def _forward(names: list[str], q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = dict(zip(names[3:], rest, strict=False))
    given_by_call.append(given)
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
    longest = given["max_seqlen_q"]
    assert isinstance(longest, int)
    assert longest >= int(starts.diff().max())  # a recording gives a bound, as vLLM's does
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


def _listed(names: list[str], *arguments: Tensor) -> list[Tensor]:
    return list(_forward(names, *arguments))


_library = torch.library.Library("flash_attn_3", "DEF")
_library.define(SCHEMA)
_library.impl("fwd", partial(_forward, NAMES_BY_SCHEMA[SCHEMA]), "CPU")
_vllm = torch.library.Library("_vllm_fa3_C", "DEF")
_vllm.define(VLLM_SCHEMA)
_vllm.impl("fwd", partial(_listed, NAMES_BY_SCHEMA[VLLM_SCHEMA]), "CPU")
