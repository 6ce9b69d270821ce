"""The commands of the pages: each is run here, or stands in the table of those that are not, with the reason."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.pages.written import PAGES, ROOT, Command, blocks, commands

BIN = Path(sys.executable).parent
EMBEDDED = ROOT / "tiercel" / "embedded" / "model"
LLAMA_8B = {  # Llama 3.1 8B as `tiercel plan` reads it
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
LIMIT_S = 60  # of a command on a quiet machine; a busy one gets twice as much

# Commands that are not run here, by the reason. A pattern matches at the beginning of a command.
NOT_RUN: dict[str, tuple[str, ...]] = {
    "needs Docker; tests/deploy and tests/docker run it": (
        r"docker ",
        r"TIERCEL_API_KEY= TIERCEL_CONFIG_DIR=\S+ docker compose ",
        r"export TIERCEL_METRICS_KEY=",
        r"curl http://127\.0\.0\.1:8000/v1/chat/completions \\\n  -H \"Authorization: Bearer \$TIERCEL_API_KEY\"",
    ),
    "needs root, and writes outside of the working folder": (
        r"python3 -m venv /opt/",
        r"/opt/tiercel/bin/pip install ",
        r"install -D(irectory)? ",
        r"install --directory ",
        r"systemd-sysusers",
        r"systemctl ",
        r"touch /etc/",
        r"\(umask 077; echo ",
        r"mkdir -p /srv/",
        r"cat > /srv/",
        r"ch(own|mod) -R \S+ /srv/",
        r"tiercel kv (verify|purge) /var/lib/",
        r"rsync ",
    ),
    "needs Kubernetes; tests/manifests checks the files": (r"kubectl ", r"mkdir fleet && "),
    "needs a GPU": (r"tiercel serve /models/\S+ --device cuda", r"tiercel bench throughput /models/\S+ --device cuda"),
    "needs a model that is not part of the repository": (
        r"(\.venv/bin/)?tiercel serve Qwen",
        r"tiercel simulate --trace conversation_trace\.jsonl",
    ),
    "needs a package index, or another program": (
        r"pip (install|download) ",
        r"serve run tiercel\.cluster",
        r"lm_eval ",
        r"grep -v '\^torch==' constraints\.txt",
        r"make setup",
        r"python benchmarks/(cpu/offline_(vllm|transformers)|gpu/run)\.py",
    ),
    "needs a second machine": (r"tiercel (engine --listen 0\.0\.0\.0|serve --engines static:gpu-1)",),
    "takes minutes": (
        r"tiercel bench throughput MODEL --input-len 1024",
        r"tiercel bench throughput MODEL --load-format dummy",
        r"tiercel simulate --tenants 1000",
        r"tiercel simulate --replicas 8",
    ),
    "a collector of traces has to run; tests/server/tracing sends to one": (r"tiercel serve --otlp-traces-endpoint",),
    "listens on all addresses; tests/e2e serves with a key": (r"TIERCEL_API_KEY=change-me ",),
    "run by tests/e2e/test_fleet.py, with two engines and a front": (
        r"openssl rand -hex 32 > fleet\.secret",
        r"tiercel engine --listen 127\.0\.0\.1:810[12]",
        r"tiercel serve  --engines static:127",
    ),
    "makes a key for the commands below it": (r"export TIERCEL_API_KEY=",),
    "development: run by CI": (r"make ",),
}
# Files that a command reads and another command of the page writes: a reader types both, a worker may run one of them.
WRITTEN_BY = {"run.json": "tiercel bench serve --tenants mix.yaml --isolation --save-result --result-filename run.json"}
QUICKSTART = "docs/quickstart.md"  # all of it is run by tests/e2e/test_quickstart.py


def reason_not_run(command: Command) -> str | None:
    """Return why a command is not run here; None: it is."""
    if command.page == QUICKSTART:
        return "run by tests/e2e/test_quickstart.py"
    for reason, patterns in NOT_RUN.items():
        if command.text != "make serve" and any(re.match(pattern, command.text) for pattern in patterns):
            return reason
    return None


def commands_to_run() -> list[Command]:
    """Return the commands that are run here."""
    return [command for command in commands() if reason_not_run(command) is None]


@dataclass
class Reader:
    """A reader who types commands in a folder of their own, beside a server on a free port."""

    folder: Path
    port: int
    environment: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(folder: Path) -> "Reader":
        own = {name: value for name, value in os.environ.items() if not name.startswith(("TIERCEL_", "VLLM_"))}
        extra = {"PATH": f"{BIN}:{os.environ['PATH']}", "TIERCEL_CALIBRATION_SECONDS": "0", "OMP_NUM_THREADS": "1"}
        extra["XDG_CACHE_HOME"] = str(folder / "cache")
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            return Reader(folder, sock.getsockname()[1], own | extra)

    def spelled(self, text: str) -> str:
        """Return a command with the reader's port, and with the embedded model where the page names another one.

        A load test has short prompts and answers, so that it also ends in time on a busy machine.
        """
        text = re.sub(r"(\.venv/bin/|\$PWD/)(?=tiercel)", "", text)
        text = re.sub(r"(127\.0\.0\.1|localhost):8000", f"127.0.0.1:{self.port}", text)
        model = self.folder / "llama-8b" if text.startswith("tiercel plan") else EMBEDDED
        text = re.sub(r"(/models/[\w.-]+|\./my-model|\bMODEL\b)", str(model), text)
        if re.match(r"tiercel (chat|bench serve --tenants)", text):
            flag = "--url" if "chat" in text else "--base-url"
            text += f" {flag} http://127.0.0.1:{self.port}"
        if text.startswith("tiercel bench serve --base-url"):
            text += " --input-len 32 --output-len 4"
        return text

    def run(self, text: str) -> str:
        """Run a command to its end and return its output. It must end with 0."""
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self.spelled(text)],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=2 * LIMIT_S,
            check=False,
        )
        assert ran.returncode == 0, f"{text}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout

    def serve(self, text: str) -> "subprocess.Popen[bytes]":
        """Start a server and wait until it is ready."""
        text = "tiercel serve" if text == "make serve" else re.sub(r" --port \d+", "", self.spelled(text))
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {text} --port {self.port}"],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
            )
        end_s = time.monotonic() + 2 * LIMIT_S
        while True:
            assert process.poll() is None, f"{text}\n{(self.folder / 'log').read_text()}"
            assert time.monotonic() < end_s, text
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/ready").status_code == 200:
                    return process
            except httpx.HTTPError:
                time.sleep(0.05)


def ended(process: "subprocess.Popen[bytes]") -> int:
    """End a server with a signal; return its exit code."""
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(60)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def is_server(command: Command) -> bool:
    return command.text == "make serve" or re.match(r"(\.venv/bin/)?tiercel serve", command.text) is not None


def _example(page: str, language: str, start: str) -> str:
    """Return the block of a page that begins with these words: the file that a command of the page reads."""
    (found,) = (text for kind, text in blocks(page) if kind == language and text.startswith(start))
    return found


def write_examples(folder: Path) -> None:
    """Write the files that the commands read, from the examples of their pages."""
    line = _example("docs/batches.md", "json", '{"custom_id": "a-1", "method"')
    (folder / "requests.jsonl").write_text(line)
    (folder / "hist.json").write_text(_example("docs/plan.md", "json", '{"buckets"'))
    (folder / "work.yaml").write_text(_example("docs/simulate.md", "yaml", "tenants:"))
    (folder / "llama-8b").mkdir()
    (folder / "llama-8b" / "config.json").write_text(json.dumps(LLAMA_8B))
    card = {"memory_bytes": "24GiB", "flops_per_s": 1e14, "memory_bytes_per_s": 1e12, "link_bytes_per_s": 2e10}
    (folder / "card.json").write_text(json.dumps(card))
    mix = _example("docs/loadtest.md", "yaml", "duration_s: 120")
    mix = re.sub(r"duration_s: 120 +#", "duration_s: 5 #", mix).replace("num_prompts: 400", "num_prompts: 10")
    mix = mix.replace("max_concurrency: 16", "num_prompts: 4\n    max_concurrency: 2")
    mix = re.sub(r"input_len: \d+, output_len: \d+", "input_len: 32, output_len: 4", mix)
    (folder / "mix.yaml").write_text(mix)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Yield a reader with the files of the examples, and a server of the embedded model that has no keys."""
    folder = tmp_path_factory.mktemp("reader")
    write_examples(folder)
    found = Reader.of(folder)
    process = found.serve("tiercel serve")
    yield found
    assert ended(process) == 0


def _name(command: Command) -> str:
    return f"{command.page}: {command.text.splitlines()[0][:60]}"


def test_every_pattern_of_the_table_matches_a_command() -> None:
    texts = [command.text for command in commands() if command.page != QUICKSTART]
    for reason, patterns in NOT_RUN.items():
        for pattern in patterns:
            assert any(re.match(pattern, text) for text in texts), f"{reason}: {pattern}"


def test_every_block_of_commands_is_marked_as_one() -> None:
    program = re.compile(r"^(\$ )?(tiercel|python3?|curl|docker|kubectl|make|pip) ", re.MULTILINE)
    for page in PAGES:
        for language, text in blocks(page):
            assert language in ("sh", "python", "json", "yaml", "toml", "mermaid") or not program.search(text), page


def test_what_is_neither_run_nor_listed_is_found() -> None:
    assert reason_not_run(Command("README.md", "tiercel nonsense")) is None
    assert reason_not_run(Command("README.md", "docker compose up")) is not None


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize("command", [one for one in commands_to_run() if not is_server(one)], ids=_name)
def test_a_command_of_a_page_ends_well(command: Command, reader: Reader) -> None:
    for name, writer in WRITTEN_BY.items():
        if name in command.text.split() and command.text != writer and not (reader.folder / name).exists():
            reader.run(writer)
    reader.run(command.text)


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize("command", [one for one in commands_to_run() if is_server(one)], ids=_name)
def test_a_server_of_a_page_starts_and_ends_well(command: Command, tmp_path: Path) -> None:
    own = Reader.of(tmp_path)
    assert ended(own.serve(command.text)) == 0
