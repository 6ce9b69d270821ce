"""vLLM with the requests of section `throughput`, in an environment of its own, in the same run."""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.dummy import LLAMA_3_8B, write_model
from benchmarks.gpu.throughput import MIXES

_SCRIPT = Path(__file__).resolve().parents[1] / "cpu" / "offline_vllm.py"
_START_S = 100.0  # vLLM compiles kernels and records graphs


def run(bench: Bench) -> None:
    """Figures `MIX.total_tokens_per_s` of vLLM, and `MIX.ratio`: tiercel over vLLM."""
    assert bench.peer is not None
    model = write_model(bench.folder / "llama-3-8b", LLAMA_3_8B)
    for mix in MIXES:
        requests = bench.folder / f"requests-{mix.name}.jsonl"
        ours = bench.earlier(f"throughput.{mix.name}.total_tokens_per_s")
        if ours is None or not requests.is_file():
            bench.fail(mix.name, "section throughput measured nothing to compare with in this run")
            continue
        if bench.has_time(mix.name, _START_S):
            with bench.part(mix.name):
                result = measure(bench.peer, model, requests, bench.folder / f"vllm-{mix.name}.json", bench.left_s)
                rate = float(result["tokens_per_second"])
                facts = {"vllm": result["versions"].get("vllm", "unknown"), "seconds": result["elapsed_time"]}
                bench.record(f"{mix.name}.total_tokens_per_s", rate, "tokens/s", **facts)
                bench.record(f"{mix.name}.ratio", ours / rate, "x")


def measure(peer: Path, model: Path, requests: Path, out: Path, patience_s: float) -> dict:
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
    words += ["--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "1024"]
    words += ["--max-num-batched-tokens", "16384", "--gpu-memory-utilization", "0.92", "--output-json", str(out)]
    subprocess.run(words, env=env, check=True, timeout=max(1.0, patience_s), stdout=subprocess.DEVNULL)
    return json.loads(out.read_text(encoding="utf-8"))
