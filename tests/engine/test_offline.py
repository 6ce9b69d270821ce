"""The engine in this process: exact lengths, and the same tokens as the engine process."""

import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiercel.embedded import MODEL_DIR
from tiercel.engine.native.library import load_library
from tiercel.engine.offline import OfflineEngine, OfflineRequest
from tiercel.settings.settings import EngineSettings
from tiercel.system.openmp import engine_environment
from tiercel.values.clock import MonotonicClock
from tiercel.values.errors import TiercelError
from tiercel.values.ids import SeqId
from tiercel.values.request import Request, SamplingParams, pack_tokens
from tiercel.wire.frames import FrameReader, FromEngine, Quit, Ready, Report, Start, Submit, encode_frame

SETTINGS = EngineSettings(
    model=str(MODEL_DIR), dtype="float32", threads=1, max_num_seqs=8, num_gpu_blocks_override=128, max_model_len=256,
    enable_prefix_caching=False, log_level="error",
)  # fmt: skip


def asked(prompt_len: int, output_len: int, number: int = 0, temperature: float = 0.0) -> OfflineRequest:
    rng = random.Random(number)
    params = SamplingParams(temperature=temperature, seed=number, max_tokens=output_len, ignore_eos=True)
    return OfflineRequest(pack_tokens(rng.choices(range(1792), k=prompt_len)), params)


REQUESTS = [asked(5 + 7 * number, 4 + number, number, temperature=number % 2) for number in range(12)]


@pytest.fixture(scope="module")
def engine() -> Iterator[OfflineEngine]:
    with OfflineEngine.open(SETTINGS, MonotonicClock()) as opened:
        yield opened


def test_every_answer_has_the_requested_length_and_is_in_order(engine: OfflineEngine) -> None:
    reported: list[int] = []
    run = engine.run(REQUESTS, reported.append)
    assert [len(answer.tokens) for answer in run.answers] == [one.params.max_tokens for one in REQUESTS]
    assert reported == sorted(reported) and reported[-1] == len(REQUESTS)
    assert all(0 < answer.first_s <= answer.last_s <= run.elapsed_s for answer in run.answers)
    assert run.after.blocks_used == 0
    assert run.after.steps - run.before.steps >= max(one.params.max_tokens for one in REQUESTS)
    assert 0 < sum(run.laps.host_s()) + sum(run.laps.wait_s) <= run.elapsed_s
    assert len(run.laps.nano_batch_s) >= 15


def test_a_second_run_is_independent_and_generates_the_same(engine: OfflineEngine) -> None:
    first, again = engine.run(REQUESTS), engine.run(list(reversed(REQUESTS)))
    assert [answer.tokens for answer in first.answers] == [answer.tokens for answer in reversed(again.answers)]
    assert again.before.steps >= first.before.steps + len(first.laps.plan_s) - 1


def test_the_facts_are_those_of_the_opened_engine(engine: OfflineEngine) -> None:
    facts = engine.facts
    assert (facts.device, facts.dtype) == ("cpu", "float32")
    assert facts.attention == ("GroupedAttention" if load_library() is None else "NativeAttention")
    assert (facts.blocks, facts.block_size, facts.max_model_len, facts.vocab_size) == (128, 16, 256, 1792)
    assert facts.step_tokens >= SETTINGS.sequences


def test_an_answer_of_another_length_is_an_error_that_names_the_request(engine: OfflineEngine) -> None:
    with pytest.raises(TiercelError, match=r"request 2: requested 250 .* and 10 of answer, got 250 and 6"):
        engine.run([asked(8, 2), asked(250, 10)])
    with pytest.raises(TiercelError, match=r"request 1: .*got 300 and 0 \(error"):
        engine.run([asked(300, 10)])
    assert [len(answer.tokens) for answer in engine.run([asked(8, 2)]).answers] == [2]  # the engine is still usable


def test_a_small_pool_generates_the_same(engine: OfflineEngine) -> None:
    many = [asked(60, 40, number) for number in range(8)]
    whole = engine.run(many)
    from_few = EngineSettings(
        model=str(MODEL_DIR), dtype="float32", threads=1, max_num_seqs=8, num_gpu_blocks_override=20,
        enable_prefix_caching=False,
    )  # fmt: skip
    with OfflineEngine.open(from_few, MonotonicClock()) as small:
        run = small.run(many)
    assert run.after.preemptions > 0
    assert [answer.tokens for answer in run.answers] == [answer.tokens for answer in whole.answers]


def said_by_the_engine_process() -> dict[int, list[int]]:
    """Return the tokens of the engine process for the same requests, over its socket."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tiercel.engine", "--fd", str(theirs.fileno())]
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=engine_environment(), cwd=root)
    theirs.close()
    output: dict[int, list[int]] = {}
    ended = 0
    reader: FrameReader[FromEngine] = FrameReader(FromEngine)  # pyright: ignore[reportArgumentType]
    try:
        ours.settimeout(120)
        ours.sendall(encode_frame(Start(SETTINGS)))
        while ended < len(REQUESTS):
            chunk = ours.recv(1 << 16)
            assert chunk, "the engine left"
            for message in reader.feed(chunk):
                if isinstance(message, Ready):
                    for number, one in enumerate(REQUESTS):
                        request = Request(
                            id=SeqId(number), prompt=one.prompt, params=one.params, arrival_s=float(number)
                        )
                        ours.sendall(encode_frame(Submit(request)))
                elif isinstance(message, Report):
                    tokens = memoryview(message.tokens).cast("I")
                    for seq, token in zip(memoryview(message.seqs).cast("Q"), tokens, strict=True):
                        output.setdefault(seq, []).append(token)
                    ended += len(message.finished)
        ours.sendall(encode_frame(Quit()))
        assert process.wait(30) == 0
    finally:
        ours.close()
        process.kill()
        process.wait()
    return output


def test_the_tokens_are_those_of_the_engine_process(engine: OfflineEngine) -> None:
    output = said_by_the_engine_process()
    assert [output[number] for number in range(len(REQUESTS))] == [
        list(answer.tokens) for answer in engine.run(REQUESTS).answers
    ]
