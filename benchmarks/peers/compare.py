"""The same workloads against tiercel and its peers, one server after another on the same machine, in one run.

    python compare.py --model MODEL_FOLDER --peers PEERS_FOLDER --out RESULTS [--only tiercel,vllm] [--repeat 3]

PEERS_FOLDER is what `install.sh` made. Each server is started, measured by `tiercel bench serve` with every workload,
and stopped; rounds go over all servers, so that a machine that slows down slows all of them. The results are the
ordinary result files, `SERVER-WORKLOAD-ROUND.json`, for `tiercel bench compare` and `tiercel bench report`; a table of
medians over the rounds comes last. A server that does not start is said and left out.
"""

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from loadtest.record import RunResult
from loadtest.result_file import read_results

_HERE = Path(__file__).resolve().parent
_START_S = 300
WORKLOADS: dict[str, list[str]] = {
    "one": shlex.split("--num-prompts 4 --max-concurrency 1 --random-input-len 128 --random-output-len 128"),
    "sixteen": shlex.split("--num-prompts 16 --max-concurrency 16 --random-input-len 128 --random-output-len 128"),
    "prefix": shlex.split(
        "--num-prompts 32 --max-concurrency 32 --random-prefix-len 512 --random-input-len 64 --random-output-len 32"
    ),
    "long": shlex.split("--num-prompts 2 --max-concurrency 1 --random-input-len 4096 --random-output-len 16"),
    "tenants": ["--tenants", str(_HERE / "tenants.yaml"), "--isolation"],
}
COLUMNS = {
    "out tok/s": lambda result: result.output_throughput,
    "TTFT p50 ms": lambda result: result.figures["median_ttft_ms"],
    "TTFT p99 ms": lambda result: result.figures["p99_ttft_ms"],
    "TPOT p50 ms": lambda result: result.figures["median_tpot_ms"],
    "ITL p99 ms": lambda result: result.figures["p99_itl_ms"],
    "isolation": lambda result: result.isolation[0].ratios.get("p99_ttft_ms") if result.isolation else None,
}


@dataclass(frozen=True)
class Server:
    """How to start one server."""

    name: str
    command: list[str]
    variables: dict[str, str]


def servers(model: Path, peers: Path, port: int) -> dict[str, Server]:
    """Every server that is installed, by name. Model conversions are made once, in the folder of the peers."""
    found = [Server("tiercel", [_tool("tiercel"), "serve", str(model), "--port", str(port)], {})]
    if (peers / "vllm").is_dir():
        command = [str(peers / "vllm/bin/vllm"), "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
        variables = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
        found.append(Server("vllm", [*command, "--dtype", "bfloat16", "--max-model-len", "8192"], variables))
    if (peers / "openvino").is_dir():
        export = peers / "converted" / f"{model.name}-openvino"
        if not export.is_dir():
            task = shlex.split("--task text-generation-with-past --weight-format fp16")
            _call(str(peers / "openvino/bin/optimum-cli"), "export", "openvino", "-m", str(model), *task, str(export))
        python = str(peers / "openvino/bin/python")
        serve = [python, str(_HERE / "serve_openvino.py"), str(export), "--port", str(port)]
        found.append(Server("openvino", serve, {}))
    if (peers / "llamacpp").is_dir():
        gguf = peers / "converted" / f"{model.name}.gguf"
        if not gguf.is_file():
            gguf.parent.mkdir(parents=True, exist_ok=True)
            script = str(peers / "llamacpp/source/vendor/llama.cpp/convert_hf_to_gguf.py")
            _call(str(peers / "llamacpp/bin/python"), script, str(model), "--outfile", str(gguf), "--outtype", "bf16")
        binary = str(peers / "llamacpp/build/bin/llama-server")
        flags = [
            "-m",
            str(gguf),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "-np",
            "32",
            "-c",
            "24576",
            "--kv-unified",
        ]
        found.append(Server("llamacpp", [binary, *flags], {}))
    return {server.name: server for server in found}


@contextlib.contextmanager
def running(server: Server, port: int, log: Path) -> Iterator[bool]:
    """Start a server and stop it afterwards. Yields whether it answers."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            server.command, env={**os.environ, **server.variables}, stdout=file, stderr=file, start_new_session=True
        )
        try:
            yield _answers(process, port)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def measure(server: Server, workload: str, flags: list[str], arguments: argparse.Namespace, path: Path) -> None:
    """One run of the load test. Its seed is the round's: no prefix cache knows the words, all servers get the same."""
    command = [
        _tool("tiercel"), "bench", "serve", "--port", str(arguments.port), "--tokenizer", str(arguments.model),
        "--ignore-eos", "--seed", str(arguments.seed), "--label", f"{server.name}-{workload}", "--disable-tqdm",
        "--save-result", "--result-filename", str(path), *flags,
    ]  # fmt: skip
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL)


def table(out: Path, names: list[str], workloads: list[str]) -> Iterator[str]:
    """Medians over the rounds."""
    yield f"{'workload':10} {'server':10} " + " ".join(f"{name:>12}" for name in COLUMNS)
    for workload in workloads:
        for name in names:
            results = [
                result for path in sorted(out.glob(f"{name}-{workload}-*.json")) for result in read_results(path)
            ]
            if results:
                yield f"{workload:10} {name:10} " + " ".join(_cell(results, column) for column in COLUMNS)


def _cell(results: list[RunResult], column: str) -> str:
    values = [value for result in results if (value := COLUMNS[column](result)) is not None]
    return f"{statistics.median(values):12.2f}" if values else f"{'-':>12}"


def _answers(process: "subprocess.Popen[bytes]", port: int) -> bool:
    end_s = time.monotonic() + _START_S
    while time.monotonic() < end_s and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/v1/models", trust_env=False).status_code == 200:
                return True
        time.sleep(0.5)
    return False


def _tool(name: str) -> str:
    """A command of the environment that runs this script."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name) or name


def _call(*command: str) -> None:
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="servers, with commas")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--port", type=int, default=8010)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.model = arguments.model.resolve()
    all_servers = servers(arguments.model, arguments.peers.resolve(), arguments.port)
    names = arguments.only.split(",") if arguments.only else list(all_servers)
    workloads = arguments.workloads.split(",")
    for number in range(arguments.repeat):
        arguments.seed = number
        for name in names:
            with running(all_servers[name], arguments.port, arguments.out / f"{name}.log") as is_up:
                if not is_up:
                    print(f"{name} does not start: see {arguments.out / name}.log", file=sys.stderr)
                    continue
                for workload in workloads:
                    print(f"round {number}: {name}, {workload}", file=sys.stderr)
                    path = arguments.out / f"{name}-{workload}-{number}.json"
                    measure(all_servers[name], workload, WORKLOADS[workload], arguments, path)
    print("\n".join(table(arguments.out, names, workloads)))


if __name__ == "__main__":
    main()
