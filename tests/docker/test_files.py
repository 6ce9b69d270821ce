"""The files in docker/, read without an engine: what hardens the container, and what would break its build."""

import fnmatch
import http.server
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tiercel.options import Options

ROOT = Path(__file__).resolve().parent.parent.parent
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = (ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8")
README = (ROOT / "docker" / "README.md").read_text(encoding="utf-8")
PROBE = ROOT / "docker" / "healthcheck.py"
PROBE_COMMAND = ["/opt/tiercel/bin/python", "/opt/tiercel/healthcheck.py"]
IGNORED = [
    line
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]

# Any: what a YAML file holds is known only once it is read
Tree = dict[str, Any]


def _instructions() -> list[tuple[str, str]]:
    """(word, rest) of each instruction, continued lines joined and comments dropped."""
    lines = [line for line in DOCKERFILE.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined)]


def _last_stage() -> dict[str, str]:
    """The instructions of the image itself; the last one of a word counts."""
    instructions = _instructions()
    start = max(index for index, (word, _) in enumerate(instructions) if word == "FROM")
    return dict(instructions[start:])


def _context_sources() -> set[str]:
    """Every path of the build context that the Dockerfile copies or mounts."""
    sources: set[str] = set()
    for word, rest in _instructions():
        if word == "COPY" and "--from=" not in rest:
            sources |= {path for path in rest.split()[:-1] if not path.startswith("--")}
        for mount in re.findall(r"--mount=(\S+)", rest):
            fields = dict(field.partition("=")[::2] for field in mount.split(","))
            if fields["type"] == "bind" and "from" not in fields:
                sources.add(fields.get("source", "."))
    return sources


def _is_sent(path: str) -> bool:
    """Whether .dockerignore lets a path through; its last line that matches decides."""
    sent = True
    for line in IGNORED:
        pattern = line.removeprefix("!").removeprefix("**/")
        tails = [path.split("/", depth)[depth] for depth in range(path.count("/") + 1)] if "**/" in line else [path]
        if any(fnmatch.fnmatch(tail, pattern) or tail.startswith(f"{pattern}/") for tail in tails):
            sent = line.startswith("!")
    return sent


@cache
def _service() -> Tree:
    service: Tree = yaml.safe_load(COMPOSE)["services"]["tiercel"]
    return service


def _seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(s|m)", text).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "m": 60}[unit]


def test_every_source_of_the_dockerfile_exists_and_is_sent() -> None:
    sources = _context_sources()
    assert {".", "constraints.txt", "pyproject.toml", "docker/healthcheck.py", "docker/wheels"} <= sources
    for source in sources - {"."}:
        assert (ROOT / source).exists(), source
        assert _is_sent(source), source


def test_no_mount_can_be_written_as_its_changes_would_not_cause_a_rebuild() -> None:
    mounts = [mount for _, rest in _instructions() for mount in re.findall(r"--mount=(\S+)", rest)]
    assert mounts
    assert not [mount for mount in mounts if {"rw", "readwrite", "rw=true", "readwrite=true"} & set(mount.split(","))]


def test_every_package_and_what_it_is_built_from_is_sent() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["setuptools"]["packages"]
    needed = [f"{package.replace('.', '/')}/__init__.py" for package in packages]
    needed += ["embedded/model/config.json", project["project"]["readme"], *project["project"]["license-files"]]
    assert [path for path in needed if not _is_sent(path)] == []


@pytest.mark.parametrize(
    "path", [".git/config", ".venv/bin/python", "docker/.env", "cli/.env", "cli/__pycache__/main.pyc", "models/a"]
)
def test_what_the_image_does_not_need_stays_outside(path: str) -> None:
    assert not _is_sent(path)


def test_the_image_runs_as_nobody_special_and_takes_sigterm_itself() -> None:
    stage = _last_stage()
    assert stage["USER"] == "10001:10001"
    assert stage["STOPSIGNAL"] == "SIGTERM"
    assert json.loads(stage["ENTRYPOINT"]) == ["tiercel", "serve", "--host", "0.0.0.0"]


def test_the_image_checks_its_own_health() -> None:
    _, _, command = _last_stage()["HEALTHCHECK"].partition(" CMD ")
    assert json.loads(command) == PROBE_COMMAND


def test_the_image_has_the_arguments_that_make_has() -> None:
    arguments = dict(rest.split("=", 1) for word, rest in _instructions() if word == "ARG" and "=" in rest)
    makefile = dict(re.findall(r"^(\w+) \?= ?(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert arguments["TORCH"] == makefile["TORCH"]
    assert arguments.keys() == {"BASE", "TORCH", "PIP_ARGS"} == set(_service()["build"]["args"])


def test_no_key_is_written_into_the_image() -> None:
    assert not [rest for word, rest in _instructions() if word in ("ARG", "ENV") and "KEY" in rest]


def test_the_container_is_hardened() -> None:
    service = _service()
    assert service["user"] == "10001:10001"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert [mount.partition(":")[0] for mount in service["tmpfs"]] == ["/tmp"]
    assert service["mem_limit"]
    assert service["pids_limit"] > 0
    assert not {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"} & service.keys()


def test_the_port_is_reachable_from_this_machine_only() -> None:
    (port,) = _service()["ports"]
    assert port.startswith("127.0.0.1:")


def test_the_model_folder_cannot_be_written() -> None:
    assert [volume.rsplit(":", 2)[1:] for volume in _service()["volumes"]] == [["/models", "ro"]]


def test_compose_refuses_to_start_without_a_key() -> None:
    assert re.fullmatch(r"\$\{TIERCEL_API_KEY:\?.+\}", _service()["environment"]["TIERCEL_API_KEY"])


def test_compose_asks_the_same_question_as_the_image() -> None:
    assert _service()["healthcheck"]["test"] == ["CMD", *PROBE_COMMAND]


def test_the_drain_ends_before_the_grace_period() -> None:
    assert _seconds(_service()["stop_grace_period"]) > Options.model_fields["shutdown_timeout"].default + 5


def test_every_setting_in_compose_exists() -> None:
    names = {name.removeprefix("TIERCEL_").lower() for name in _service()["environment"]}
    assert names <= Options.model_fields.keys()


def test_the_readme_names_variables_that_compose_reads() -> None:
    read = set(re.findall(r"\$\{(TIERCEL_\w+)", COMPOSE))
    table = set(re.findall(r"^\| `(TIERCEL_\w+)`", README, re.MULTILINE))
    assert table == read


def test_every_path_in_the_commands_of_the_readme_exists() -> None:
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE))
    words = [word for line in blocks.replace("\\\n", " ").splitlines() for word in shlex.split(line, comments=True)]
    paths = {word for word in words if re.match(r"docker/(?!wheels/)|constraints\.txt", word)}
    assert "docker/compose.yaml" in paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


class _Reply(http.server.BaseHTTPRequestHandler):
    """A server that is ready on /ready and not yet on anything else."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready" else 503)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class _Loading(_Reply):
    path = ""

    def do_GET(self) -> None:
        self.path = "/loading"
        super().do_GET()


@pytest.fixture(params=[_Reply, _Loading])
def answering(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """A port, and the exit code that the probe owes it."""
    with http.server.HTTPServer(("127.0.0.1", 0), request.param) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port, 0 if request.param is _Reply else 1
        server.shutdown()
        thread.join()


def _probe(port: int) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "TIERCEL_PORT": str(port), "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    return subprocess.run(
        [sys.executable, "-S", str(PROBE)], env=environment, capture_output=True, text=True, check=False, timeout=30
    )


def test_the_probe_tells_a_ready_server_from_a_loading_one(answering: tuple[int, int]) -> None:
    port, code = answering
    ran = _probe(port)
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, "{}\n", "")


def test_the_probe_fails_in_one_line_where_nobody_listens() -> None:
    ran = _probe(1)
    assert ran.returncode == 1
    assert ran.stdout.count("\n") == 1
    assert ran.stderr == ""
