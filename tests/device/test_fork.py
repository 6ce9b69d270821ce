"""The second queue of a CUDA device: a fake of torch's streams notes the calls."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tiercel.device.fork import CudaFork


class NotedStream:
    """A stream that notes what waits for what. It may only wait for streams that a capture has reached."""

    def __init__(self, name: str, calls: list[str], captured: set[str]) -> None:
        self.name = name
        self._calls = calls
        self._captured = captured

    def wait_stream(self, other: "NotedStream") -> None:
        assert other.name in self._captured, "a capture that waits for a stream outside of it is invalid"
        self._captured.add(self.name)
        self._calls.append(f"{self.name} waits for {other.name}")


def test_the_side_stream_becomes_a_branch_of_the_capture_and_joins_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, captured = list[str](), {"lane"}
    lane, side = (NotedStream(name, calls, captured) for name in ("lane", "side"))
    running = [lane]

    @contextmanager
    def stream(chosen: NotedStream) -> Iterator[None]:
        running.append(chosen)
        yield
        running.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: running[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    fork = CudaFork(side)  # type: ignore[arg-type]
    fork.meet()
    fork.aside(lambda: calls.append(f"job on {running[-1].name}"))
    assert running == [lane]
    fork.meet()
    both = ["side waits for lane", "lane waits for side"]
    assert calls == [*both, "job on side", *both]
