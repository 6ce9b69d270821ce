"""The comparison with other servers, without running them."""

import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from tests.loadtest.example_run import one_tenant_run
from tiercel.loadtest.results.result_file import write_result

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def compare() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("compare", ROOT / "benchmarks/peers/compare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["compare"]


def test_the_servers_are_ours_and_the_peers_that_are_installed(compare: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "llamacpp").mkdir()
    ours, llamacpp = compare.servers(Path("/models/small"), tmp_path, 8123, 3)
    assert [ours.name, llamacpp.name] == ["tiercel", "llamacpp"]
    for server in (ours, llamacpp):
        assert server.command[server.command.index("--port") + 1] == "8123"
        assert "3" in server.command
    assert llamacpp.conversion.product == tmp_path / "converted" / "small.gguf"


def conversion(compare: ModuleType, folder: Path, code: int = 0) -> Any:
    """Return a model, and a command that writes the product and ends with `code`."""
    (folder / "model").mkdir()
    (folder / "model/weights").touch()
    product = folder / "converted" / "model"
    script = f"import pathlib, sys; p = pathlib.Path({str(product)!r}); p.write_text('made'); sys.exit({code})"
    return compare.Conversion([sys.executable, "-c", script], folder / "model", product)


@pytest.mark.parametrize("code", [0, 1])
def test_a_conversion_that_fails_leaves_nothing_behind(compare: ModuleType, tmp_path: Path, code: int) -> None:
    wanted = conversion(compare, tmp_path, code)
    assert compare.convert(wanted, tmp_path / "log") == (code == 0)
    assert wanted.product.exists() == (code == 0)


def test_a_model_is_converted_again_only_when_it_changed(compare: ModuleType, tmp_path: Path) -> None:
    wanted = conversion(compare, tmp_path)
    wanted.product.parent.mkdir()
    wanted.product.write_text("kept", encoding="utf-8")
    os.utime(wanted.model / "weights", (0, 0))
    assert compare.convert(wanted, tmp_path / "log")
    assert wanted.product.read_text(encoding="utf-8") == "kept"
    later_s = time.time() + 60
    os.utime(wanted.model / "weights", (later_s, later_s))
    assert compare.convert(wanted, tmp_path / "log")
    assert wanted.product.read_text(encoding="utf-8") == "made"


def test_the_table_marks_disturbed_rounds(compare: ModuleType, tmp_path: Path) -> None:
    run = one_tenant_run()
    busy = msgspec.structs.replace(run, client=msgspec.structs.replace(run.client, saturated=True, reason="late"))
    write_result(run, tmp_path / "vllm-one-0.json")
    write_result(busy, tmp_path / "vllm-one-1.json")
    _, row = compare.table(tmp_path, ["tiercel", "vllm"], ["one"])
    assert row.startswith("one        vllm")
    assert row.endswith("disturbed: 1 of 2")
