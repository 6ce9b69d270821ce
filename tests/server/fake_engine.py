"""A fake engine on the other end of a socket: it has no model, speaks the whole wire format and follows a script."""

import argparse
import asyncio
import os
import socket
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from msgspec.structs import replace

from tiercel.settings.settings import EngineSettings
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import Finished, FinishReason, FirstToken, Gauges, Pooled, PromptReading, TokenLogprobs
from tiercel.values.plan import Slice
from tiercel.values.request import Request, unpack_tokens
from tiercel.values.tenant import Tenants
from tiercel.wire.frames import (
    Abort,
    Failed,
    FrameReader,
    FromEngine,
    Loading,
    Quit,
    Ready,
    Report,
    SetSettings,
    SetTenants,
    SetWeights,
    Start,
    Submit,
    ToEngine,
    encode_frame,
)
from tiercel.wire.step_record import StepRecord


@dataclass(frozen=True)
class Script:
    """The behaviour of the fake engine. Outputs repeat `reply`, or the prompt if `reply` is empty."""

    reply: tuple[int, ...] = ()
    reply_to: Callable[[Request], Sequence[int]] | None = None  # instead of `reply`
    end_token: int | None = None  # ends a sequence, except with ignore_eos
    step_s: float = 0.0
    load_s: float = 0.0
    max_running: int = 64
    preempted: int = 0  # preempted sequences in the gauges, in addition to the waiting ones
    failure: str | None = None  # message of a failed start
    fail_prompt_with: int | None = None  # a token whose presence in a prompt fails the sequence
    prompt_failure: str = "secret detail of the failure"  # its message
    die_at_step: int | None = None
    die_of_prompt_with: int | None = None  # a token whose presence in a running prompt ends the engine
    hang_at_step: int | None = None
    ignores_aborts: bool = False
    cached: int = 0  # prompt tokens reported as hits
    extra: Mapping[str, object] = field(default_factory=dict)  # more fields of every `Finished`
    vocab_size: int = 1024
    max_model_len: int = 256
    block_size: int = 16
    blocks_total: int = 64
    has_grammars: bool = True


@dataclass
class Running:
    """One sequence of the fake engine."""

    request: Request
    prompt: list[int]
    outputs: list[int] = field(default_factory=list)  # with those of an engine before
    reply: Sequence[int] = ()
    is_read: bool = False  # what was to be read of its prompt has been sent
    started_s: float | None = None  # start of its first step
    first_s: float | None = None  # time of its first token

    @staticmethod
    def of(request: Request) -> "Running":
        return Running(request, list(unpack_tokens(request.prompt)), list(unpack_tokens(request.outputs)))


class FakeEngine(asyncio.Protocol):
    """Sends one report per step for all running sequences; a prompt is computed in its first step."""

    def __init__(self, script: Script, record: StepRecord | None = None) -> None:
        self.script = script
        self.record = record or StepRecord.open(64)
        self.submitted: list[Request] = []
        self.aborted: list[tuple[SeqId, FinishReason]] = []
        self.tenants: list[Tenants] = []
        self.settings: list[SetSettings] = []
        self.weights: dict[TenantId, float] = {}  # as fronts have set them
        self.has_quit = False
        self.steps = 0
        self.running: dict[SeqId, Running] = {}
        self.waiting: list[Running] = []
        self.closed = asyncio.Event()
        self.start: Start | None = None
        self._reader: FrameReader[ToEngine] = FrameReader(cast(type[ToEngine], ToEngine))
        self._transport: asyncio.Transport | None = None
        self._wake = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None

    @property
    def live(self) -> int:
        """Number of sequences in any state."""
        return len(self.running) + len(self.waiting)

    async def open(self, sock: socket.socket) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        if self._loop_task is not None:
            self._loop_task.cancel()

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            match message:
                case Start():
                    self.start = message
                    self._loop_task = asyncio.ensure_future(self._serve())
                case Submit():
                    self.submitted.append(message.request)
                    self.waiting.append(Running.of(message.request))
                    self._wake.set()
                case Abort() if self.script.ignores_aborts:
                    pass
                case Abort():
                    self._abort(message)
                case SetTenants():
                    self.tenants.append(message.tenants)
                case SetWeights():
                    self.weights |= message.weights
                case SetSettings():
                    self.settings.append(message)
                case Quit():
                    self.has_quit = True
                    self.die()

    def die(self) -> None:
        """Close the connection without a message."""
        if self._transport is not None:
            self._transport.abort()

    def send(self, message: FromEngine) -> None:
        self.send_bytes(encode_frame(message))

    def send_bytes(self, frames: bytes) -> None:
        """Send frames in one piece."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames)

    async def _serve(self) -> None:
        script = self.script
        self.send(Loading("loading weights"))
        await asyncio.sleep(script.load_s)
        if script.failure is not None:
            self.send(Failed("fake.failure", script.failure))
            if self._transport is not None:
                self._transport.close()
            return
        self.send(
            Ready(
                max_model_len=script.max_model_len,
                vocab_size=script.vocab_size,
                block_size=script.block_size,
                blocks_total=script.blocks_total,
                dtype="float32",
                kv_dtype="float32",
                device="cpu",
                model_impl="native",
                weights_bytes=1,
                kv_bytes=1024 * (script.blocks_total + 1),
                load_s=script.load_s,
                has_grammars=script.has_grammars,
                fingerprint="fp_0123456789abcdef",
            )
        )
        while True:
            while not self.live:
                self._wake.clear()
                await self._wake.wait()
            await asyncio.sleep(script.step_s)
            if script.hang_at_step == self.steps:
                await asyncio.Event().wait()
            if script.die_at_step == self.steps:
                self.die()
                return
            self._admit()
            if self._is_poisoned():
                self.die()
                return
            self._step()
            self.record.end(self.steps)

    def _admit(self) -> None:
        """Admit waiting sequences and note them in the record. A suspect runs alone."""
        suspect = next((one for one in self._unfinished() if one.request.suspect_until and not one.started_s), None)
        if suspect is not None:
            self.waiting = [one for one in self._unfinished() if one is not suspect]
            self.running = {suspect.request.id: suspect}
        while suspect is None and self.waiting and len(self.running) < self.script.max_running:
            entry = self.waiting.pop(0)
            self.running[entry.request.id] = entry
        self.record.launch(
            self.steps + 1,
            [Slice(seq, 0, len(one.prompt) + len(one.outputs), samples=True) for seq, one in self.running.items()],
        )

    def _unfinished(self) -> list[Running]:
        return [*self.running.values(), *self.waiting]

    def _is_poisoned(self) -> bool:
        return any(self.script.die_of_prompt_with in one.prompt for one in self.running.values())

    def _step(self) -> None:
        step_tokens = 0
        seqs, tokens, logprobs, finished = array("Q"), array("I"), list[TokenLogprobs](), list[Finished]()
        firsts: list[FirstToken] = []
        for seq, entry in list(self.running.items()):
            step_tokens += 1 + (0 if entry.started_s else len(entry.prompt))
            if self.script.fail_prompt_with in entry.prompt:
                del self.running[seq]
                finished.append(self._end(entry, FinishReason.ERROR, error=self.script.prompt_failure))
                continue
            self._read_prompt(entry)
            if not entry.request.params.max_tokens:
                del self.running[seq]
                finished.append(self._end(entry, FinishReason.LENGTH))
                continue
            token = self._next_token(entry)
            if entry.first_s is None:
                entry.started_s = entry.first_s = time.monotonic()
                firsts.append(FirstToken(seq, entry.started_s, len(entry.outputs)))
            entry.outputs.append(token)
            seqs.append(seq)
            tokens.append(token)
            if entry.request.params.logprobs is not None:
                logprobs.append(_logprobs(seq, token, entry.request.params.logprobs))
            end = self._end_of(entry, token)
            if end is not None:
                del self.running[seq]
                finished.append(end)
        self.steps += 1
        self.send(
            Report(
                seqs=seqs.tobytes(),
                tokens=tokens.tobytes(),
                logprobs=tuple(logprobs),
                firsts=tuple(firsts),
                finished=tuple(finished),
                gauges=self._gauges(step_tokens),
            )
        )

    def _read_prompt(self, entry: Running) -> None:
        """Send what a request reads of its prompt: log-probabilities in two portions, or the mean of its tokens."""
        params, prompt, seq = entry.request.params, entry.prompt, entry.request.id
        if entry.is_read:
            return
        entry.is_read = True
        if params.pooling is not None:
            vector = array("f", [sum(prompt) / len(prompt), len(prompt)]).tobytes()
            self.send(Report(pooled=(Pooled(seq, vector),)))
        elif params.prompt_logprobs is not None:
            start, end = entry.request.num_read, len(prompt) - 1
            middle = (start + end) // 2
            for first, last in ((start, middle), (middle, end)):
                if first < last:
                    self.send(Report(prompts=(_prompt_part(seq, prompt, first, last, params.prompt_logprobs),)))

    def _gauges(self, step_tokens: int) -> Gauges:
        used = sum(len(entry.prompt) + len(entry.outputs) for entry in self.running.values())
        return Gauges(
            num_running=len(self.running),
            num_waiting=len(self.waiting) + self.script.preempted,
            num_preempted=self.script.preempted,
            blocks_total=self.script.blocks_total,
            blocks_used=-(-used // self.script.block_size),
            step_tokens=step_tokens,
            prefix_queries=sum(len(request.prompt) // 4 for request in self.submitted),
            prefix_hits=self.script.cached * len(self.submitted),
            steps=self.steps,
        )

    def _next_token(self, entry: Running) -> int:
        if self.script.reply_to is not None and not entry.reply:
            entry.reply = self.script.reply_to(entry.request)
        source = entry.reply or self.script.reply or entry.prompt
        return source[len(entry.outputs) % len(source)]

    def _end_of(self, entry: Running, token: int) -> Finished | None:
        params = entry.request.params
        may_stop = len(entry.outputs) > params.min_tokens
        if may_stop and (token in params.stop_token_ids or (token == self.script.end_token and not params.ignore_eos)):
            return self._end(entry, FinishReason.STOP, stop_token=token)
        if len(entry.outputs) >= params.max_tokens:
            return self._end(entry, FinishReason.LENGTH)
        return None

    def _end(
        self, entry: Running, reason: FinishReason, *, stop_token: int | None = None, error: str | None = None
    ) -> Finished:
        now_s = time.monotonic()
        started_s = now_s if entry.started_s is None else entry.started_s
        first_s = now_s if entry.first_s is None else entry.first_s
        finished = Finished(
            seq=entry.request.id,
            reason=reason,
            num_prompt=len(entry.prompt),
            num_outputs=len(entry.outputs),
            num_cached=self.script.cached,
            queued_s=started_s - entry.request.arrival_s,
            prefill_s=first_s - started_s,
            decode_s=now_s - first_s,
            stop_token=stop_token,
            error=error,
        )
        return replace(finished, **self.script.extra)

    def _abort(self, message: Abort) -> None:
        finished: list[Finished] = []
        if message.if_queued and not {entry.request.id for entry in self.waiting}.issuperset(message.seqs):
            return
        for seq in message.seqs:
            self.aborted.append((seq, message.reason))
            entry = self.running.pop(seq, None) or next((e for e in self.waiting if e.request.id == seq), None)
            if entry is not None:
                self.waiting = [other for other in self.waiting if other.request.id != seq]
                finished.append(self._end(entry, message.reason))
        if finished:
            self.send(Report(finished=tuple(finished), gauges=self._gauges(0)))


def _logprobs(seq: SeqId, token: int, count: int) -> TokenLogprobs:
    tops = tuple(range(token, token + count))
    return TokenLogprobs(seq, token, -0.5, 1, tops, tuple(-0.5 - index for index in range(count)))


def _prompt_part(seq: SeqId, prompt: Sequence[int], start: int, end: int, count: int) -> PromptReading:
    """Return log-probabilities of -0.25 a token, of rank 2, behind tokens with lower ids."""
    places = range(start + 1, end + 1)
    return PromptReading(
        seq=seq,
        start=start,
        end=end,
        num_top=count,
        logprobs=array("f", [-0.25 for _ in places]).tobytes(),
        ranks=array("I", [2 for _ in places]).tobytes(),
        top_tokens=array(
            "I", [(prompt[place] + rank + 1) % 900 for place in places for rank in range(count)]
        ).tobytes(),
        top_logprobs=array("f", [-0.125 - rank for _ in places for rank in range(count)]).tobytes(),
    )


def _number(name: str) -> int | None:
    return int(os.environ[name]) if name in os.environ else None


async def _main(fd: int, record_fd: int) -> int:
    """Run as a child process. The script comes from variables, as the command line is that of the real engine."""
    engine = FakeEngine(
        Script(
            reply=tuple(int(token) for token in os.environ.get("FAKE_REPLY", "").split()),
            step_s=float(os.environ.get("FAKE_STEP_S", "0")),
            load_s=float(os.environ.get("FAKE_LOAD_S", "0")),
            max_model_len=int(os.environ.get("FAKE_CONTEXT", "256")),
            blocks_total=int(os.environ.get("FAKE_CONTEXT", "1024")) // 16,
            max_running=int(os.environ.get("FAKE_RUNNING", "64")),
            failure=os.environ.get("FAKE_FAILURE"),
            die_at_step=_number("FAKE_DIE_AT"),
            die_of_prompt_with=_number("FAKE_POISON"),
            hang_at_step=_number("FAKE_HANG_AT"),
        ),
        StepRecord.open(EngineSettings(model="").record_rows, record_fd),
    )
    await engine.open(socket.socket(fileno=fd))
    await engine.closed.wait()
    if engine.script.failure is not None:
        return 2
    return 0 if engine.has_quit else 9


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--arena-fd", type=int)
    parser.add_argument("--record-fd", type=int)
    arguments = parser.parse_args()
    sys.exit(asyncio.run(_main(arguments.fd, arguments.record_fd)))
