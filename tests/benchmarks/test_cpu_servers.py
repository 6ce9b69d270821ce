"""The servers of benchmarks/cpu without running them, and the rounds with stand-ins."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.cpu import process_tree
from benchmarks.cpu.servers import Conversion, Place, convert, find_servers, installed


def place(folder: Path, **changes: object) -> Place:
    fields = {"model": Path("/models/small"), "peers": folder, "tiercel": None, "first_port": 8123, "threads": 3}
    return Place(**{**fields, "kind": "avx2", **changes})  # type: ignore[arg-type]


def test_servers_are_ours_and_the_peers_that_are_installed(tmp_path: Path) -> None:
    for name in ("llamacpp", "vllm", "openvino"):
        (tmp_path / name).mkdir()
    names = installed(tmp_path)
    assert names == ["tiercel", "llamacpp", "vllm", "openvino"]
    servers = find_servers(place(tmp_path, flags={"tiercel": ["--dtype", "float32"]}), names)
    for index, server in enumerate(servers):
        assert server.port == 8123 + index
        assert str(server.port) in server.command
        assert "3" in server.command or server.variables.get("OMP_NUM_THREADS") == "3"
    ours, llamacpp, vllm, _ = servers
    assert ours.command[-2:] == ["--dtype", "float32"]
    assert llamacpp.conversion is not None
    assert llamacpp.conversion.product == tmp_path / "converted" / "small.gguf"
    assert vllm.command[vllm.command.index("--dtype") + 1] == "float32"
    (vllm,) = find_servers(place(tmp_path, kind="avx512_bf16"), ["vllm"])
    assert vllm.command[vllm.command.index("--dtype") + 1] == "bfloat16"


def test_quantised_weights_are_compared_with_llamacpp_only(tmp_path: Path) -> None:
    for name in ("llamacpp", "vllm"):
        (tmp_path / name).mkdir()
    ours, llamacpp = find_servers(place(tmp_path, quantization="int4"), ["tiercel", "llamacpp"])
    assert ours.command[-2:] == ["--quantization", "int4"]
    assert llamacpp.conversion is not None
    assert llamacpp.conversion.product == tmp_path / "converted" / "small-int4.gguf"
    program = str(tmp_path / "llamacpp/build/bin/llama-quantize")
    assert llamacpp.conversion.command[-3:] == ["--quantize", program, "q4_0"]
    with pytest.raises(SystemExit):
        find_servers(place(tmp_path, quantization="int8"), ["vllm"])


def test_a_checkout_is_served_by_its_own_environment(tmp_path: Path) -> None:
    (server,) = find_servers(place(tmp_path, tiercel=tmp_path / "checkout"), ["tiercel"])
    assert server.command[0] == str(tmp_path / "checkout/.venv/bin/tiercel")
    assert server.variables["PYTHONPATH"] == str(tmp_path / "checkout")


@pytest.mark.parametrize("name", ["vllm", "other"])
def test_servers_that_are_not_installed_or_unknown_are_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        find_servers(place(tmp_path), [name])
    assert name in capsys.readouterr().err


def conversion(folder: Path, code: int = 0) -> Conversion:
    """Return a model, and a command that writes the product and ends with `code`."""
    (folder / "model").mkdir()
    (folder / "model/weights").touch()
    product = folder / "converted" / "model"
    script = f"import pathlib, sys; p = pathlib.Path({str(product)!r}); p.write_text('made'); sys.exit({code})"
    return Conversion([sys.executable, "-c", script], folder / "model", product)


@pytest.mark.parametrize("code", [0, 1])
def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path, code: int) -> None:
    wanted = conversion(tmp_path, code)
    assert convert(wanted, tmp_path / "log") == (code == 0)
    assert wanted.product.exists() == (code == 0)


def test_a_model_is_converted_again_only_when_it_changed(tmp_path: Path) -> None:
    wanted = conversion(tmp_path)
    wanted.product.parent.mkdir()
    wanted.product.write_text("kept", encoding="utf-8")
    os.utime(wanted.model / "weights", (0, 0))
    assert convert(wanted, tmp_path / "log")
    assert wanted.product.read_text(encoding="utf-8") == "kept"
    later_s = time.time() + 60
    os.utime(wanted.model / "weights", (later_s, later_s))
    assert convert(wanted, tmp_path / "log")
    assert wanted.product.read_text(encoding="utf-8") == "made"


def test_a_tree_is_paused_with_its_descendants_and_its_memory_is_counted() -> None:
    child = "import time; print('up', flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            pids = process_tree.tree(process.pid)
            assert len(pids) == 2
            assert pids[0] == process.pid
            memory = process_tree.memory(pids)
            assert memory.resident > 1_000_000
            assert memory.kv == 0
            process_tree.pause(process.pid)
            assert [_state(pid) for pid in pids] == ["T", "T"]
            process_tree.resume(process.pid)
            assert "T" not in [_state(pid) for pid in pids]
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def _state(pid: int) -> str:
    """Return the state of a process once it has had time to react to a signal."""
    time.sleep(0.05)
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
