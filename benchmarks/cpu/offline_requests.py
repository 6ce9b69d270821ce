"""Common parts of the offline peers: the list of `tiercel bench throughput --save-requests`, and their JSON result.

tiercel is not imported, because these scripts run in the environment of a peer.
"""

import hashlib
import json
import platform
import random
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

SCHEMA_VERSION = 1


class PeerRequest(NamedTuple):
    """A prompt and the exact length of its answer."""

    prompt_token_ids: list[int]
    output_len: int


def read_requests(path: Path) -> list[PeerRequest]:
    """Read the requests of a file. Exit with one line if there is an error."""
    found: list[PeerRequest] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            found.append(PeerRequest(**json.loads(line)))
        except (ValueError, TypeError) as exc:
            raise SystemExit(f"{path} line {number}: {exc}") from exc
    if not found:
        raise SystemExit(f"{path}: the file contains no request")
    return found


def like(requests: list[PeerRequest], count: int) -> list[PeerRequest]:
    """Return `count` requests for warming up, of the same lengths with other tokens."""
    largest = max(max(one.prompt_token_ids) for one in requests)
    rng = random.Random("warm-up")
    return [PeerRequest(rng.choices(range(largest + 1), k=len(ids)), length) for ids, length in requests[:count]]


def report(
    engine: str,
    model: str,
    requests: list[PeerRequest],
    outputs: list[int],
    elapsed_s: float,
    temperature: float,
    facts: dict[str, object],
    packages: tuple[str, ...],
) -> dict[str, object]:
    """Return the result with the keys of `tiercel bench throughput --output-json`. `outputs`: tokens of each answer.

    Exit with one line if an answer does not have the requested length.
    """
    for number, (request, got) in enumerate(zip(requests, outputs, strict=True), start=1):
        if got != request.output_len:
            raise SystemExit(f"request {number}: {got} output tokens instead of {request.output_len}")
    prompt, output = sum(len(one.prompt_token_ids) for one in requests), sum(outputs)
    return {
        "model_id": model,
        "elapsed_time": elapsed_s,
        "num_requests": len(requests),
        "total_num_tokens": prompt + output,
        "requests_per_second": len(requests) / elapsed_s,
        "tokens_per_second": (prompt + output) / elapsed_s,
        "total_prompt_tokens": prompt,
        "total_output_tokens": output,
        "output_tokens_per_second": output / elapsed_s,
        "schema_version": SCHEMA_VERSION,
        "kind": "throughput",
        "engine": engine,
        "requests_sha256": _digest(requests),
        "temperature": temperature,
        "facts": facts,
        "versions": {"python": platform.python_version(), **_versions(packages)},
    }


def finish(result: dict[str, object], path: Path | None) -> None:
    """Print the result, and write it to the given file."""
    text = json.dumps(result, indent=2)
    print(text)
    if path is not None:
        path.write_text(text + "\n", encoding="utf-8")


def _digest(requests: list[PeerRequest]) -> str:
    """Return the SHA-256 of the file as tiercel writes it."""
    found = hashlib.sha256()
    for one in requests:
        found.update(json.dumps(one._asdict(), separators=(",", ":")).encode() + b"\n")
    return found.hexdigest()


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
