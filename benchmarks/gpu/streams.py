"""64 streams over HTTP: the share of the end-to-end time outside of the model.

The model's time is the device time of the same number of requests of the same lengths without HTTP, between marks on
its stream. The rest of the end-to-end time counts as outside: HTTP, text, planning that was not hidden, waiting.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.dummy import LLAMA_3_8B, write_model
from benchmarks.gpu.engine import UNBOUND, asked, device_s, draw, engine_settings, open_engine
from tiercel.values.errors import TiercelError

STREAMS, PROMPT, OUTPUT = 64, 1024, 256
FLAGS: dict[str, object] = {
    "max_num_seqs": STREAMS,
    "max_num_batched_tokens": 8192,
    "max_model_len": 4096,
    "num_gpu_blocks_override": 2 * STREAMS * (PROMPT + OUTPUT) // 16,  # two engines use the device for a while
    "kv_host_size": "0",
}
_START_S = 60.0
_READY = re.compile(r"tiercel serves (\S+) at (http://\S+)")
_TIERCEL = [sys.executable, "-c", "import sys; from tiercel.cli.main import main; sys.exit(main(sys.argv[1:]))"]


def run(bench: Bench) -> None:
    """Record `model_s`, `end_to_end_s` and `outside_share`."""
    model = write_model(bench.folder / "llama-3-8b-words", LLAMA_3_8B, has_tokenizer=True)
    measure(bench, model, {"device": "cuda", **FLAGS}, STREAMS, PROMPT, OUTPUT)


def measure(bench: Bench, model: Path, flags: dict[str, object], streams: int, prompt: int, output: int) -> None:
    """Measure one model, first without HTTP, then with HTTP."""
    with open_engine(engine_settings(bench.folder, model=str(model), **flags)) as engine:
        engine.run(asked(draw(engine, streams, 64, 16, seed=99)))
        ran = engine.run(asked(draw(engine, streams, prompt, output, seed=0)))
    model_s = device_s(ran)
    bench.record("model_s", model_s, "s", elapsed_without_http=ran.elapsed_s)
    words = ["--load-format", "dummy", "--enable-prefix-caching=false"]
    for name, value in {**UNBOUND, **flags}.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    with serving(model, words, bench.folder / "serve.log") as url:
        told = load(url, model, bench.folder, streams, prompt, output)
    tokens = told["total_output_tokens"]
    if told["completed"] != streams or tokens != streams * output:
        raise TiercelError("bench.streams", "not every stream said all", completed=told["completed"], tokens=tokens)
    end_to_end_s = told["mean_e2el_ms"] / 1e3
    bench.record("end_to_end_s", end_to_end_s, "s", p99=told["p99_e2el_ms"] / 1e3, streams=streams)
    bench.record("outside_share", 1 - model_s / end_to_end_s, "", prompt=prompt, output=output)
    bench.record("tokens_per_s", tokens / told["duration"], "tokens/s")


def load(url: str, model: Path, folder: Path, streams: int, prompt: int, output: int) -> dict:
    """Return the result file of a load test that sends all requests at once, after a warm-up that is not counted."""
    words = ["bench", "serve", "--base-url", url, "--tokenizer", str(model), "--ignore-eos", "--disable-tqdm"]
    words += ["--num-prompts", str(streams), "--max-concurrency", str(streams), "--num-warmups", str(min(8, streams))]
    words += ["--random-input-len", str(prompt), "--random-output-len", str(output), "--percentile-metrics", "e2el"]
    words += ["--save-result", "--result-dir", str(folder), "--result-filename", "streams-result.json"]
    subprocess.run([*_TIERCEL, *words], check=True, env=_environment(), stdout=subprocess.DEVNULL)
    return json.loads((folder / "streams-result.json").read_text(encoding="utf-8"))


@contextlib.contextmanager
def serving(model: Path, flags: list[str], log: Path) -> Iterator[str]:
    """Run the daemon during the block, and yield its address. Errors: TiercelError with its last line."""
    with log.open("w") as out:
        words = [*_TIERCEL, "serve", str(model), "--port", "0", *flags]
        process = subprocess.Popen(words, env=_environment(), stdout=out, stderr=out)
    try:
        end_s = time.monotonic() + _START_S
        while not (found := _READY.search(log.read_text())):
            if process.poll() is not None or time.monotonic() > end_s:
                lines = log.read_text().strip().splitlines() or ["it said nothing"]
                raise TiercelError("bench.no_server", lines[-1])
            time.sleep(0.1)
        yield found[2]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    """Return the environment without settings of tiercel."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("TIERCEL_", "VLLM_"))}
