"""The choice between native products and oneDNN's: measured once, kept for the next start, made for each shape."""

from pathlib import Path

import pytest
import torch

from tests.engine.native.classes import library_of
from tiercel.engine.measure.cache_file import CacheFile
from tiercel.engine.measure.product_choice import ProductChoice, StoredChoices, compare_products, open_product_choice
from tiercel.engine.models.layers import can_pack
from tiercel.engine.models.precision import Precision
from tiercel.engine.native.table import CpuClass


class Measured:
    """Native products are faster for up to 100 outputs; counts the measurements."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, outputs: int, inputs: int) -> float:
        self.shapes.append((outputs, inputs))
        return 1.5 if outputs <= 100 else 0.5


def open_choice(folder: Path | None, measure: Measured, fact: str = "machine") -> ProductChoice:
    return ProductChoice(CacheFile(str(folder) if folder else None, "products", {"fact": fact}, StoredChoices), measure)


def test_a_shape_is_measured_once(tmp_path: Path) -> None:
    measured = Measured()
    choice = open_choice(tmp_path, measured)

    assert [choice.prefers_native(*shape) for shape in ((100, 7), (101, 7), (100, 7), (101, 7))] == [True, False] * 2
    assert measured.shapes == [(100, 7), (101, 7)]


def test_choices_are_kept_for_the_same_machine_only(tmp_path: Path) -> None:
    for shape in ((100, 7), (101, 7)):
        open_choice(tmp_path, Measured()).prefers_native(*shape)
    again, elsewhere = Measured(), Measured()

    assert open_choice(tmp_path, again).prefers_native(100, 7)
    assert not open_choice(tmp_path, again).prefers_native(101, 7)
    open_choice(tmp_path, elsewhere, "another").prefers_native(100, 7)

    assert again.shapes == []
    assert elsewhere.shapes == [(100, 7)]


def test_a_damaged_file_and_no_folder_only_cost_a_measurement(tmp_path: Path) -> None:
    open_choice(tmp_path, Measured()).prefers_native(100, 7)
    for path in tmp_path.iterdir():
        path.write_text('{"version": 1}')

    for folder in (tmp_path, None):
        measured = Measured()
        assert open_choice(folder, measured).prefers_native(100, 7)
        assert measured.shapes == [(100, 7)]


def test_both_products_are_measured(tmp_path: Path) -> None:
    if not can_pack(Precision.of(torch.bfloat16), torch.device("cpu")):
        pytest.skip("torch has no packed products in bfloat16 here")
    library = library_of(CpuClass.PORTABLE)

    assert 0 < compare_products(library, 2, 96, 64) < 1000
    assert open_product_choice(str(tmp_path), 1, library).prefers_native(96, 64) in (True, False)
    assert len(list(tmp_path.iterdir())) == 1
