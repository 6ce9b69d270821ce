"""Products of 16-bit numbers by the persistent kernel, compared with exact ones, and compiled for a Hopper GPU."""

import random

import pytest
import torch

from tests.engine.attention.scene import KERNEL_DEVICE
from tests.engine.kernels.checking import draw, relative_error
from tests.engine.kernels.compiling import Job, compile_for_hopper
from tiercel.engine.kernels.dense_product import DenseTile, choose_dense_tile, multiply_dense

TILES = (DenseTile(64, 32, 4, 3), DenseTile(32, 64, 4, 3), DenseTile(128, 128, 8, 3))
PROCESSORS = 132


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seed", range(6))
def test_products_of_ragged_shapes_are_those_of_torch(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    rows, outputs, inputs = rng.choice([1, 7, 64, 65, 130]), 8 * rng.randrange(1, 20), 8 * rng.randrange(1, 40)
    x, weight = draw(seed, rows, inputs, dtype=dtype), draw(seed + 1, outputs, inputs, dtype=dtype)
    bias = draw(seed + 2, outputs, dtype=dtype) if rng.random() < 0.5 else None
    wanted = torch.matmul(x.double(), weight.double().T) + (0 if bias is None else bias.double())
    device_bias = None if bias is None else bias.to(KERNEL_DEVICE)

    out = multiply_dense(
        x.to(KERNEL_DEVICE), weight.to(KERNEL_DEVICE), device_bias, rng.choice([1, 3, 200]), rng.choice(TILES)
    )

    assert out.dtype is dtype
    assert out.shape == (rows, outputs)
    assert relative_error(out.cpu(), wanted) < (5e-4 if dtype is torch.float16 else 4e-3)  # one rounding


def test_rows_may_be_a_view_and_other_rows_do_not_matter(poisoned: None) -> None:
    wide = draw(0, 20, 200, dtype=torch.float16).to(KERNEL_DEVICE)
    weight = draw(1, 24, 96, dtype=torch.float16).to(KERNEL_DEVICE)
    x = wide[:, 3:99]  # begins beside a multiple of 16 bytes
    wide[7, 50] = torch.nan

    out = multiply_dense(x, weight, None, 4, TILES[0])

    assert out[7].isnan().all()
    others = [row for row in range(20) if row != 7]
    assert relative_error(out[others].cpu(), (x.double() @ weight.double().T)[others].cpu()) < 5e-4
    assert multiply_dense(x[:0], weight, None, 4).shape == (0, 24)


@pytest.mark.parametrize("outputs", [4096, 6144, 28672, 128_256, 40])
@pytest.mark.parametrize("rows", [64, 128, 192, 256, 384, 512])
def test_tiles_occupy_the_processors_where_there_are_enough_outputs(rows: int, outputs: int) -> None:
    tile = choose_dense_tile(rows, outputs, PROCESSORS)
    tiles = -(-rows // tile.rows) * -(-outputs // tile.columns)
    assert tiles >= PROCESSORS or tile.columns == 32
    wider = -(-rows // tile.rows) * -(-outputs // (2 * tile.columns))
    assert wider < PROCESSORS or tile.columns == 256


def dense_job(tile: DenseTile, has_bias: bool) -> Job:
    shapes = {"x": (tile.rows, 64), "weight": (tile.columns, 64), "out": (tile.rows, tile.columns)}
    types = {name: f"tensordesc<bf16[{height},{width}]>" for name, (height, width) in shapes.items()}
    types |= {"bias": "*bf16"} | dict.fromkeys(("rows", "outputs", "inputs"), "i32")
    constants = {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": 64, "HAS_BIAS": has_bias}
    module = "tiercel.engine.kernels.dense_product"
    return Job(module, "dense_kernel", types, constants, tile.warps, tile.stages, ("bias", "outputs", "inputs"))


@pytest.mark.slow
def test_the_kernel_fits_a_hopper_gpu_and_loads_by_the_accelerator() -> None:
    tiles = {choose_dense_tile(rows, outputs, PROCESSORS) for rows in (64, 128, 512) for outputs in (40, 4096, 28672)}
    jobs = [dense_job(tile, has_bias) for tile in sorted(tiles, key=str) for has_bias in (False, True)]
    compiled = compile_for_hopper(jobs)
    if compiled is None:
        pytest.skip("this machine has no compiler for CUDA kernels")
    for job, made in zip(jobs, compiled, strict=True):
        print(job.constants, f"registers={made.registers} shared={made.shared_bytes} spilled={made.spilled_bytes}")
        assert made.spilled_bytes == 0
        assert made.shared_bytes <= 227 * 1024
        assert made.registers * 32 * job.num_warps <= 65_536
        assert "cp.async.bulk.tensor" in made.ptx
        assert "wgmma.mma_async" in made.ptx
