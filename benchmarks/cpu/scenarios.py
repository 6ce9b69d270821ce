"""The workloads W1 to W4.

W1   three streams one after another, prompt 128, answer 128
W2   16 of those at once
W3   32 at once with 512 tokens in common, which no server has seen, and 64 of their own; answer 32
W3w  the same after one request with the common tokens has ended
W4   8 streams (prompt 128); when each has 16 chunks, a prompt of 4,096 tokens arrives (answer 16). The streams are cut
     off when it has ended.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.cpu.client import StreamingClient
from benchmarks.cpu.prompts import Prompts
from benchmarks.cpu.timings import AnswerTimes, beside_streams, faults, throughput

_GOING = 16  # chunks that every stream of W4 has when the long prompt arrives
_WARM_UP = (2, 64, 8)  # requests, tokens of prompt and answer
_ENDLESS = 2_048  # tokens of a stream of W4, more than it can generate until it is cut off


class WorkloadFault(Exception):
    """The answers are not those that were requested; a line for each kind of fault."""


@dataclass(frozen=True, slots=True)
class Size:
    """Lengths in tokens."""

    requests: int
    prompt: int
    answer: int
    prefix: int = 0
    long: int = 0


SIZE_BY_WORKLOAD = {
    "W1": Size(3, 128, 128),
    "W2": Size(16, 128, 128),
    "W3": Size(32, 64, 32, prefix=512),
    "W3w": Size(32, 64, 32, prefix=512),
    "W4": Size(8, 128, _ENDLESS, long=4096),
}
QUICK_SIZE_BY_WORKLOAD = {
    "W1": Size(1, 128, 16),
    "W2": Size(4, 128, 16),
    "W3": Size(4, 64, 8, prefix=128),
    "W3w": Size(4, 64, 8, prefix=128),
    "W4": Size(2, 128, _ENDLESS, long=512),
}
"""Small sizes that check a set-up within a minute and measure nothing."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One server, and where the texts of one trial come from: all servers get the same ones from the same key."""

    client: StreamingClient
    prompts: Prompts
    key: str

    def ask(
        self, tokens: int, answer: int, name: object, prefix: str = "", on_event: Callable[[int], None] | None = None
    ) -> Awaitable[AnswerTimes]:
        """Return the coming answer to a new text of `tokens` tokens after `prefix`."""
        text = prefix + self.prompts.text(tokens, f"{self.key}/{name}")
        return self.client.ask(text, self.prompts.count(prefix) + tokens, answer, on_event)


async def run_workload(name: str, size: Size, trial: Trial) -> dict[str, float]:
    """Run a workload once and return its figures. Errors: WorkloadFault."""
    await _warm_up(trial)
    if name == "W4":
        return await _long_beside_streams(size, trial)
    if name == "W1":
        answers = [await trial.ask(size.prompt, size.answer, index) for index in range(size.requests)]
    else:
        prefix = trial.prompts.text(size.prefix, f"{trial.key}/prefix")
        if name == "W3w":
            _check([await trial.ask(size.prompt, 2, "first", prefix)])
        answers = await asyncio.gather(
            *(trial.ask(size.prompt, size.answer, index, prefix) for index in range(size.requests))
        )
    _check(answers)
    return throughput(answers, one_by_one=name == "W1")


async def _warm_up(trial: Trial) -> None:
    requests, prompt, answer = _WARM_UP
    _check(await asyncio.gather(*(trial.ask(prompt, answer, f"warm-up {index}") for index in range(requests))))


async def _long_beside_streams(size: Size, trial: Trial) -> dict[str, float]:
    chunks = [0] * size.requests
    are_going = asyncio.Event()

    def count(index: int) -> Callable[[int], None]:
        def take(number: int) -> None:
            chunks[index] = number
            if min(chunks) >= _GOING:
                are_going.set()

        return take

    streams = [
        asyncio.ensure_future(trial.ask(size.prompt, size.answer, index, on_event=count(index)))
        for index in range(size.requests)
    ]
    waiting = asyncio.ensure_future(are_going.wait())
    await asyncio.wait({waiting, *streams}, return_when=asyncio.FIRST_COMPLETED)  # a stream ends early if it fails
    waiting.cancel()
    long = await trial.ask(size.long, 16, "long")
    for stream in streams:
        stream.cancel()
    answers = await asyncio.gather(*streams)
    _check([*answers, long])
    early = sum(not answer.is_cut for answer in answers)
    if early:
        raise WorkloadFault(f"{early} of {len(answers)} streams ended before the long prompt was answered")
    return beside_streams(answers, long)


def _check(answers: list[AnswerTimes]) -> None:
    if found := faults(answers):
        raise WorkloadFault("; ".join(found[:3]) + (f"; {len(found) - 3} more" if len(found) > 3 else ""))
