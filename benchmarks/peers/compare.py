"""Compares tiercel with its peers: the same workloads, one server after another on the same machine, in one run.

    python compare.py --model MODEL_FOLDER --peers PEERS_FOLDER --out RESULTS [--only tiercel,vllm] [--repeat 3]

PEERS_FOLDER is the folder that `install.sh` makes. Each server is started, measured by `tiercel bench serve` with every
workload, and stopped; each round includes all servers, so that a slower machine slows all of them. Results are written
as `SERVER-WORKLOAD-ROUND.json` for `tiercel bench compare` and `tiercel bench report`; a table of medians over the
rounds is printed at the end. A server that does not start is named and left out; its log is beside the results.
"""

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tiercel.loadtest.results.record import RunResult
from tiercel.loadtest.results.result_file import read_results

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
class Conversion:
    """The conversion of the model folder into the format that a server loads."""

    command: list[str]
    model: Path
    product: Path


@dataclass(frozen=True)
class Server:
    """The command to start one server."""

    name: str
    command: list[str]
    variables: dict[str, str]
    conversion: Conversion | None = None


def servers(model: Path, peers: Path, port: int, threads: int) -> list[Server]:
    """Return every installed server."""
    flags = ["--port", str(port), "--threads", str(threads)]
    found = [Server("tiercel", [_tool("tiercel"), "serve", str(model), *flags], {})]
    if (peers / "vllm").is_dir():
        found.append(_vllm(model, peers / "vllm", port))
    if (peers / "openvino").is_dir():
        found.append(_openvino(model, peers, port, threads))
    if (peers / "llamacpp").is_dir():
        found.append(_llamacpp(model, peers, port, threads))
    return found


def _vllm(model: Path, folder: Path, port: int) -> Server:
    flags = shlex.split(f"--host 127.0.0.1 --port {port} --dtype bfloat16 --max-model-len 8192 --max-num-seqs 32")
    variables = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",  # it compiles with ninja of its environment
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # else it reserves a core for the HTTP process, half of a small machine
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Server("vllm", [str(folder / "bin/vllm"), "serve", str(model), *flags], variables)


def _openvino(model: Path, peers: Path, port: int, threads: int) -> Server:
    made = peers / "converted" / f"{model.name}-openvino"
    task = shlex.split("--task text-generation-with-past --weight-format fp16")
    export = [str(peers / "openvino/bin/optimum-cli"), "export", "openvino", "-m", str(model), *task, str(made)]
    command = [str(peers / "openvino/bin/python"), str(_HERE / "serve_openvino.py"), str(made)]
    flags = ["--port", str(port), "--threads", str(threads)]
    return Server("openvino", [*command, *flags], {}, Conversion(export, model, made))


def _llamacpp(model: Path, peers: Path, port: int, threads: int) -> Server:
    made = peers / "converted" / f"{model.name}.gguf"
    source = peers / "llamacpp/source/vendor/llama.cpp"
    script = [str(peers / "llamacpp/bin/python"), str(_HERE / "convert_gguf.py"), str(source), str(model)]
    convert = [*script, "--outfile", str(made), "--outtype", "bf16"]
    flags = shlex.split(
        f"--host 127.0.0.1 --port {port} -t {threads} -tb {threads} -np 32 -c 24576 --kv-unified --no-webui"
    )
    command = [str(peers / "llamacpp/build/bin/llama-server"), "-m", str(made), *flags]
    return Server("llamacpp", command, {}, Conversion(convert, model, made))


def convert(conversion: Conversion, log: Path) -> bool:
    """Convert the model, unless the product is newer than the model. Return whether there is a complete product."""
    product = conversion.product
    changed_s = max(file.stat().st_mtime for file in conversion.model.iterdir())
    if product.exists() and product.stat().st_mtime > changed_s:
        return True
    _remove(product)
    product.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        if subprocess.run(conversion.command, check=False, stdout=file, stderr=file).returncode == 0:
            return True
    _remove(product)
    return False


def _remove(product: Path) -> None:
    if product.is_dir():
        shutil.rmtree(product)
    product.unlink(missing_ok=True)


@contextlib.contextmanager
def running(server: Server, port: int, log: Path) -> Iterator[bool]:
    """Run a server until the block ends. Yield whether it answers."""
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
    """Run the load test once. The seed is the round, so that all servers get the same new prompts."""
    command = [
        _tool("tiercel"), "bench", "serve", "--port", str(arguments.port), "--tokenizer", str(arguments.model),
        "--ignore-eos", "--seed", str(arguments.seed), "--label", f"{server.name}-{workload}", "--disable-tqdm",
        "--save-result", "--result-filename", str(path), *flags,
    ]  # fmt: skip
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL)


def table(out: Path, names: list[str], workloads: list[str]) -> Iterator[str]:
    """Return the table of medians over the rounds."""
    yield f"{'workload':10} {'server':10} " + " ".join(f"{name:>12}" for name in COLUMNS)
    for workload in workloads:
        for name in names:
            results = [
                result for path in sorted(out.glob(f"{name}-{workload}-*.json")) for result in read_results(path)
            ]
            if results:
                yield (
                    f"{workload:10} {name:10} "
                    + " ".join(_cell(results, column) for column in COLUMNS)
                    + _note(results)
                )


def _note(results: list[RunResult]) -> str:
    """Return a note on the rounds that other programs disturbed."""
    disturbed = sum(result.client.saturated for result in results)
    return f"  disturbed: {disturbed} of {len(results)}" if disturbed else ""


def _cell(results: list[RunResult], column: str) -> str:
    values = [value for result in results if (value := COLUMNS[column](result)) is not None]
    return f"{statistics.median(values):12.2f}" if values else f"{'-':>12}"


def _is_ready(server: Server, out: Path) -> bool:
    if server.conversion is None or convert(server.conversion, out / f"{server.name}.log"):
        return True
    print(f"{server.name} cannot read the model: see {out / server.name}.log", file=sys.stderr)
    return False


def _is_answered(port: int) -> bool:
    """Return whether a server answers at the port, which would be measured instead of the intended one."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _answers(process: "subprocess.Popen[bytes]", port: int) -> bool:
    end_s = time.monotonic() + _START_S
    while time.monotonic() < end_s and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/v1/models", trust_env=False).status_code == 200:
                return True
        time.sleep(0.5)
    return False


def _tool(name: str) -> str:
    """Return a command of the environment that runs this script."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name) or name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="servers, with commas")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--port", type=int, default=8010)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each server")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.model = arguments.model.resolve()
    if _is_answered(arguments.port):
        parser.error(f"something listens on port {arguments.port} already")
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    found = servers(arguments.model, arguments.peers.resolve(), arguments.port, arguments.threads)
    names = arguments.only.split(",") if arguments.only else [server.name for server in found]
    if missing := set(names) - {server.name for server in found}:
        parser.error(f"not installed: {', '.join(sorted(missing))}")
    workloads = arguments.workloads.split(",")
    wanted = [server for server in found if server.name in names and _is_ready(server, arguments.out)]
    for number in range(arguments.repeat):
        arguments.seed = number
        for server in wanted:
            with running(server, arguments.port, arguments.out / f"{server.name}.log") as is_up:
                if not is_up:
                    print(f"{server.name} does not start: see {arguments.out / server.name}.log", file=sys.stderr)
                    continue
                for workload in workloads:
                    print(f"round {number}: {server.name}, {workload}", file=sys.stderr)
                    path = arguments.out / f"{server.name}-{workload}-{number}.json"
                    measure(server, workload, WORKLOADS[workload], arguments, path)
    print("\n".join(table(arguments.out, names, workloads)))


if __name__ == "__main__":
    main()
