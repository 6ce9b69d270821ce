"""The attention kernels compile for a Hopper GPU, and fit it, with the tiles of the table; and they do so once."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.gpu import layout
from tests.engine.kernels.compiling import ROOT, Job, compile_for_hopper
from tiercel.engine.kernels.quantized_kv import FP8, INT8
from tiercel.engine.kernels.tiles import DECODE_TILES, MAX_SHARES, PREFILL_TILES, Tile

_SHARED_BYTES = 227 * 1024  # of one program on a Hopper GPU
_REGISTERS = 65_536  # of a processor
_GROUP, _BLOCK_SIZE = 4, 16
TWICE = layout.PREFILL_TILES[0]  # the first candidate of the sweep

_STRIDES = (
    *("query_token_stride", "query_head_stride", "out_token_stride", "out_head_stride"),
    *("slot_stride", "row_stride", "head_stride"),
    *("scale_slot_stride", "scale_row_stride", "scale_head_stride"),
)
_POINTERS = ("query", "kv", "scales", "sinks", "out")
_PARTITION = ("parts", "part_starts", "divided", "long_slices", "tile_starts")
_MERGE = {"MAX_PARTS": MAX_SHARES, "STARTS_EARLY": False}
_TYPES = {
    **dict.fromkeys(_POINTERS, "*bf16"),
    **dict.fromkeys(("part_values", "part_peaks"), "*fp32"),
    **dict.fromkeys(("query_starts", "context_lengths", *_PARTITION, "ended"), "*i32"),
    **dict.fromkeys((*_STRIDES, "table_stride", "sequences", "slices", "shares", "window", "kv_heads"), "i32"),
    **dict.fromkeys(("scale", "softcap"), "fp32"),
    "tables": "*i64",
}
_EIGHT_BITS = {"kv": "*i8", "scales": "*i16"}
_UNALIGNED = {"scale_row_stride", "scale_head_stride"}  # of few heads, in 8 bits
_ALIGNED = (*_STRIDES, *_POINTERS, *_PARTITION, "part_values", "part_peaks")


def of_cache(job: Job, cache: int) -> Job:
    """Return the kernel for a cache of a FORMAT: INT8 or FP8."""
    aligned = tuple(name for name in job.aligned if name not in _UNALIGNED)
    warps = max(job.num_warps, 8) if job.kernel == "prefill_kernel" else job.num_warps  # see `with_room_to_widen`
    constants = job.constants | {"FORMAT": cache}
    return replace(job, types=job.types | _EIGHT_BITS, constants=constants, num_warps=warps, aligned=aligned)


def constants_of(head_dim: int, has_all: bool) -> dict[str, int | float | bool | str | None]:
    sizes = {"GROUP": _GROUP, "HEAD_DIM": head_dim, "DIMS": head_dim, "BLOCK_SIZE": _BLOCK_SIZE}
    features = dict.fromkeys(("HAS_WINDOW", "HAS_SOFTCAP", "HAS_SINKS"), has_all)
    return sizes | features | {"PRECISION": "tf32", "FORMAT": 0}


def prefill_job(head_dim: int, has_all: bool, tile: Tile | None = None) -> Job:
    tile = tile or PREFILL_TILES[head_dim, 2]
    sizes = {"ROWS": tile.rows, "TOKENS": tile.rows // _GROUP, "KEYS": tile.keys}
    constants = constants_of(head_dim, has_all) | sizes
    module = "tiercel.engine.kernels.paged_prefill"
    return Job(module, "prefill_kernel", _TYPES, constants, tile.warps, tile.stages, _ALIGNED)


def partition_job(has_window: bool) -> Job:
    constants = {"KEYS": 64, "AT_ONCE": 512, "HAS_WINDOW": has_window}
    return Job("tiercel.engine.kernels.paged_partition", "partition_kernel", _TYPES, constants, aligned=_ALIGNED)


def slice_job() -> Job:
    constants = {"TOKENS": 32, "LEAST_LENGTH": 2, "AT_ONCE": 512}
    return Job("tiercel.engine.kernels.paged_slices", "slice_kernel", _TYPES, constants, aligned=_ALIGNED)


def decode_job(head_dim: int, has_all: bool) -> Job:
    tile = DECODE_TILES[head_dim, 2]
    constants = constants_of(head_dim, has_all) | {"ROWS": tile.rows, "KEYS": tile.keys, "FOLDS_MERGE": False}
    constants |= _MERGE | {"MERGED_HEADS": _GROUP, "AT_ONCE": max(1, 4096 // (head_dim * _GROUP))}
    return Job(
        "tiercel.engine.kernels.paged_decode", "decode_kernel", _TYPES, constants, tile.warps, tile.stages, _ALIGNED
    )


def folded(job: Job) -> Job:
    """Return the decode kernel that merges parts, too, and may start while the kernel before it ends."""
    return replace(job, constants=job.constants | {"FOLDS_MERGE": True, "STARTS_EARLY": True})


def merge_job(head_dim: int) -> Job:
    constants = _MERGE | {"HEAD_DIM": head_dim, "DIMS": head_dim, "AT_ONCE": 4096 // head_dim}
    return Job("tiercel.engine.kernels.paged_decode", "merge_kernel", _TYPES, constants, aligned=_ALIGNED)


def store_job(head_dim: int) -> Job:
    names = ("key_token_stride", "key_head_stride", "value_token_stride", "value_head_stride")
    types = dict.fromkeys(("key", "value", "kv", "scales"), "*bf16") | dict.fromkeys(
        ("slot_ids", "slot_offsets"), "*i64"
    )
    strides = _STRIDES[4:]
    types |= dict.fromkeys((*names, *strides), "i32")
    constants = {"KV_HEADS": 8, "HEAD_DIM": head_dim, "HEADS": 8, "DIMS": head_dim, "FORMAT": 0}
    aligned = ("key", "value", "kv", "scales", *names, *strides)
    return Job("tiercel.engine.kernels.paged_store", "store_kernel", types, constants, aligned=aligned)


JOBS = [
    prefill_job(64, False),
    prefill_job(128, True),
    prefill_job(128, True, TWICE),
    partition_job(has_window=False),
    partition_job(has_window=True),
    slice_job(),
    *(decode_job(head_dim, has_all) for head_dim in (64, 128, 256) for has_all in (False, True)),
    *(folded(decode_job(head_dim, has_all)) for head_dim in (64, 128, 256) for has_all in (False, True)),
    folded(of_cache(decode_job(128, True), INT8.value)),
    merge_job(128),
    merge_job(512),
    store_job(128),
    *(
        of_cache(job, cache)
        for job in (prefill_job(64, False), prefill_job(128, False), decode_job(128, True), store_job(128))
        for cache in (INT8.value, FP8.value)
    ),
]


@pytest.mark.slow
def test_the_kernels_fit_a_hopper_gpu_and_keep_their_numbers_in_registers() -> None:
    compiled = compile_for_hopper(JOBS)
    if compiled is None:
        pytest.skip("this machine has no compiler for CUDA kernels")

    for job, made in zip(JOBS, compiled, strict=True):
        print(
            job.kernel,
            {
                name: job.constants.get(name)
                for name in ("HEAD_DIM", "ROWS", "KEYS", "HAS_WINDOW", "FORMAT", "FOLDS_MERGE")
            },
            f"registers={made.registers} shared={made.shared_bytes} spilled={made.spilled_bytes}",
        )
        assert made.spilled_bytes == 0
        assert made.shared_bytes <= _SHARED_BYTES
        assert made.registers * 32 * job.num_warps <= _REGISTERS
        if (
            job.constants.get("ROWS") == TWICE.rows
        ):  # two programs fit a processor at a time, and 1 KiB each is reserved
            assert 2 * (made.shared_bytes + 1024) <= _SHARED_BYTES + 1024
            assert 2 * made.registers * 32 * job.num_warps <= _REGISTERS
        if job.kernel in ("prefill_kernel", "decode_kernel"):
            assert (
                "cp.async.cg.shared.global" in made.ptx
            )  # keys and values are loaded 16 bytes at a time, ahead of their use
            assert "mma" in made.ptx
        if job.constants.get("STARTS_EARLY"):
            assert "griddepcontrol.wait" in made.ptx
            stored, added = made.ptx.rindex("st.global", 0, made.ptx.index("atom.")), made.ptx.index("atom.")
            assert "atom.global.gpu.acq_rel.add.u32" in made.ptx
            assert "bar.sync" in made.ptx[stored:added]  # the stores of all threads precede the count of one
            assert "ld.global.cg" in made.ptx[added:]
        if job.kernel == "prefill_kernel":
            assert "wgmma.mma_async" in made.ptx  # the tensor cores of this generation


@pytest.mark.slow
def test_no_step_of_serving_waits_for_a_compiler() -> None:
    """The keys of 300 numbers of sequences: the prefill, and of the decode the partition, the parts, the merge."""
    shapes = [(8, 4, 128, "bfloat16"), (2, 7, 64, "bfloat16"), (4, 8, 72, "float16"), (3, 1, 20, "float32")]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, ROOT / "tests/engine/attention/specialising.py"],
        input=json.dumps(shapes),
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    for (*_, dtype), found in zip(shapes, json.loads(ran.stdout), strict=True):
        kernels = ("partition_kernel", "decode_kernel", "merge_kernel", "slice_kernel", "prefill_kernel")
        assert found["first"] == found["all"] == dict.fromkeys(kernels, 1)
        assert found["precisions"] == ["ieee" if dtype == "float32" else "tf32"]
