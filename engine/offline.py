"""The engine without HTTP: its own loop driven in this process, requests handed over together, tokens kept."""

import gc
import select
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from tiercel.clock import Clock
from tiercel.engine.assembly import Engine, open_engine
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.measure.stopwatch import Laps, Stopwatch
from tiercel.engine.memory.capacity import step_tokens
from tiercel.engine.wake import Wake
from tiercel.errors import TiercelError
from tiercel.ids import SeqId
from tiercel.outcome import Finished, FinishReason, Gauges
from tiercel.request import Request, SamplingParams
from tiercel.settings import EngineSettings
from tiercel.wire import FromEngine, Report, Submit


@dataclass(frozen=True, slots=True)
class OfflineRequest:
    """One request: raw uint32 token ids (`pack_tokens`), and how the answer is drawn."""

    prompt: bytes
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class OfflineAnswer:
    """What came of it. Times count from when all requests were handed over."""

    tokens: "array[int]"
    first_s: float
    last_s: float


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """All answers in the order that was asked, and what they took."""

    answers: tuple[OfflineAnswer, ...]
    elapsed_s: float  # from before the first request was handed over until the last has ended
    laps: Laps
    before: Gauges  # the books when it began
    after: Gauges  # and when it had ended


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What this engine turned out to be."""

    dtype: str
    device: str
    attention: str  # the backend's class
    model_impl: str
    vocab_size: int
    max_model_len: int  # tokens, prompt and answer together
    block_size: int  # tokens
    blocks: int  # of the device tier
    step_tokens: int  # most of one step
    kv_bytes: int
    weights_bytes: int


class Inbox:
    """What the loop posts, kept as it comes: it is sorted out when the clock has stopped."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.ended = 0  # sequences, since `clear`
        self.reports: list[tuple[float, Report]] = []  # with when each came

    def post(self, message: FromEngine) -> None:
        """Keep what has tokens or ends in it."""
        if isinstance(message, Report) and (message.seqs or message.finished):
            self.reports.append((self._clock.now_s(), message))
            self.ended += len(message.finished)

    def clear(self) -> None:
        """Forget all."""
        self.reports.clear()
        self.ended = 0


class OfflineEngine:
    """One engine in this process. Use with `with`."""

    def __init__(
        self, engine: Engine, settings: EngineSettings, inbox: Inbox, wake: Wake, clock: Clock, stopwatch: Stopwatch
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._inbox = inbox
        self._wake = wake
        self._clock = clock
        self._stopwatch = stopwatch
        self._next = 1  # id of the next sequence

    @staticmethod
    def open(settings: EngineSettings, clock: Clock) -> "OfflineEngine":
        """Load the model and put the rooms together, as the engine process does. Errors: ConfigError."""
        wake, inbox, stopwatch = Wake.open(), Inbox(clock), Stopwatch(clock)
        engine = open_engine(settings, inbox, wake, clock, wrap=stopwatch.watch)
        # What is loaded stays: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        return OfflineEngine(engine, settings, inbox, wake, clock, stopwatch)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the lanes, and let what is written to a disk end."""
        self._engine.close()
        self._wake.close()
        gc.unfreeze()

    @property
    def facts(self) -> EngineFacts:
        """What was learnt by opening it."""
        engine, model, capacity = self._engine, self._engine.model, self._engine.capacity
        device = engine.device
        attention = open_attention(
            self._settings.attention_backend, torch.device(device.name), device.processors, device.capability
        )
        return EngineFacts(
            dtype=engine.dtype,
            device=engine.device.name,
            attention=type(attention).__name__,
            model_impl=model.impl,
            vocab_size=model.vocab_size,
            max_model_len=capacity.max_model_len,
            block_size=capacity.block_size,
            blocks=capacity.blocks,
            step_tokens=step_tokens(self._settings, engine.device),
            kv_bytes=capacity.kv_bytes,
            weights_bytes=capacity.weights_bytes,
        )

    def run(self, asked: Sequence[OfflineRequest], tell: Callable[[int], None] | None = None) -> OfflineRun:
        """Hand over all requests at once and step until each has its whole answer.

        `tell` hears how many have ended. Requests must go on past the end of sequence (`ignore_eos`): each has to get
        `max_tokens` tokens. Errors: TiercelError that names the first request that did not.
        """
        loop, inbox = self._engine.loop, self._inbox
        inbox.clear()
        self._stopwatch.take()
        before = loop.gauges.read()
        first, self._next = self._next, self._next + len(asked)
        now_s = self._clock.now_s()
        mail = [
            Submit(Request(id=SeqId(first + place), prompt=one.prompt, params=one.params, arrival_s=now_s))
            for place, one in enumerate(asked)
        ]
        started_s = self._clock.now_s()
        loop.take(mail)
        told = 0
        while inbox.ended < len(asked):
            self._turn()
            if tell is not None and inbox.ended != told:
                told = inbox.ended
                tell(told)
        elapsed_s = self._clock.now_s() - started_s
        laps = self._stopwatch.take()
        while not loop.is_idle:  # ghosts that were launched before the last end was known
            self._turn()
        answers = _answers(asked, first, started_s, inbox.reports)
        return OfflineRun(answers, elapsed_s, laps, before, loop.gauges.read())

    def _turn(self) -> None:
        """One step of the loop; sleep when there is nothing to do. A turn that did nothing is no step."""
        self._engine.upkeep.tend()
        self._stopwatch.begin()
        if self._engine.loop.step():
            self._stopwatch.end()
            return
        select.select([self._wake], [], [], self._engine.patience_s())
        self._wake.clear()


def _answers(
    asked: Sequence[OfflineRequest], first: int, started_s: float, reports: Sequence[tuple[float, Report]]
) -> tuple[OfflineAnswer, ...]:
    """Tokens and times by request. Errors: TiercelError where one is not as long as asked."""
    tokens = [array("I") for _ in asked]
    first_s, last_s = [0.0] * len(asked), [0.0] * len(asked)
    ends: dict[int, Finished] = {}
    for at_s, report in reports:
        for seq, token in zip(memoryview(report.seqs).cast("Q"), memoryview(report.tokens).cast("I"), strict=True):
            place = seq - first
            if not tokens[place]:
                first_s[place] = at_s - started_s
            tokens[place].append(token)
            last_s[place] = at_s - started_s
        for finished in report.finished:
            ends[finished.seq - first] = finished
    for place, one in enumerate(asked):
        _check_length(place + 1, one, len(tokens[place]), ends[place])
    return tuple(OfflineAnswer(*answer) for answer in zip(tokens, first_s, last_s, strict=True))


def _check_length(number: int, asked: OfflineRequest, got: int, end: Finished) -> None:
    """Errors: TiercelError when prompt or answer has another length than was asked for."""
    wanted_prompt, wanted = len(asked.prompt) // array("I").itemsize, asked.params.max_tokens
    if (end.num_prompt, end.num_outputs, got, end.reason) == (wanted_prompt, wanted, wanted, FinishReason.LENGTH):
        return
    why = f"{end.reason.value}: {end.error}" if end.error else end.reason.value
    raise TiercelError(
        "offline.wrong_length",
        f"request {number}: asked {wanted_prompt} tokens of prompt and {wanted} of answer, "
        f"got {end.num_prompt} and {got} ({why})",
    )
