"""vLLM with the requests of section `throughput`, in an environment of its own, in the same run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.dummy import LLAMA_3_8B, write_model
from benchmarks.gpu.throughput import MIXES, Mix

_SCRIPT = Path(__file__).resolve().parents[1] / "cpu" / "offline_vllm.py"
_START_S = 100.0  # vLLM compiles kernels and records graphs
RUNS = 2  # of each list in each configuration; the fastest one counts, and the first may still compile


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """The limits of a step of the peer."""

    sequences: int
    step_tokens: int

    @property
    def name(self) -> str:
        """The name in figures."""
        return f"{self.sequences}_{self.step_tokens}"


LIMITS = (
    PeerLimits(512, 8192),
    PeerLimits(1024, 16_384),
)  # those of section `throughput`, and those of vLLM's own bench

Measure = Callable[[Path, Path, Path, Path, float, PeerLimits], dict]
"""Runs the peer: its folder, model, requests, result file, patience in seconds, limits. Returns its result."""


def measure(peer: Path, model: Path, requests: Path, out: Path, patience_s: float, limits: PeerLimits) -> dict:
    """Return the result of the peer's script. Errors: subprocess.SubprocessError if it fails or takes too long."""
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1"}
    python = peer / "bin" / "python"
    is_environment = python.is_file()  # else a folder to import from, together with the installed torch
    env = {**os.environ, **quiet, "PYTHONPATH": "" if is_environment else str(peer)}
    words = [
        str(python) if is_environment else sys.executable,
        str(_SCRIPT),
        "--requests",
        str(requests),
        "--model",
        str(model),
    ]
    words += ["--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "4096", "--num-runs", str(RUNS)]
    words += ["--max-num-seqs", str(limits.sequences), "--max-num-batched-tokens", str(limits.step_tokens)]
    words += ["--gpu-memory-utilization", "0.92", "--output-json", str(out)]
    subprocess.run(words, env=env, check=True, timeout=max(1.0, patience_s), stdout=subprocess.DEVNULL)
    return json.loads(out.read_text(encoding="utf-8"))


def run(bench: Bench, measure: Measure = measure) -> None:
    """Figures `MIX.LIMITS.total_tokens_per_s` of vLLM; `MIX.total_tokens_per_s`: its best; `MIX.ratio`: ours over that.

    The best of what was measured: with one configuration left out, the ratio says so.
    """
    assert bench.peer is not None
    model = write_model(bench.folder / "llama-3-8b", LLAMA_3_8B)
    for mix in MIXES:
        ours = bench.earlier(f"throughput.{mix.name}.total_tokens_per_s")
        if ours is None or not _requests(bench, mix).is_file():
            bench.fail(mix.name, "section throughput measured nothing to compare with in this run")
            continue
        best_by_limits = {
            limits.name: best for limits in LIMITS if (best := _measure_mix(bench, measure, model, mix, limits))
        }
        if best_by_limits:
            best = max(best_by_limits.values())
            facts = {"configurations": " ".join(best_by_limits), "is_complete": len(best_by_limits) == len(LIMITS)}
            bench.record(f"{mix.name}.total_tokens_per_s", best, "tokens/s", **facts)
            bench.record(f"{mix.name}.ratio", ours / best, "x", **facts)


def _measure_mix(bench: Bench, measure: Measure, model: Path, mix: Mix, limits: PeerLimits) -> float | None:
    """Return tokens per second of the fastest run; None if there was no time, or it failed."""
    name = f"{mix.name}.{limits.name}"
    if not bench.has_time(name, _START_S):
        return None
    assert bench.peer is not None
    with bench.part(name):
        out = bench.folder / f"vllm-{mix.name}-{limits.name}.json"
        result = measure(bench.peer, model, _requests(bench, mix), out, bench.left_s, limits)
        rate, seconds = float(result["tokens_per_second"]), result["facts"]["run_seconds"]
        facts = {"vllm": result["versions"].get("vllm", "unknown"), "slowest_over_fastest": max(seconds) / min(seconds)}
        bench.record(f"{name}.total_tokens_per_s", rate, "tokens/s", runs=len(seconds), **facts)
        return rate
    return None


def _requests(bench: Bench, mix: Mix) -> Path:
    return bench.folder / f"requests-{mix.name}.jsonl"
