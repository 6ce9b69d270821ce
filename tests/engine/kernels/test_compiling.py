"""Every kernel compiles for a Hopper GPU, in the dtype that it serves there."""

import pytest

from tests.engine.kernels.compiling import Job, compile_for_hopper
from tiercel.engine.kernels.quantized_kv import FP8, INT8

_SIZES = {"size": "i32", "eps": "fp32"}
_HEADS = {
    **dict.fromkeys(("qkv", "query_weight", "key_weight", "cos", "sin", "query", "kv", "scales"), "*bf16"),
    **dict.fromkeys(("slot_ids", "slot_offsets"), "*i64"),
    **dict.fromkeys(("group", "half", "row_stride", "head_stride", "scale_row_stride", "scale_head_stride"), "i32"),
    **dict.fromkeys(("query_eps", "key_eps"), "fp32"),
    "slot_stride": "i64",
    "scale_slot_stride": "i64",
}


def norm_job(has_residual: bool) -> Job:
    types = dict.fromkeys(("x", "residual", "weight", "normed"), "*bf16") | _SIZES
    constants = {"HAS_RESIDUAL": has_residual, "BLOCK": 4096}
    return Job("tiercel.engine.kernels.norm", "add_norm_kernel", types, constants, num_warps=8)


def heads_job(has_norms: bool, group: int, cache: int = 0) -> Job:
    """`cache`: FORMAT of the cache."""
    constants = {"HAS_NORMS": has_norms, "GROUP": group, "HALF": 64, "FORMAT": cache}
    types = _HEADS | ({"kv": "*i8", "scales": "*i16"} if cache else {})
    return Job("tiercel.engine.kernels.rotary", "store_heads_kernel", types, constants, num_warps=1)


def draw_job(logits: str) -> Job:
    types = {"logits": logits, "draws": "*i32", "best": "*fp32", "tokens": "*i32", "largest": "*fp32"}
    sizes = dict.fromkeys(("vocab_size", "row_stride", "draw_stride"), "i32")
    return Job("tiercel.engine.kernels.sampling", "draw_kernel", types | sizes, {"BLOCK": 4096}, num_warps=8)


def experts_job(rows: int) -> Job:
    names = ("addresses", "order", "block_experts", "block_starts", "block_ends")
    types = dict.fromkeys(("x", "out"), "*bf16") | dict.fromkeys(names, "*i64")
    sizes = dict.fromkeys(("per_row", "inputs", "outputs"), "i32")
    constants = {"ROWS": rows, "COLUMNS": 64, "DEPTH": 64, "PRECISION": "tf32"}
    aligned = ("x", "out", *names, "inputs", "outputs")
    return Job("tiercel.engine.kernels.experts", "expert_product_kernel", types | sizes, constants, aligned=aligned)


PRODUCTS = [experts_job(16), experts_job(64)]
JOBS = [
    norm_job(has_residual=False),
    norm_job(has_residual=True),
    heads_job(has_norms=False, group=4),
    heads_job(has_norms=True, group=1),
    heads_job(has_norms=False, group=4, cache=INT8.value),
    heads_job(has_norms=False, group=4, cache=FP8.value),
    Job(
        "tiercel.engine.kernels.rotary",
        "angles_kernel",
        {"positions": "*i64", "frequencies": "*fp32", "cos": "*bf16", "sin": "*bf16", "half": "i32", "scale": "fp32"},
        {"HALF": 64},
        num_warps=1,
    ),
    Job(
        "tiercel.engine.kernels.activation",
        "silu_mul_kernel",
        {"gate_up": "*bf16", "out": "*bf16", "size": "i32"},
        {"BLOCK": 1024},
    ),
    draw_job("*bf16"),
    draw_job("*fp32"),
    Job(
        "tiercel.engine.kernels.sampling",
        "search_kernel",
        {"probabilities": "*fp32", "wanted_mass": "*fp32", "least": "*i32", "vocab_size": "i32"},
        {"BLOCK": 2048},
        num_warps=8,
    ),
    Job(
        "tiercel.engine.kernels.sampling",
        "choose_kernel",
        dict.fromkeys(("best", "largest"), "*fp32")
        | {"tokens": "*i32", "chosen": "*i64", "bad_rows": "*i1", "blocks": "i32"},
        {"BLOCKS": 32},
        num_warps=1,
    ),
]


def test_the_kernels_compile_and_need_little_shared_memory() -> None:
    compiled = compile_for_hopper(JOBS)
    if compiled is None:
        pytest.skip("this machine has no compiler for CUDA kernels")

    for job, made in zip(JOBS, compiled, strict=True):
        assert f".entry {job.kernel}" in made.ptx
        assert ".target sm_90" in made.ptx
        assert made.shared_bytes <= 1024


def test_products_of_experts_use_tensor_cores_and_spill_no_registers() -> None:
    compiled = compile_for_hopper(PRODUCTS)
    if compiled is None:
        pytest.skip("this machine has no compiler for CUDA kernels")

    for made in compiled:
        assert "mma" in made.ptx
        assert made.spilled_bytes == 0
        assert made.shared_bytes <= 64 << 10
