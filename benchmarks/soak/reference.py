"""The replay of a soak: some requests are sent again to a daemon without cache, faults or other load."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.daemon import running_daemon
from benchmarks.ties import is_tie
from benchmarks.whole_answer import WholeAnswer, ask

EVERY = 20  # requests, of which one is replayed
_AT_ONCE = 4


class Difference(NamedTuple):
    """A request whose answer differs from the reference."""

    request_id: str
    served: str
    expected: str


def chosen(answers: Sequence[WholeAnswer]) -> list[WholeAnswer]:
    """Return every 20th request."""
    return list(answers[::EVERY])


def replay(answers: Sequence[WholeAnswer], flags: Sequence[str], log: Path) -> list[Difference]:
    """Return the requests that a fresh daemon answers differently."""
    with running_daemon([*flags, "--no-enable-prefix-caching"], log) as daemon:
        return asyncio.run(_replay(daemon.url, answers))


async def _replay(url: str, answers: Sequence[WholeAnswer]) -> list[Difference]:
    differences: list[Difference] = []
    ties: list[str] = []
    left = iter(answers)

    async def work() -> None:
        for served in left:
            again = WholeAnswer(served.path, served.body, key=served.key, request_id=served.request_id)
            await ask(url, again)
            if again.said != served.said:
                if await is_tie(url, served):
                    ties.append(served.request_id)
                    continue
                differences.append(Difference(served.request_id, repr(served.said), repr(again.said)))

    async with asyncio.TaskGroup() as group:
        for _ in range(_AT_ONCE):
            group.create_task(work())
    print(f"{len(ties)} differences excused at ties of the two likeliest tokens: {' '.join(ties) or '-'}")
    return differences
