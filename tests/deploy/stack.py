"""A compose project under test."""

import contextlib
import copy
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.engine import Engine

KEY = "sk-deploy"
"""Of the client whose requests the tests make."""
OPERATOR_KEY = "sk-operator"
PATIENCE_S = 120.0


class Stack:
    """One project. HTTP needs the engine's network around it."""

    def __init__(self, engine: Engine, name: str, files: tuple[Path, ...], port: int, **variables: str) -> None:
        self.engine = engine
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, headers=bearer(KEY), timeout=60, trust_env=False)
        self._files = files
        keys = {"TIERCEL_API_KEY": KEY, "TIERCEL_ADMIN_KEY": OPERATOR_KEY}
        self._variables = {**keys, "TIERCEL_HOST_PORT": str(port), "TIERCEL_MEMORY": "3g", **variables}

    def with_files(self, *overlays: Path, **variables: str) -> "Stack":
        """Return the same project with overlays."""
        stack = copy.copy(self)
        stack._files = (*self._files, *overlays)
        stack._variables = self._variables | variables
        return stack

    def compose(self, *words: str, patience_s: float = 600.0) -> str:
        """Run `docker compose` with the files of this project and return its output. Errors: CommandError."""
        files = [word for file in self._files for word in ("--file", str(file))]
        project = ["compose", "--project-name", self.name, *files]
        return self.engine.docker(*project, *words, patience_s=patience_s, variables=self._variables)

    def inspect(self, template: str, service: str = "tiercel") -> str:
        """Inspect the container of a service with a Go template."""
        return self.engine.docker("inspect", "--format", template, f"{self.name}-{service}-1").strip()

    def restarts(self) -> int:
        """Return how often the engine has restarted the daemon's container."""
        return int(self.inspect("{{.RestartCount}}"))

    def python(self, code: str, *arguments: str) -> str:
        """Run a line of Python in the daemon's container and return its output."""
        return self.compose("exec", "-T", "tiercel", "python", "-c", code, *arguments).strip()

    def wait_ready(self) -> None:
        """Wait until the server is ready."""

        def is_ready() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return self.http.get("/ready").status_code == 200
            return False

        self.wait(is_ready, "ready")

    def wait(self, is_so: Callable[[], bool], word: str) -> None:
        """Wait until a condition holds."""
        end_s = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < end_s, f"not {word}: {self.compose('logs', '--no-color', '--tail', '40')}"
            time.sleep(0.05)

    def chat(self, content: str, **fields: object) -> httpx.Response:
        """Send one greedy chat request."""
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def complete(self, prompt: str) -> tuple[str, int]:
        """Return a greedy completion and the number of cached prompt tokens."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 12}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        printed = answer.json()
        return printed["choices"][0]["text"], printed["usage"]["prompt_tokens_details"]["cached_tokens"]

    def stream(self, path: str, **fields: object) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream, which must end with [DONE]."""  # Any: JSON
        with self.http.stream("POST", path, json={"stream": True, **fields}) as answer:
            assert answer.status_code == 200, answer.read()
            last = ""
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    last = line.removeprefix("data: ")
                    if last != "[DONE]":
                        yield json.loads(last)
            assert last == "[DONE]"

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels."""
        text = self.http.get("/metrics", headers=bearer(OPERATOR_KEY)).raise_for_status().text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        found = [sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items()]
        assert found, name
        return sum(found)


def bearer(key: str) -> dict[str, str]:
    """Return the header with a key."""
    return {"Authorization": f"Bearer {key}"}
