"""The largest requests that the document allows: a server with default settings takes them, and others do not wait."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest

from tests.server.fake_engine import Script
from tests.server.harness import Running, running, server_settings, text_body, until, with_server
from tiercel.server.api.prompt import MAX_PROMPTS
from tiercel.server.api.schemas.embeddings import MAX_INPUTS
from tiercel.server.http.patience import PatientSender
from tiercel.server.http.pieces import PIECE_BYTES, send_pieces
from tiercel.settings.settings import ServerSettings

AT_ONCE = 128
P = ParamSpec("P")
T = TypeVar("T")


@contextlib.asynccontextmanager
async def each_turn(look: Callable[[], None]) -> AsyncIterator[None]:
    """Call `look` in every turn of the event loop."""

    async def run() -> None:
        while True:
            look()
            await asyncio.sleep(0)

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()


@pytest.mark.parametrize(
    ("path", "body", "sequences"),
    [
        ("/v1/rerank", {"query": "a", "documents": ["b"] * MAX_INPUTS}, MAX_INPUTS + 1),
        ("/v1/completions", text_body([[5]] * MAX_PROMPTS, max_tokens=1), MAX_PROMPTS),
    ],
)
@pytest.mark.sampled(1)
def test_the_largest_request_of_the_document_is_taken_in_slices(
    model_folder: Path, path: str, body: dict[str, object], sequences: int
) -> None:
    places = ServerSettings(model="", served_model_names=("a",)).max_num_queued_reqs
    assert places >= max(sequences, 2 * MAX_INPUTS)  # so many has /v1/score with two lists

    async def test(server: Running) -> None:
        counts = [0]

        def look() -> None:
            counts.append(server.context.client.sequences.num_unfinished)

        async with each_turn(look):
            answer = await server.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert len(server.engine.submitted) == sequences
        assert max(after - before for before, after in itertools.pairwise(counts)) == AT_ONCE

    with_server(server_settings(model_folder), test, Script(max_running=MAX_PROMPTS))


def test_a_request_that_ends_while_it_is_submitted_leaves_nothing(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        def look() -> None:
            if AT_ONCE <= server.context.client.sequences.num_unfinished < MAX_INPUTS:
                for task in asyncio.all_tasks():
                    if "run_asgi" in repr(task.get_coro()):
                        task.cancel()

        async with each_turn(look):
            with contextlib.suppress(Exception):
                await server.http.post("/v1/embeddings", json={"input": [[5]] * MAX_INPUTS})
        assert 0 < len(server.engine.submitted) < MAX_INPUTS
        await until(lambda: server.context.client.sequences.num_unfinished == 0)
        assert server.context.admission.num_reserved == server.context.answers.held_bytes == 0
        assert (await server.http.post("/v1/embeddings", json={"input": [[5]]})).status_code == 200

    with_server(server_settings(model_folder), test, Script(step_s=0.01))


class _Workers(ThreadPoolExecutor):
    """Threads that note what they are asked for."""

    asked: list[str]

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        self.asked.append(getattr(fn, "__qualname__", ""))
        return super().submit(fn, *args, **kwargs)


def test_a_worker_compares_texts(model_folder: Path) -> None:
    workers = _Workers(1)
    workers.asked = []

    async def run() -> None:
        settings = server_settings(model_folder)
        async with running(settings, changed=lambda context: replace(context, workers=workers)) as server:
            for path, body in (
                ("/v1/rerank", {"query": "a", "documents": ["b"]}),
                ("/v1/score", {"text_1": "a", "text_2": "b"}),
            ):
                workers.asked.clear()
                assert (await server.http.post(path, json=body)).status_code == 200
                assert [name for name in workers.asked if "WholeReply" in name], workers.asked

    asyncio.run(run())


def test_the_loop_turns_after_each_piece_of_a_body() -> None:
    turns: list[int] = []
    sent: list[int] = []

    async def run() -> None:
        async def send(_message: Any) -> None:  # Any: ASGI's messages; a client that reads at once
            sent.append(len(turns))

        async with each_turn(lambda: turns.append(0)):
            await asyncio.sleep(0)
            await send_pieces(PatientSender(send, None, 1.0), [b"x" * PIECE_BYTES] * 8, None)

    asyncio.run(run())
    assert len(sent) == 10
    assert len(set(sent[1:])) == len(sent) - 1
