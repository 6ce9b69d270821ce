"""Parsers of the files in docker/: instructions, stages, and services with their overlays."""

import fnmatch
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
DOCKER = ROOT / "docker"
DOCKERFILES = ("Dockerfile", "Dockerfile.cuda")
BASE = "compose.yaml"
OVERLAYS = ("compose.fleet.yaml", "compose.gpu.yaml", "compose.observability.yaml")

# Any: what a YAML file holds is known only once it is read
Tree = dict[str, Any]


@cache
def text(name: str) -> str:
    """Return the text of a file of docker/."""
    return (DOCKER / name).read_text(encoding="utf-8")


@cache
def instructions(name: str) -> tuple[tuple[str, str], ...]:
    """Return (word, rest) of each instruction of a Dockerfile, with joined lines and without comments."""
    lines = [line for line in text(name).splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return tuple((word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined))


def last_stage(name: str) -> dict[str, str]:
    """Return the instructions of the last stage by word: the last one, but all of ENV."""
    stages = [index for index, (word, _) in enumerate(instructions(name)) if word == "FROM"]
    stage: dict[str, str] = {}
    for word, rest in instructions(name)[stages[-1] :]:
        stage[word] = f"{stage[word]} {rest}" if word == "ENV" and word in stage else rest
    return stage


def context_sources(name: str) -> set[str]:
    """Return every path of the build context that a Dockerfile copies or mounts."""
    sources: set[str] = set()
    for word, rest in instructions(name):
        if word == "COPY" and "--from=" not in rest:
            sources |= {path for path in rest.split()[:-1] if not path.startswith("--")}
        for fields in mounts(rest):
            if fields["type"] == "bind" and "from" not in fields:
                sources.add(fields.get("source", "."))
    return sources


def mounts(rest: str) -> list[dict[str, str]]:
    """Return the fields of every --mount of an instruction."""
    found = re.findall(r"--mount=(\S+)", rest)
    return [dict(field.partition("=")[::2] for field in mount.split(",")) for mount in found]


def shell_of(rest: str) -> str:
    """Return the commands of a RUN without the flags of RUN."""
    return re.sub(r"^(--\S+\s+)+", "", rest)


@cache
def compose(name: str) -> Tree:
    """Read one compose file."""
    tree: Tree = yaml.safe_load(text(name))
    return tree


def merged(*names: str) -> Tree:
    """Return compose.yaml with overlays: mappings are joined, other values replaced."""
    tree = compose(BASE)
    for name in names:
        tree = _joined(tree, compose(name))
    return tree


def _joined(under: Tree, over: Tree) -> Tree:
    tree = dict(under)
    for key, value in over.items():
        old = tree.get(key)
        tree[key] = _joined(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return tree


@cache
def _ignored() -> tuple[str, ...]:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


def is_sent(path: str) -> bool:
    """Return whether .dockerignore lets a path through. The last matching line decides."""
    sent = True
    for line in _ignored():
        pattern = line.removeprefix("!").removeprefix("**/")
        tails = [path.split("/", depth)[depth] for depth in range(path.count("/") + 1)] if "**/" in line else [path]
        if any(fnmatch.fnmatch(tail, pattern) or tail.startswith(f"{pattern}/") for tail in tails):
            sent = line.startswith("!")
    return sent


def seconds(duration: str) -> float:
    """Parse a duration of a compose file."""
    found = re.fullmatch(r"(\d+)(s|m)", duration)
    assert found, duration
    return int(found[1]) * {"s": 1, "m": 60}[found[2]]
