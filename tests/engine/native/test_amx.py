"""Products of the AMX class in blocks of rows, and the emulation of tile registers that computes them without AMX."""

import random
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engine.native.classes import library_of
from tests.engine.native.emulated import open_emulated
from tests.seeds import fresh_seeds
from tiercel.engine.native.build import FOLDER, LIBRARY_NAME, SOURCES, CompilerError, find_compiler
from tiercel.engine.native.library import NativeLibrary, open_library
from tiercel.engine.native.table import TYPE_BY_DTYPE, CpuClass

BF16 = TYPE_BY_DTYPE[torch.bfloat16]
GUARD = 4096  # bytes of NaN behind every operand

ALLOWED = {
    "even and odd apart": 2.0**24 + 2,
    "in order": 2.0**24,
    "denormal operand": 0,
    "denormal result": 0,
    "denormal sum": 0,
    "rest of a tile": 16,
    "integers": 8 * 128 * 128 - 3,
    "integers of both signs": 4 * (-128 * 127 - 127 * 127),
}
REFUSED = {
    "not configured": "the tiles are not configured",
    "released": "the tiles are not configured",
    "no such tile": "the tile has no rows in this configuration",
    "too many rows": "LDTILECFG: a tile has up to 16 rows of 64 bytes",
    "too many bytes": "LDTILECFG: a tile has up to 16 rows of 64 bytes",
    "rows without bytes": "LDTILECFG: a tile has rows without bytes, or bytes without rows",
    "reserved": "LDTILECFG: a reserved byte is not 0",
    "palette": "LDTILECFG: there are palettes 0 and 1",
    "other rows": "TDPBF16PS: sums and x differ in rows",
    "other bytes": "TDPBF16PS: sums and weights differ in the bytes of a row",
    "other pairs": "TDPBF16PS: x has not as many pairs as weights has rows",
    "integers, other rows": "TDPBSSD: sums and x differ in rows",
    "integers, other bytes": "TDPBSSD: sums and weights differ in the bytes of a row",
    "integers, other quads": "TDPBSSD: x has not as many quads as weights has rows",
}


def poisoned(source: Tensor) -> Tensor:
    """Return the bytes of a tensor, with NaN behind them."""
    return torch.cat([source.flatten().view(torch.uint8), torch.full((GUARD,), 0xFF, dtype=torch.uint8)])


def multiply(library: NativeLibrary, x: Tensor, weight: Tensor) -> Tensor:
    """Return the product, computed from poisoned operands."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    size = library.linear_bytes(outputs, inputs)
    packed, activations = torch.full((size + GUARD,), 0xFF, dtype=torch.uint8), poisoned(x)
    y = torch.full((rows + 1, outputs), float("nan"), dtype=torch.bfloat16)
    library.linear_pack(BF16, weight.data_ptr(), packed.data_ptr(), outputs, inputs)
    library.linear(
        *(BF16, BF16, activations.data_ptr(), packed.data_ptr(), None, y.data_ptr()), *(rows, outputs, inputs)
    )
    assert y[rows].isnan().all()
    assert (packed[size:] == 0xFF).all()
    return y[:rows]


def shapes(seed: int) -> list[tuple[int, int, int]]:
    """Return rows, outputs and inputs: some registers of rows, several blocks of rows, and blocks of one pass."""
    rng = random.Random(seed)
    few = [(rng.randint(1, 70), rng.randint(1, 100), rng.randint(1, 200)) for _ in range(20)]
    exact = [(rows, 64, 32 * rng.randint(1, 5)) for rows in (1, 15, 16, 17, 31, 32, 33, 48, 64)]
    return [*few, *exact, (rng.randint(257, 600), 70, rng.randint(1, 50)), (rng.randint(33, 80), 33, 16421)]


@pytest.mark.parametrize("seed", [1, *fresh_seeds(2)])
@pytest.mark.sampled(1)
def test_products_agree_with_float64_in_poisoned_memory(seed: int) -> None:
    draw, library = torch.Generator().manual_seed(seed), library_of(CpuClass.AMX)
    assert library.switched_off == ()
    for index, (rows, outputs, inputs) in enumerate(shapes(seed)):
        weight = torch.randn(outputs, inputs, generator=draw).bfloat16()
        x = torch.randn(rows, inputs, generator=draw).bfloat16()
        expected = x.double() @ weight.double().T
        torch.set_num_threads(1 + index % 2)

        result = multiply(library, x, weight)

        torch.set_num_threads(1)
        error = (result.double() - expected).abs().max() / expected.abs().max()
        assert error <= 1e-2, (seed, rows, outputs, inputs)
        some = x[rows // 3 : rows // 3 + 5]
        assert torch.equal(multiply(library, some, weight), result[rows // 3 : rows // 3 + 5])


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a program that uses the emulated registers."""
    path = tmp_path_factory.mktemp("program") / "emulated_tiles"
    try:
        compiler = find_compiler().split()
    except CompilerError as exc:
        pytest.skip(str(exc))
    source = Path(__file__).parent / "emulated_tiles.cpp"
    subprocess.run([*compiler, "-std=c++17", f"-I{SOURCES}", str(source), "-o", str(path)], check=True)
    return path


@pytest.mark.parametrize(("case", "expected"), ALLOWED.items(), ids=list(ALLOWED))
def test_emulated_registers_compute_as_the_manual_says(program: Path, case: str, expected: float) -> None:
    ran = subprocess.run([program, case], capture_output=True, text=True, check=True)

    assert float(ran.stdout) == expected


@pytest.mark.parametrize(("case", "message"), REFUSED.items(), ids=list(REFUSED))
def test_emulated_registers_refuse_what_the_processor_refuses(program: Path, case: str, message: str) -> None:
    ran = subprocess.run([program, case], capture_output=True, text=True, check=False)

    assert ran.returncode != 0
    assert ran.stderr == f"emulated tiles: {message}\n"


def test_a_class_that_was_not_compiled_has_no_table() -> None:
    found = open_library(FOLDER / LIBRARY_NAME)
    if isinstance(found, str):
        pytest.skip(found)
    emulated = open_emulated(FOLDER, CpuClass(found.tiercel_class()))

    assert emulated.tiercel_kernels(CpuClass.AMX)
    assert not emulated.tiercel_kernels(CpuClass.AVX2)
