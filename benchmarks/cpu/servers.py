"""tiercel and its peers: the commands that start them, and the conversion of a model into the format of a peer."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cpu.processor import ProcessorClass
from benchmarks.cpu.refusal import refuse

PEERS = ("llamacpp", "vllm", "openvino")
GGUF_TYPES = {"int8": "q8_0", "int4": "q4_0"}
"""llama.cpp's types of weights by the value of tiercel's --quantization."""

NAMES = ("tiercel", *PEERS)
_HERE = Path(__file__).resolve().parent
_KV_GIB = 2
_SLOTS = 32
_SLOT_TOKENS = 4_352  # of a slot of llama.cpp: the long prompt of W4 and its answer


@dataclass(frozen=True, slots=True)
class Conversion:
    """The conversion of the model folder into the format that a server loads."""

    command: list[str]
    model: Path
    product: Path


@dataclass(frozen=True, slots=True)
class Server:
    """The command that starts one server."""

    name: str
    port: int
    command: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    ready_path: str = "/health"
    conversion: Conversion | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where servers are found and what all of them get."""

    model: Path
    peers: Path  # made by install.sh
    tiercel: Path | None  # a checkout with its .venv; None: the installed tiercel
    first_port: int
    threads: int
    kind: ProcessorClass
    flags: Mapping[str, list[str]] = field(default_factory=dict)  # more flags by server
    quantization: str | None = None  # of the weights of all servers: int8, int4, or None for 16 bits


def find_servers(place: Place, names: list[str]) -> list[Server]:
    """Return the named servers in this order. Errors: SystemExit if a peer is not installed."""
    makers = {"tiercel": _tiercel, "llamacpp": _llamacpp, "vllm": _vllm, "openvino": _openvino}
    found: list[Server] = []
    for index, name in enumerate(names):
        if name not in makers:
            refuse(f"--servers: {name!r} is unknown; known are {', '.join(makers)}")
        if place.quantization and name not in ("tiercel", "llamacpp"):
            refuse(f"--servers: {name} has no such quantisation; with --quantization only tiercel and llamacpp compare")
        if name != "tiercel" and not (place.peers / name).is_dir():
            refuse(f"{name} is not in {place.peers}: benchmarks/cpu/install.sh {place.peers} {name}")
        server = makers[name](place, place.first_port + index)
        server.command.extend(place.flags.get(name, []))
        found.append(server)
    return found


def installed(peers: Path) -> list[str]:
    """Return tiercel and the peers in the folder."""
    return [name for name in NAMES if name == "tiercel" or (peers / name).is_dir()]


def _tiercel(place: Place, port: int) -> Server:
    variables: dict[str, str] = {}
    if place.tiercel is None:
        beside = Path(sys.executable).with_name("tiercel")
        program = str(beside) if beside.exists() else shutil.which("tiercel") or "tiercel"
    else:
        program = str(place.tiercel / ".venv/bin/tiercel")
        variables["PYTHONPATH"] = str(place.tiercel)
    flags = shlex.split(f"--port {port} --threads {place.threads} --kv-cache-memory-bytes {_KV_GIB}GiB")
    if place.quantization:
        flags += ["--quantization", place.quantization]
    return Server("tiercel", port, [program, "serve", str(place.model), *flags], variables, "/ready")


def _vllm(place: Place, port: int) -> Server:
    folder = place.peers / "vllm"
    dtype = "float32" if place.kind in ("portable", "avx2") else "bfloat16"  # its bfloat16 is slow without products
    flags = shlex.split(
        f"--host 127.0.0.1 --port {port} --dtype {dtype} --max-model-len 8192 --max-num-seqs {_SLOTS} "
        "--generation-config vllm"
    )
    variables = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",  # it compiles with ninja of its environment
        "OMP_NUM_THREADS": str(place.threads),
        "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # else it reserves a core for the HTTP process, half of a small machine
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Server("vllm", port, [str(folder / "bin/vllm"), "serve", str(place.model), *flags], variables)


def _openvino(place: Place, port: int) -> Server:
    made = place.peers / "converted" / f"{place.model.name}-openvino"
    task = shlex.split("--task text-generation-with-past --weight-format fp16")
    export = [str(place.peers / "openvino/bin/optimum-cli"), "export", "openvino", "-m", str(place.model), *task]
    command = [str(place.peers / "openvino/bin/python"), str(_HERE / "serve_openvino.py"), str(made)]
    flags = shlex.split(f"--port {port} --threads {place.threads} --kv-gib {_KV_GIB} --max-num-seqs {_SLOTS}")
    conversion = Conversion([*export, str(made)], place.model, made)
    return Server("openvino", port, [*command, *flags], {}, "/v1/models", conversion)


def _llamacpp(place: Place, port: int) -> Server:
    suffix = f"-{place.quantization}" if place.quantization else ""
    made = place.peers / "converted" / f"{place.model.name}{suffix}.gguf"
    source, programs = place.peers / "llamacpp/source/vendor/llama.cpp", place.peers / "llamacpp/build/bin"
    script = [str(place.peers / "llamacpp/bin/python"), str(_HERE / "convert_gguf.py"), str(source), str(place.model)]
    convert = [*script, "--outfile", str(made), "--outtype", "bf16"]
    if place.quantization:
        convert += ["--quantize", str(programs / "llama-quantize"), GGUF_TYPES[place.quantization]]
    flags = shlex.split(
        f"--host 127.0.0.1 --port {port} -t {place.threads} -tb {place.threads} "
        f"-np {_SLOTS} -c {_SLOTS * _SLOT_TOKENS} --no-kv-unified --no-webui"
    )
    command = [str(programs / "llama-server"), "-m", str(made), *flags]
    return Server("llamacpp", port, command, {}, "/health", Conversion(convert, place.model, made))


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
