"""Shares of limits and the limits' program in benchmarks/cpu, without measuring."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.cpu.kernel_trials import Shapes, TimedWork, Work
from benchmarks.cpu.kernels import row_of
from benchmarks.cpu.limits import PEAK_BY_CLASS, compiler_flags, measure_limits
from benchmarks.cpu.processor import CLASSES, ProcessorClass
from tiercel.engine.models.config import parse_decoder, read_config

SOURCE = Path(__file__).resolve().parents[2] / "benchmarks/cpu/limits.cpp"
LIMITS = {"read_gb_s": 10.0, "fp32_gflop_s": 100.0, "bf16_gflop_s": 400.0, "amx_bf16_gflop_s": 2000.0}
QWEN = """{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 32768, "hidden_size": 896,
"intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": true, "hidden_act": "silu"}"""


def timed(name: str, gigabytes: float, gigaflop: float, seconds: float) -> TimedWork:
    return TimedWork(name, Work(1e9 * gigabytes, 1e9 * gigaflop), {"ours": seconds, "torch": 2 * seconds})


def test_attention_is_compared_with_the_bandwidth_and_prefill_with_the_peak_of_the_class() -> None:
    row = row_of(timed("attention.m.512", 1.0, 1e6, 0.4), LIMITS, "avx2")
    assert (row.limit, row.share) == ("read_gb_s", pytest.approx(0.25))
    assert row.values == {"ours": 400.0, "torch": 800.0}
    shares = {kind: row_of(timed("prefill.m", 1e6, 200.0, 4.0), LIMITS, kind) for kind in CLASSES}
    assert [row.limit for row in shares.values()] == [PEAK_BY_CLASS[kind] for kind in CLASSES]
    assert [row.share for row in shares.values()] == pytest.approx([0.5, 0.5, 0.125, 0.025])


def test_products_are_compared_with_the_limit_that_takes_longer() -> None:
    few, many = timed("linear.m.M1", 1.0, 1.0, 0.2), timed("linear.m.M256", 1.0, 100.0, 2.0)
    assert (row_of(few, LIMITS, "avx2").limit, row_of(few, LIMITS, "avx2").share) == ("read_gb_s", pytest.approx(0.5))
    assert (row_of(many, LIMITS, "avx2").limit, row_of(many, LIMITS, "avx2").share) == ("fp32_gflop_s", 0.5)


def test_the_shapes_are_those_of_the_joined_layers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(QWEN, encoding="utf-8")
    shapes = Shapes.of(parse_decoder(read_config(tmp_path)))
    assert shapes.layers["qkv"] == (1152, 896, 24)
    assert shapes.layers["gate_up"] == (9728, 896, 24)
    layer = 1152 * 896 + 896 * 896 + 9728 * 896 + 896 * 4864
    assert shapes.weights() == 24 * layer + 32768 * 896
    assert shapes.weights() - shapes.weights(with_head=False) == 32768 * 896


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.sampled(1)
def test_the_program_compiles_for_every_class(kind: ProcessorClass) -> None:
    if kind != "portable" and platform.machine() != "x86_64":
        pytest.skip("classes of x86-64")
    flags = [*compiler_flags(kind), "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    subprocess.run(["g++", *flags, str(SOURCE)], check=True)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SystemExit) as refusal:
        measure_limits("portable", 1)
    assert refusal.value.code == 2
    assert "no-such-compiler is missing" in capsys.readouterr().err
