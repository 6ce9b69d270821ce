"""Every kernel compiles for a Hopper GPU, in the dtype that it serves there."""

import re

import pytest

from tests.engine.kernels.compiling import HOPPER, Job, compile_for_hopper
from tests.seeds import fast_and_slow
from tiercel.engine.kernels.product_tiles import PRODUCT_TILES, ProductTile
from tiercel.engine.kernels.quantized_kv import FP8, INT8, WIDE

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


AMPERE = 80  # without instructions for float8


def rounding_job(kind: int, capability: int = HOPPER) -> Job:
    types = {"x": "*bf16", "rounded": "*i8", "scales": "*fp32", "size": "i32"}
    numbers = dict.fromkeys(("fixed", "least_peak", "least_scale"), "fp32")
    constants = {"HAS_FIXED": False, "FORMAT": kind, "BLOCK": 4096}
    return Job(
        "tiercel.engine.kernels.round_rows", "round_rows_kernel", types | numbers, constants, 8, capability=capability
    )


def product_job(
    bits: int, group: int, tile: ProductTile, x_format: int = WIDE.value, capability: int = HOPPER, **flags: object
) -> Job:
    """`flags`: `is_float8`, `has_offsets`, `x_group`, `splits`."""
    is_float8, x_group, splits = bool(flags.get("is_float8")), int(str(flags.get("x_group", 0))), flags.get("splits", 1)
    is_whole_integer = x_format == INT8.value and not group
    out = ("*i32" if is_whole_integer else "*fp32") if splits != 1 else "*bf16"
    types = {
        "x": "*bf16" if x_format == WIDE.value else "*i8", "x_scales": "*fp32",
        "values": "*u8" if bits == 4 else "*i8", "scales": "*fp16", "offsets": "*fp16", "bias": "*bf16", "out": out,
        **dict.fromkeys(("rows", "inputs", "outputs", "steps"), "i32"),
    }  # fmt: skip
    constants = {
        "GROUP": group, "X_GROUP": x_group, "X_FORMAT": x_format, "BITS": bits, "ZERO": 8 if bits == 4 else 0,
        "IS_FLOAT8": is_float8, "HAS_OFFSETS": bool(flags.get("has_offsets")), "HAS_BIAS": True,
        "IS_NATIVE": is_float8 and x_format == FP8.value and capability >= 89, "SPLITS": int(str(splits)),
        "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": min(group or 128, 128 if bits == 8 else 64),
        "PRECISION": "tf32",
    }  # fmt: skip
    aligned = ("x", "x_scales", "values", "scales", "offsets", "bias", "out", "inputs", "outputs")
    module, kernel = "tiercel.engine.kernels.quantized_product", "quantized_product_kernel"
    return Job(module, kernel, types, constants, tile.warps, tile.stages, aligned, capability)


def merge_job(parts: str) -> Job:
    types = {"parts": parts, "x_scales": "*fp32", "scales": "*fp16", "bias": "*bf16", "out": "*bf16"}
    constants = {
        "HAS_X_SCALES": parts == "*i32", "IS_INTEGER": parts == "*i32", "HAS_BIAS": True, "SPLITS": 4, "BLOCK": 1024
    }  # fmt: skip
    sizes = dict.fromkeys(("rows", "outputs"), "i32")
    return Job("tiercel.engine.kernels.quantized_product", "merge_parts_kernel", types | sizes, constants)


PRODUCTS = [experts_job(16), experts_job(64)]
FEW, SOME, MANY = PRODUCT_TILES
QUANTIZED = [
    product_job(4, 32, MANY),
    product_job(4, 128, FEW, has_offsets=True, splits=4),
    product_job(8, 0, MANY),
    product_job(8, 0, FEW, INT8.value, splits=4),
    product_job(4, 128, MANY, INT8.value),
    product_job(8, 128, MANY, FP8.value, is_float8=True, x_group=128),
    product_job(4, 128, MANY, capability=AMPERE),
    product_job(8, 128, MANY, FP8.value, AMPERE, is_float8=True, x_group=128),
]
OTHER_QUANTIZED = [
    job
    for tile in PRODUCT_TILES
    for job in (
        *(product_job(4, group, tile, capability=each) for group in (0, 16, 32, 64, 128) for each in (HOPPER, AMPERE)),
        *(product_job(4, 32, tile, has_offsets=True, splits=splits) for splits in (1, 7)),
        *(product_job(8, group, tile, is_float8=is_float8) for group in (32, 0) for is_float8 in (False, True)),
        *(product_job(8, 0, tile, INT8.value, each, splits=splits) for each in (HOPPER, AMPERE) for splits in (1, 2)),
        *(product_job(4, 32, tile, INT8.value, has_offsets=has_offsets) for has_offsets in (False, True)),
        *(product_job(8, 0, tile, FP8.value, each, is_float8=True) for each in (HOPPER, AMPERE, 89)),
        product_job(8, 128, tile, FP8.value, 89, is_float8=True, x_group=128),
        product_job(4, 64, tile, FP8.value),
    )
]
_BLOCK: dict[str, int | float | bool | str | None] = {"BLOCK": 256}
INPUTS_JOB = Job(
    "tiercel.engine.kernels.host_memory",
    "take_inputs_kernel",
    dict.fromkeys(("source", "target", "tables"), "*i64") | dict.fromkeys(("lines", "patches"), "i32"),
    _BLOCK,
    num_warps=2,
    aligned=("source", "target", "tables"),
)
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
    rounding_job(INT8.value),
    rounding_job(FP8.value),
    rounding_job(FP8.value, AMPERE),
    merge_job("*fp32"),
    merge_job("*i32"),
    INPUTS_JOB,
    *(
        Job(
            "tiercel.engine.kernels.host_memory",
            "move_kernel",
            {"source": kind, "target": kind, "count": "i32"},
            _BLOCK,
        )
        for kind in ("*u8", "*i32", "*i64")
    ),
    Job(
        "tiercel.engine.kernels.host_memory",
        "report_kernel",
        dict.fromkeys(("tokens", "rows", "last_tokens", "host_tokens"), "*i64")
        | dict.fromkeys(("bad_rows", "host_bad_rows"), "*u8")
        | {"count": "i32"},
        _BLOCK,
        num_warps=2,
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


@pytest.mark.slow
def test_the_kernels_compile_and_need_little_shared_memory() -> None:
    compiled = compile_for_hopper(JOBS)
    if compiled is None:
        pytest.skip("this machine has no compiler for CUDA kernels")

    for job, made in zip(JOBS, compiled, strict=True):
        assert f".entry {job.kernel}" in made.ptx
        assert f".target sm_{job.capability}" in made.ptx
        assert made.shared_bytes <= 2048


@pytest.mark.slow
def test_inputs_are_read_from_the_host_16_bytes_at_a_time() -> None:
    compiled = compile_for_hopper([INPUTS_JOB])
    if compiled is None:
        pytest.skip("this machine has no compiler for CUDA kernels")

    assert "ld.global.v2.b64" in compiled[0].ptx


@pytest.mark.slow
def test_products_of_experts_use_tensor_cores_and_spill_no_registers() -> None:
    compiled = compile_for_hopper(PRODUCTS)
    if compiled is None:
        pytest.skip("this machine has no compiler for CUDA kernels")

    for made in compiled:
        assert "mma" in made.ptx
        assert made.spilled_bytes == 0
        assert made.shared_bytes <= 64 << 10


@pytest.mark.parametrize(
    "jobs", fast_and_slow([QUANTIZED], [OTHER_QUANTIZED]), ids=["those of common models", "all others"]
)
@pytest.mark.slow
def test_quantised_products_use_tensor_cores_of_their_type_and_fit_a_processor(jobs: list[Job]) -> None:
    most_spilled = 0 if jobs is QUANTIZED else 32  # bytes of a thread; a few registers cost less than a smaller tile
    compiled = compile_for_hopper(jobs)
    if compiled is None:
        pytest.skip("this machine has no compiler for CUDA kernels")

    for job, made in zip(jobs, compiled, strict=True):
        told = job, made.registers, made.spilled_bytes, made.shared_bytes
        is_native = job.constants["IS_NATIVE"] and int(str(job.constants["ROWS"])) >= 64  # fewer rows are widened
        float8 = r"mma\S*\.(e4m3\.e4m3|f16\.f16)" if not is_native else r"mma\S*\.e4m3\.e4m3"
        kinds = {WIDE.value: r"mma\S*\.bf16\.bf16", INT8.value: r"mma\S*\.s32\.s8\.s8", FP8.value: float8}
        kind = kinds[int(str(job.constants["X_FORMAT"]))]
        assert re.search(kind, made.ptx), told
        assert made.spilled_bytes <= most_spilled, told
        assert made.shared_bytes <= 160 << 10, told
