"""The engine without HTTP: its loop runs in this process, on requests that are submitted together."""

import gc
import select
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from tiercel.device.base import Device
from tiercel.engine.assembly import Engine, open_engine
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.measure.stopwatch import Laps, Stopwatch
from tiercel.engine.memory.capacity import for_device, step_tokens
from tiercel.engine.wake import Wake
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import Clock
from tiercel.values.errors import TiercelError
from tiercel.values.ids import SeqId
from tiercel.values.outcome import Finished, FinishReason, Gauges
from tiercel.values.request import Request, SamplingParams
from tiercel.wire.frames import FromEngine, Report, Submit


@dataclass(frozen=True, slots=True)
class OfflineRequest:
    """One request: raw uint32 token ids (`pack_tokens`) and sampling parameters."""

    prompt: bytes
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class OfflineAnswer:
    """The answer to a request. Times count from the submission of all requests."""

    tokens: "array[int]"
    first_s: float
    last_s: float
    prompt_logprobs: "array[float]"  # of the prompt's tokens but the first, if the request asks for them


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """All answers in the order of the requests, and the time and gauges of the run."""

    answers: tuple[OfflineAnswer, ...]
    elapsed_s: float  # from the submission until the last request has ended
    laps: Laps
    before: Gauges  # at the submission
    after: Gauges  # at the end


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The facts of an opened engine."""

    dtype: str  # of weights, activations and KV, as `Precision` prints it
    device: str
    attention: str  # class of the attention backend
    model_impl: str
    vocab_size: int
    max_model_len: int  # tokens of prompt and answer together
    block_size: int  # tokens
    blocks: int  # of the device tier
    step_tokens: int  # the token budget of a step
    sequences: int  # that may run at once
    kv_bytes: int
    weights_bytes: int


class Inbox:
    """Keeps the loop's reports with their times; they are evaluated when the measured time is over."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.ended = 0  # sequences that ended since `clear`
        self.reports: list[tuple[float, Report]] = []  # each with the time of its arrival

    def post(self, message: FromEngine) -> None:
        """Keep a report that holds results or ends of sequences."""
        if isinstance(message, Report) and (message.seqs or message.finished or message.prompts):
            self.reports.append((self._clock.now_s(), message))
            self.ended += len(message.finished)

    def clear(self) -> None:
        """Remove all reports."""
        self.reports.clear()
        self.ended = 0


class OfflineEngine:
    """An engine in this process; a context manager."""

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
    def open(settings: EngineSettings, clock: Clock, device: Device | None = None) -> "OfflineEngine":
        """Load the model and open the engine, as the engine process does. Errors: ConfigError.

        `device`: by default the one of the settings.
        """
        wake, inbox, stopwatch = Wake.open(), Inbox(clock), Stopwatch(clock)
        engine = open_engine(settings, inbox, wake, clock, wrap=stopwatch.watch, device=device)
        # Objects loaded until now stay for good: exclude them from garbage collection.
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
        """Stop the lanes, and wait for writes to the disk."""
        self._engine.close()
        self._wake.close()
        gc.unfreeze()

    @property
    def facts(self) -> EngineFacts:
        """The facts of this engine."""
        engine, model, capacity = self._engine, self._engine.model, self._engine.capacity
        device = engine.device
        attention = open_attention(
            self._settings.attention_backend, torch.device(device.name), device.processors, device.capability
        )
        return EngineFacts(
            dtype=str(model.precision),
            device=engine.device.name,
            attention=type(attention).__name__,
            model_impl=model.impl,
            vocab_size=model.vocab_size,
            max_model_len=capacity.max_model_len,
            block_size=capacity.block_size,
            blocks=capacity.blocks,
            step_tokens=step_tokens(self._settings, engine.device),
            sequences=for_device(self._settings, engine.device).sequences,
            kv_bytes=capacity.kv_bytes,
            weights_bytes=capacity.weights_bytes,
        )

    def run(self, requests: Sequence[OfflineRequest], on_progress: Callable[[int], None] | None = None) -> OfflineRun:
        """Submit all requests at once and step until each has its whole answer.

        `on_progress` is called with the number of requests that have ended. Requests must set `ignore_eos`, because
        each has to get `max_tokens` tokens. Errors: TiercelError naming the first request that got fewer.
        """
        loop, inbox = self._engine.loop, self._inbox
        inbox.clear()
        self._stopwatch.take()
        before = loop.gauges.read()
        first, self._next = self._next, self._next + len(requests)
        now_s = self._clock.now_s()
        mail = [
            Submit(Request(id=SeqId(first + index), prompt=request.prompt, params=request.params, arrival_s=now_s))
            for index, request in enumerate(requests)
        ]
        started_s = self._clock.now_s()
        loop.take(mail)
        reported = 0
        while inbox.ended < len(requests):
            self._turn()
            if on_progress is not None and inbox.ended != reported:
                reported = inbox.ended
                on_progress(reported)
        elapsed_s = self._clock.now_s() - started_s
        laps = self._stopwatch.take()
        while not loop.is_idle:  # steps that were launched before the last end was known
            self._turn()
        answers = _answers(requests, first, started_s, inbox.reports)
        return OfflineRun(answers, elapsed_s, laps, before, loop.gauges.read())

    def _turn(self) -> None:
        """Run one step of the loop; sleep if there was nothing to do, and do not count it as a step."""
        self._engine.upkeep.tend()
        self._stopwatch.begin()
        if self._engine.loop.step():
            self._stopwatch.end()
            return
        select.select([self._wake], [], [], self._engine.patience_s())
        self._wake.clear()


def _answers(
    requests: Sequence[OfflineRequest], first: int, started_s: float, reports: Sequence[tuple[float, Report]]
) -> tuple[OfflineAnswer, ...]:
    """Return the answer to each request. Errors: TiercelError if one does not have the requested length."""
    tokens = [array("I") for _ in requests]
    logprobs = [array("f") for _ in requests]
    first_s, last_s = [0.0] * len(requests), [0.0] * len(requests)
    ends: dict[int, Finished] = {}
    for at_s, report in reports:
        for seq, token in zip(memoryview(report.seqs).cast("Q"), memoryview(report.tokens).cast("I"), strict=True):
            index = seq - first
            if not tokens[index]:
                first_s[index] = at_s - started_s
            tokens[index].append(token)
            last_s[index] = at_s - started_s
        for part in report.prompts:
            logprobs[part.seq - first].frombytes(part.logprobs)
        for finished in report.finished:
            ends[finished.seq - first] = finished
    for index, request in enumerate(requests):
        _check_length(index + 1, request, len(tokens[index]), ends[index])
    return tuple(OfflineAnswer(*answer) for answer in zip(tokens, first_s, last_s, logprobs, strict=True))


def _check_length(number: int, request: OfflineRequest, got: int, end: Finished) -> None:
    """Errors: TiercelError if the prompt or the answer has another length than requested."""
    wanted_prompt, wanted = len(request.prompt) // array("I").itemsize, request.params.max_tokens
    if (end.num_prompt, end.num_outputs, got, end.reason) == (wanted_prompt, wanted, wanted, FinishReason.LENGTH):
        return
    why = f"{end.reason.value}: {end.error}" if end.error else end.reason.value
    raise TiercelError(
        "offline.wrong_length",
        f"request {number}: requested {wanted_prompt} tokens of prompt and {wanted} of answer, "
        f"got {end.num_prompt} and {got} ({why})",
    )
