"""An engine process for benchmarks of the HTTP process: it computes nothing, and ends a step every few milliseconds.

Usage: `python benchmarks/scripted_engine.py --step-ms N [--rows N] --fd N`. The tokens of an answer repeat those of its
prompt.
"""

import argparse
import socket
import sys
import time
from itertools import islice

from tiercel.engine.mailbox import EngineMailbox, receive_start
from tiercel.values.ids import SeqId
from tiercel.values.outcome import Finished, FinishReason, FirstToken, Gauges
from tiercel.values.request import Request, unpack_tokens
from tiercel.wire.frames import Abort, Quit, Ready, Report, Submit, ToEngine

_BLOCKS = 100_000
_CONTEXT = 32_768


class _Running:
    """A sequence that is being answered."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.prompt = unpack_tokens(request.prompt)
        self.num_outputs = 0
        self.started_s = time.monotonic()


class ScriptedEngine:
    """Answers the first `rows` sequences at once, one token of each per step; the others wait."""

    def __init__(self, mailbox: EngineMailbox, step_s: float, rows: int) -> None:
        self._mailbox = mailbox
        self._step_s = step_s
        self._rows = rows
        self._running: dict[SeqId, _Running] = {}
        self._steps = 0
        self._has_quit = False

    def serve(self, first: list[ToEngine]) -> None:
        """Serve until the HTTP process says so or is gone."""
        self._take(first)
        while not (self._has_quit or self._mailbox.is_closed):
            if self._running:
                time.sleep(self._step_s)
                self._step()
            else:
                self._mailbox.wait(1.0)
            self._take(self._mailbox.take())

    def _take(self, messages: list[ToEngine]) -> None:
        for message in messages:
            match message:
                case Submit(request):
                    self._running[request.id] = _Running(request)
                case Abort(seqs, reason):
                    for seq in seqs:
                        if seq in self._running:
                            self._mailbox.post(Report(finished=(self._end(seq, reason),)))
                case Quit():
                    self._has_quit = True
                case _:
                    pass

    def _step(self) -> None:
        seqs, tokens = bytearray(), bytearray()
        firsts: list[FirstToken] = []
        finished: list[Finished] = []
        step_tokens = 0
        for seq, one in list(islice(self._running.items(), self._rows)):
            if not one.num_outputs:
                firsts.append(FirstToken(seq, one.started_s))
                step_tokens += len(one.prompt)
            token = one.prompt[one.num_outputs % len(one.prompt)]
            seqs += seq.to_bytes(8, "little")
            tokens += token.to_bytes(4, "little")
            one.num_outputs += 1
            step_tokens += 1
            if one.num_outputs == one.request.params.max_tokens:
                finished.append(self._end(seq, FinishReason.LENGTH))
        self._steps += 1
        gauges = Gauges(
            num_running=min(len(self._running), self._rows),
            blocks_total=_BLOCKS,
            step_tokens=step_tokens,
            steps=self._steps,
        )
        self._mailbox.post(
            Report(
                seqs=bytes(seqs), tokens=bytes(tokens), firsts=tuple(firsts), finished=tuple(finished), gauges=gauges
            )
        )

    def _end(self, seq: SeqId, reason: FinishReason) -> Finished:
        one = self._running.pop(seq)
        return Finished(
            seq=seq, reason=reason, num_prompt=len(one.prompt), num_outputs=one.num_outputs, num_cached=0,
            decode_s=time.monotonic() - one.started_s,
        )  # fmt: skip


def main() -> int:
    """Report that the engine is ready, and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, required=True, help="pause before each step")
    parser.add_argument("--rows", type=int, default=1 << 30, help="sequences in a step")
    parser.add_argument("--fd", type=int, required=True, help="inherited stream socket")
    parser.add_argument("--arena-fd", type=int, help="not used")
    parser.add_argument("--record-fd", type=int, help="not used")
    arguments = parser.parse_args()
    mailbox = EngineMailbox(socket.socket(fileno=arguments.fd))
    _, *rest = receive_start(mailbox)
    mailbox.post(
        Ready(
            max_model_len=_CONTEXT, vocab_size=1 << 20, block_size=16, blocks_total=_BLOCKS, dtype="none",
            kv_dtype="none", device="none", model_impl="none", weights_bytes=0, kv_bytes=0, load_s=0.0,
        )
    )  # fmt: skip
    ScriptedEngine(mailbox, arguments.step_ms / 1000, arguments.rows).serve(rest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
