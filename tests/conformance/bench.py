"""The engine without HTTP, with every report kept."""

import select
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.crossing import crossed
from tests.foreign import foreign_numbers
from tiercel.engine.assembly import Engine, open_engine
from tiercel.engine.step.flight import StepRunner
from tiercel.engine.wake import Wake
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import MonotonicClock
from tiercel.values.ids import SeqId
from tiercel.values.outcome import Finished, Gauges, PromptReading, TokenLogprobs
from tiercel.values.request import Request, SamplingParams, pack_tokens
from tiercel.wire.frames import FromEngine, Report, Submit


@dataclass
class Inbox:
    """The reports as the HTTP process would receive them."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompts: dict[int, list[PromptReading]] = field(default_factory=dict)
    pooled: "dict[int, array[float]]" = field(default_factory=dict)
    most_running: int = 0

    def post(self, message: FromEngine) -> None:
        if not isinstance(message, Report):
            return
        message = crossed(message)
        seqs = memoryview(message.seqs).cast("Q")
        for seq, token in zip(seqs, memoryview(message.tokens).cast("I"), strict=True):
            self.tokens.setdefault(seq, []).append(token)
        for found in message.logprobs:
            self.logprobs.setdefault(found.seq, []).append(found)
        for part in message.prompts:
            assert part.seq not in self.finished
            self.prompts.setdefault(part.seq, []).append(part)
        for pooled in message.pooled:
            assert pooled.seq not in self.pooled
            self.pooled[pooled.seq] = array("f", pooled.vector)
        for finished in message.finished:
            self.finished[finished.seq] = finished
        if message.gauges is not None:
            self.most_running = max(self.most_running, message.gauges.num_running)


class EngineBench:
    """An engine with one compute thread, stepped by the test."""

    def __init__(
        self,
        folder: Path,
        arena_fd: int | None = None,
        wrap: Callable[[StepRunner], StepRunner] = lambda runner: runner,
        **settings: object,
    ) -> None:
        self.inbox = Inbox()
        self.wake = Wake.open()
        chosen = {"model": str(folder), "threads": 1, "max_num_seqs": 16, "dtype": "float32", **settings}
        asked = EngineSettings(**chosen)  # type: ignore[arg-type]
        self.engine: Engine = open_engine(asked, self.inbox, self.wake, MonotonicClock(), arena_fd, wrap=wrap)
        self._next = 1
        self.is_checked = True  # whether the books are checked after every step

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        scope: bytes = b"",
        outputs: Sequence[int] = (),
        num_read: int = 0,
    ) -> int:
        seq, self._next = self._next, self._next + 1
        request = Request(
            id=SeqId(seq),
            prompt=pack_tokens(prompt),
            params=params,
            arrival_s=float(seq),
            scope=scope,
            outputs=pack_tokens(outputs),
            num_read=num_read,
        )
        self.engine.loop.take([Submit(request)])
        return seq

    def run(self) -> None:
        """Step until all requests have ended."""
        self._turn_while(lambda: not self.engine.loop.is_idle)

    def settle(self) -> None:
        """Step until no copy between tiers is in progress or due."""
        self._turn_while(lambda: self.engine.cache.background.is_busy)
        assert self.gauges.blocks_used == 0
        crossed(Report(gauges=self.gauges))
        assert not foreign_numbers((self.engine.cache, self.engine.loop.book))

    def _turn_while(self, is_wanted: Callable[[], bool]) -> None:
        idle_turns = 0
        while is_wanted():
            is_busy = self.engine.loop.step()
            if self.is_checked:
                self.engine.loop.check_integrity()
            idle_turns = 0 if is_busy else idle_turns + 1
            if not is_busy:
                select.select([self.wake], [], [], 0.02)
                self.wake.clear()
            assert idle_turns < 500, "unfinished work, and nothing happens"

    def greedy(self, prompts: Sequence[Sequence[int]], max_tokens: int, **params: object) -> list[list[int]]:
        """Submit all prompts at once and return the tokens of each."""
        asked = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params)  # type: ignore[arg-type]
        seqs = [self.submit(prompt, asked) for prompt in prompts]
        self.run()
        self.settle()
        return [self.inbox.tokens[seq] for seq in seqs]

    @property
    def gauges(self) -> Gauges:
        return self.engine.loop.gauges.read()

    def close(self) -> None:
        self.engine.close()
        self.wake.close()
