"""Time to refuse a request under overload: at gate one, or after tokenising at gate two.

    python benchmarks/gate_one.py                         four times the rate that the engine serves, for 20 s
    python benchmarks/gate_one.py --gate 2
    python benchmarks/gate_one.py --overload 8 --seconds 60 --tenants 1000

Runs the real HTTP process (uvicorn, tokenising, streams) with the fake engine of the tests, which serves `--rate`
requests per second. This process sends `--overload` times that rate, each request as a stream: half of them from a
tenant with a limit per minute that is soon used up (429), half from a tenant without one (503). At gate one the limit
counts requests and the 503 comes from a full queue; at gate two the limit counts tokens and the 503 comes from a goal
of 1 s for the first token, which the queue of the fake engine cannot keep. Prompts are texts of `--words` times nine
words. Prints one JSON line: the latency of refusals by percentile, in milliseconds, from when a request was due to the
first line of the answer; it includes the delays of this client.

Ends with exit code 1 when the 99th percentile is over `--most-ms`, or if less than a quarter of the requests was
refused by either limit. `--off` serves without limits and must fail.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.daemon import cpu_s
from tests.server.builders import build_byte_level

ROOT = Path(__file__).resolve().parent.parent
_SERVE = """
import json, sys
from tiercel.server.launch import serve
from tiercel.settings.settings import EngineSettings, ServerSettings, Settings

ROOT = Path(__file__).resolve().parent.parent
fields = json.loads(sys.argv[1])
server = ServerSettings(served_model_names=("tiny",), port=0, enable_log_requests=False, **fields)
sys.exit(serve(Settings(engine=EngineSettings(model=fields["model"]), server=server), command=json.loads(sys.argv[2])))
"""
_OUTPUTS = 20  # tokens of a request
_RUNNING = 16  # of the fake engine
_WORDS = "The quick brown fox jumps over the lazy dog. "
_MIN_REFUSED = 0.25  # of the requests of each of the two tenants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--overload", type=float, default=4.0, help="times what the engine serves")
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second that the engine serves")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tenants", type=int, default=2, help="configured; two of them send")
    parser.add_argument("--gate", type=int, choices=(1, 2), default=1)
    parser.add_argument("--words", type=int, default=40, help="repetitions of a sentence of 45 characters")
    parser.add_argument("--most-ms", type=float, default=50.0, help="of the 99th percentile")
    parser.add_argument("--off", action="store_true", help="no limits: nothing is refused")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_byte_level().save(str(folder / "tokenizer.json"))
        prompt = _WORDS * wanted.words
        allowed = max(int(wanted.rate * 3), 1)
        limits: list[dict[str, object]] = [
            {"requests_per_minute": allowed} if wanted.gate == 1 else {"tokens_per_minute": allowed * len(prompt)},
            {} if wanted.gate == 1 else {"slo": {"class": "interactive", "ttft_s": 1.0}},
        ]
        if wanted.off:
            limits = [{}, {}]
        tenants = [
            {"name": "limited", "key": "limited", **limits[0]},
            {"name": "free", "key": "free", **limits[1]},
            *({"name": f"t{index}", "key": f"k{index}"} for index in range(wanted.tenants - 2)),
        ]
        (folder / "tenants.yaml").write_text(json.dumps({"tenants": tenants}))
        queued = 32 if wanted.gate == 1 and not wanted.off else 100_000
        fields = {"model": str(folder), "tenants_config": str(folder / "tenants.yaml"), "max_num_queued_reqs": queued}
        command = [sys.executable, str(ROOT / "tests" / "server" / "fake_engine.py")]
        step_s = _RUNNING / wanted.rate / _OUTPUTS
        fake = {"FAKE_STEP_S": str(step_s), "FAKE_CONTEXT": "4096", "FAKE_RUNNING": str(_RUNNING)}
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, json.dumps(fields), json.dumps(command)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env={**os.environ, **fake},
        )  # fmt: skip
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip().rsplit(" ", 1)[-1]
            figures = asyncio.run(_load(url, prompt, wanted.overload * wanted.rate, wanted.seconds, process.pid))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    print(json.dumps({"gate": wanted.gate, "overload": wanted.overload, "tenants": wanted.tenants, **figures}))
    least = _MIN_REFUSED * figures["sent"] / 2
    if min(figures["refused_429"], figures["refused_503"]) < least:
        raise SystemExit(f"FAILED: fewer than {least:.0f} requests were refused by one of the two limits")
    if figures["p99_ms"] > wanted.most_ms:
        raise SystemExit(f"FAILED: the 99th percentile is over {wanted.most_ms:g} ms")


async def _load(url: str, prompt: str, rate: float, seconds: float, pid: int) -> dict[str, float]:
    refused_ms: dict[int, list[float]] = {429: [], 503: []}
    served = 0
    host, _, port = url.removeprefix("http://").rpartition(":")
    body = json.dumps({"prompt": prompt, "max_tokens": _OUTPUTS, "stream": True})

    async def ask(key: str, due_s: float) -> None:
        nonlocal served
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        status = int((await reader.readline()).split()[1])
        if status != 200:
            refused_ms[status].append((time.perf_counter() - due_s) * 1000)
        served += status == 200
        while await reader.read(65536):
            pass
        writer.close()

    start_s, cpu_before_s = time.perf_counter(), cpu_s(pid)
    async with asyncio.TaskGroup() as group:
        for index in range(int(rate * seconds)):
            due_s = start_s + index / rate
            await asyncio.sleep(max(due_s - time.perf_counter(), 0))
            group.create_task(ask(("limited", "free")[index % 2], due_s))
    every = sorted(refused_ms[429] + refused_ms[503]) or [float("inf")]
    return {
        "sent": int(rate * seconds),
        "served": served,
        "refused_429": len(refused_ms[429]),
        "refused_503": len(refused_ms[503]),
        **{f"p{share}_ms": round(every[int(len(every) * share / 100)], 2) for share in (50, 90, 99)},
        "max_ms": round(every[-1], 2),
        "server_cpu_ms_a_request": round((cpu_s(pid) - cpu_before_s) * 1000 / (rate * seconds), 2),
    }


if __name__ == "__main__":
    main()
