"""The Dockerfiles, checked without an engine: errors that break a build, and properties of the image."""

import json
import re
import shutil
import subprocess
import tomllib

import pytest

from tests.docker.reading import (
    DOCKERFILES,
    ROOT,
    compose,
    context_sources,
    instructions,
    is_sent,
    last_stage,
    merged,
    mounts,
    shell_of,
)

PROBE = ["/opt/tiercel/bin/python", "/opt/tiercel/healthcheck.py"]
WORDS = {
    *("ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN", "LABEL", "USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK"),
    "ENTRYPOINT",
}
each = pytest.mark.parametrize("name", DOCKERFILES)


@each
def test_only_known_instructions_are_used(name: str) -> None:
    assert {word for word, _ in instructions(name)} == WORDS


@each
def test_every_source_exists_and_is_sent(name: str) -> None:
    sources = context_sources(name)
    assert {
        ".",
        "constraints.txt",
        "requirements.lock",
        "pyproject.toml",
        "docker/healthcheck.py",
        "docker/wheels",
    } <= sources
    for source in sources - {"."}:
        assert (ROOT / source).exists(), source
        assert is_sent(source), source


@each
def test_no_mount_can_be_written_as_its_changes_would_not_cause_a_rebuild(name: str) -> None:
    found = [fields for _, rest in instructions(name) for fields in mounts(rest)]
    assert found
    assert not [fields for fields in found if {"rw", "readwrite"} & fields.keys()]


@each
def test_every_stage_that_is_named_comes_before(name: str) -> None:
    stages: set[str] = set()
    for word, rest in instructions(name):
        if word == "FROM":
            assert rest.split()[0] in stages | {"${BASE}", "${COMPILER}"}
            stages |= set(rest.split()[2:])
        assert set(re.findall(r"(?:--from=|[,=]from=)([\w-]+)", rest)) <= stages


@each
def test_the_shell_accepts_every_command(name: str) -> None:
    shell = shutil.which("sh")
    assert shell
    commands = [shell_of(rest) for word, rest in instructions(name) if word == "RUN"]
    assert commands
    for command in commands:
        ran = subprocess.run([shell, "-n"], input=command, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, f"{command}: {ran.stderr}"


@each
def test_the_build_is_repeatable(name: str) -> None:
    """Only pip downloads, with pinned versions, and a failing step ends the build."""
    for word, rest in instructions(name):
        assert not re.search(r"\b(curl|wget|apt|apt-get|sudo)\b|https?://|:latest\b", rest), rest
        assert not re.search(r"(?<!\\);|\|\|", rest), rest
        if word == "RUN" and re.search(r" pip .* install ", rest):
            assert "-c pins.txt" in rest or "--no-index --no-deps" in rest, rest
        if word == "RUN" and "TORCH" in rest:
            assert rest.index("--require-hashes --no-deps") < rest.index("-r requirements.lock") < rest.index("TORCH")


@each
def test_dependencies_are_layers_of_their_own(name: str) -> None:
    """A change of the code must not reinstall torch: libraries are installed before any code is copied."""
    stage = [rest for word, rest in instructions(name) if word in ("FROM", "COPY")]
    begin = next(index for index, rest in enumerate(stage) if rest.endswith("AS libraries"))
    end = next(index for index, rest in enumerate(stage) if rest.endswith("AS package"))
    assert [rest.split()[-2] for rest in stage[begin + 1 : end]] == ["requirements.lock", "/build/needs.txt"]


@each
def test_the_extras_of_the_image_exist(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (extras,) = [
        found[1].split()
        for word, rest in instructions(name)
        if word == "RUN" and (found := re.search(r"requirements\.py ([\w ]+) >", rest))
    ]
    assert extras
    assert set(extras) <= project["optional-dependencies"].keys()


def test_every_package_and_its_build_dependencies_are_sent() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tiercel").rglob("*.py")]
    needed += ["tiercel/embedded/model/config.json", project["project"]["readme"], *project["project"]["license-files"]]
    assert [path for path in needed if not is_sent(path)] == []


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".venv/bin/python",
        "docker/.env",
        "tiercel/cli/.env",
        "tiercel/cli/__pycache__/main.pyc",
        "models/a",
    ],
)
def test_files_not_needed_by_the_image_are_excluded(path: str) -> None:
    assert not is_sent(path)


@each
def test_the_image_runs_as_an_ordinary_user_and_receives_sigterm(name: str) -> None:
    stage = last_stage(name)
    assert stage["USER"] == "10001:10001"
    assert stage["STOPSIGNAL"] == "SIGTERM"
    assert json.loads(stage["ENTRYPOINT"]) == ["tiercel", "serve", "--host", "0.0.0.0"]


@each
def test_the_image_checks_its_own_health(name: str) -> None:
    _, _, command = last_stage(name)["HEALTHCHECK"].partition(" CMD ")
    assert json.loads(command) == PROBE


@each
def test_the_image_has_the_arguments_that_make_and_compose_have(name: str) -> None:
    arguments = dict(rest.split("=", 1) for word, rest in instructions(name) if word == "ARG" and "=" in rest)
    makefile = dict(re.findall(r"^(\w+) \?= ?(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert arguments["TORCH"] == makefile["TORCH"]
    for service in compose("compose.yaml")["services"].values():
        assert arguments.keys() == {"BASE", "COMPILER", "TORCH", "PIP_ARGS"} == set(service["build"]["args"])


@each
def test_no_key_is_written_into_the_image(name: str) -> None:
    assert not [rest for word, rest in instructions(name) if word in ("ARG", "ENV") and "KEY" in rest]


def test_the_image_for_cuda_differs_only_by_the_device() -> None:
    """The images differ only where they must, so that tests of the running one hold for the other."""
    cpu, cuda = (instructions(name) for name in DOCKERFILES)
    assert [line for line in cpu if line not in cuda] == [("ARG", "BASE=python:3.11-slim")]
    added = [rest for line in cuda if line not in cpu for rest in line[1:]]
    assert added == [
        "BASE=python:3.11",
        "NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility TIERCEL_DEVICE=cuda",
        "TRITON_CACHE_DIR=/var/lib/tiercel/cache/triton",
    ]


def test_kernels_are_compiled_where_there_is_a_compiler_and_loaded_from_where_code_may_be() -> None:
    """Slim images have no compiler; code on a tmpfs with noexec cannot be loaded."""
    (base,) = [rest for word, rest in instructions("Dockerfile.cuda") if word == "ARG" and rest.startswith("BASE=")]
    assert "slim" not in base
    assert "alpine" not in base
    variables = dict(word.split("=", 1) for word in last_stage("Dockerfile.cuda")["ENV"].split())
    folder = variables["TRITON_CACHE_DIR"]
    assert folder.startswith(f"{variables['XDG_CACHE_HOME']}/")
    service = merged("compose.gpu.yaml")["services"]["tiercel"]
    (volume,) = [mount for mount in service["volumes"] if folder.startswith(mount.split(":")[1])]
    assert not volume.endswith(":ro")
    assert not [mount for mount in service["tmpfs"] if folder.startswith(mount.partition(":")[0])]
