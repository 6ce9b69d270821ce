"""The SSD tier survives the end of the daemon, the host tier that of the engine; wrong data never survives."""

import json
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.e2e.daemon import TIERCEL, Daemon, daemon
from tests.e2e.prompts import MIN_TOKENS, ONE_THREAD, PROMPTS, cached_tokens, text
from tests.seeds import fast_and_slow
from tiercel.embedded import MODEL_DIR
from tiercel.server.client.child import EngineChild, engine_command
from tiercel.server.client.inherited import InheritedResources
from tiercel.settings.settings import EngineSettings
from tiercel.values.ids import SeqId
from tiercel.values.outcome import Finished, FinishReason, Gauges
from tiercel.values.request import Request, SamplingParams, pack_tokens, unpack_tokens
from tiercel.values.tier import Route
from tiercel.wire.frames import FrameReader, FromEngine, Ready, Report, Start, Submit, encode_frame

KILLS = 20
PATIENCE_S = 60.0


def disk_flags(folder: Path, size: str = "64M") -> tuple[str, ...]:
    return ("--kv-disk-path", str(folder / "kv"), "--kv-disk-size", size, *ONE_THREAD)


@pytest.mark.slow
def test_a_prompt_served_once_is_warm_after_a_restart(tmp_path: Path, answers: dict[str, str]) -> None:
    with daemon(tmp_path, *disk_flags(tmp_path)) as first:
        assert cached_tokens(first, PROMPTS[0]) == (answers[PROMPTS[0]], 0)
        assert first.stop() == 0
        assert "is_saved=True" in first.log.read_text()
    with daemon(tmp_path, *disk_flags(tmp_path)) as again:
        output, cached = cached_tokens(again, PROMPTS[0])
        assert output == answers[PROMPTS[0]]
        assert cached >= MIN_TOKENS
        assert cached_tokens(again, PROMPTS[1]) == (answers[PROMPTS[1]], 0)


@pytest.mark.slow
def test_an_idle_daemon_persists_prefixes_served_once(tmp_path: Path, answers: dict[str, str]) -> None:
    with daemon(tmp_path, *disk_flags(tmp_path)) as running:
        assert text(running, PROMPTS[2]) == answers[PROMPTS[2]]
        end_s = time.monotonic() + PATIENCE_S
        while not running.metric('tiercel_kv_transfer_bytes_total{route="ddr_ssd"}'):
            assert time.monotonic() < end_s
            time.sleep(0.05)
        time.sleep(1.0)
        running.kill_all()
    with daemon(tmp_path, *disk_flags(tmp_path)) as again:
        output, cached = cached_tokens(again, PROMPTS[2])
        assert output == answers[PROMPTS[2]]
        assert cached >= MIN_TOKENS


@pytest.mark.slow
def test_a_second_signal_ends_the_writing_to_disk(tmp_path: Path) -> None:
    with daemon(tmp_path, *disk_flags(tmp_path)) as running:
        running.process.send_signal(signal.SIGTERM)
        running.process.send_signal(signal.SIGINT)
        began_s = time.monotonic()
        assert running.process.wait(10) in (0, 1)
        assert time.monotonic() - began_s < 5


def ask_until_killed(running: Daemon, answers: dict[str, str], rng: random.Random) -> int:
    """Send all prompts from four clients, kill the daemon at a random time; return the number of (right) answers."""

    def ask(prompt: str) -> int:
        try:
            answer = httpx.post(
                f"{running.url}/v1/completions",
                json={"prompt": prompt, "temperature": 0, "max_tokens": 12}, timeout=PATIENCE_S,
            )  # fmt: skip
        except httpx.TransportError:
            return 0
        if answer.status_code != 200:
            return 0
        assert answer.json()["choices"][0]["text"] == answers[prompt]
        return 1

    prompts = rng.sample(PROMPTS, len(PROMPTS))
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, prompt) for prompt in prompts]
        time.sleep(rng.uniform(0.05, 2.0))
        running.kill_all()
        return sum(future.result() for future in asked)


@pytest.mark.slow
def test_kill_9_during_writes_never_changes_an_answer(tmp_path: Path, answers: dict[str, str]) -> None:
    """The disk has room for half of the prompts, so that slots are overwritten."""
    rng = random.Random(35)
    flags = disk_flags(tmp_path, "16M")
    answered = found = 0
    for _ in range(KILLS):
        with daemon(tmp_path, *flags) as running:
            answered += ask_until_killed(running, answers, rng)
    with daemon(tmp_path, *flags) as running:
        for prompt in PROMPTS:
            output, cached = cached_tokens(running, prompt)
            assert output == answers[prompt]
            found += cached
        assert running.stop() == 0
    assert answered > KILLS
    assert found > 0


@pytest.mark.slow
def test_a_second_daemon_on_a_folder_exits_and_names_the_pid_of_the_first(tmp_path: Path) -> None:
    with daemon(tmp_path, *disk_flags(tmp_path)) as first:
        command = [TIERCEL, "serve", "--port", "0", *disk_flags(tmp_path)]
        second = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert second.returncode == 2
        assert f"in use by the daemon with pid {first.process.pid}" in second.stderr
        assert "Traceback" not in second.stderr
        assert text(first, "Hello") is not None


@pytest.mark.slow
def test_blocks_of_another_model_are_replaced_with_a_warning(tmp_path: Path, answers: dict[str, str]) -> None:
    with daemon(tmp_path, *disk_flags(tmp_path), "--load-format", "dummy", "--seed", "3") as other:
        text(other, PROMPTS[0])
        assert other.stop() == 0
    with daemon(tmp_path, *disk_flags(tmp_path)) as ours:
        assert cached_tokens(ours, PROMPTS[0]) == (answers[PROMPTS[0]], 0)
        assert '"level": "warning"' in ours.log.read_text()
        assert ours.stop() == 0


# ---- the engine alone


class HandEngine:
    """An engine process, driven through its socket."""

    def __init__(self, child: EngineChild, settings: EngineSettings) -> None:
        self.child = child
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.gauges = Gauges()
        self._reader: FrameReader[FromEngine] = FrameReader(FromEngine)  # type: ignore[arg-type]
        child.sock.settimeout(PATIENCE_S)
        child.sock.sendall(encode_frame(Start(settings)))
        while not any(isinstance(message, Ready) for message in self._receive()):
            pass

    def _receive(self) -> list[FromEngine]:
        chunk = self.child.sock.recv(1 << 16)
        assert chunk, "the engine is gone"
        return self._reader.feed(chunk)

    def _take(self) -> None:
        for message in self._receive():
            assert isinstance(message, Report)
            for seq, token in zip(memoryview(message.seqs).cast("Q"), unpack_tokens(message.tokens), strict=True):
                self.tokens.setdefault(seq, []).append(token)
            self.finished |= {finished.seq: finished for finished in message.finished}
            self.gauges = message.gauges or self.gauges

    def ask(self, seq: int, prompt: list[int]) -> tuple[list[int], int]:
        """Return the outputs and the number of cached prompt tokens."""
        self.submit(seq, prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
        self.wait_tokens(seq)
        return self.tokens[seq], self.finished[seq].num_cached

    def submit(self, seq: int, prompt: list[int], params: SamplingParams, outputs: Sequence[int] = ()) -> None:
        """Send a request, which an engine before this one has answered in part."""
        request = Request(
            id=SeqId(seq), prompt=pack_tokens(prompt), params=params, arrival_s=time.monotonic(),
            outputs=pack_tokens(outputs),
        )  # fmt: skip
        self.child.sock.sendall(encode_frame(Submit(request)))

    def wait_tokens(self, seq: int, count: int = 1 << 30) -> None:
        """Wait until a sequence has ended, or has so many new tokens."""
        while seq not in self.finished and len(self.tokens.get(seq, [])) < count:
            self._take()

    def wait_copied(self, blocks: int) -> None:
        """Wait until a number of blocks with checksums are in the host tier."""
        while sum(route.blocks for route in self.gauges.routes if route.route in (Route.SIGN, Route.SPILL)) < blocks:
            self._take()
        time.sleep(0.5)  # a separate host tier gets its checksums a little later


@pytest.fixture
def inherited() -> Iterator[InheritedResources]:
    with InheritedResources.open(EngineSettings(model="unused")) as inherited:
        yield inherited


@pytest.mark.slow
@pytest.mark.parametrize("apart", [True, False])
def test_a_restarted_engine_finds_the_host_tier_of_the_engine_before_it(
    inherited: InheritedResources, apart: bool
) -> None:
    settings = EngineSettings(
        model=str(MODEL_DIR), num_gpu_blocks_override=300, cpu_device_pool=apart, kv_host_bytes=32 << 20, threads=1,
        log_level="warning",
    )  # fmt: skip
    prompt = [100 + number * 7919 % 1000 for number in range(500)]
    blocks = len(prompt) // settings.block_size
    with EngineChild.start(engine_command(), inherited) as child:
        first = HandEngine(child, settings)
        output, cached = first.ask(1, prompt)
        assert cached == 0
        first.wait_copied(blocks)
        child.kill()
    with EngineChild.start(engine_command(), inherited) as child:
        again = HandEngine(child, settings)
        time.sleep(0.5)  # checksums are compared off the loop
        assert again.ask(1, prompt) == (output, blocks * settings.block_size)


@pytest.mark.parametrize("heard", fast_and_slow([1], [9, 20]))
@pytest.mark.slow
def test_an_object_whose_engine_was_killed_is_completed_by_the_next_one(
    inherited: InheritedResources, heard: int
) -> None:
    settings = EngineSettings(model=str(MODEL_DIR), num_gpu_blocks_override=100, threads=1, log_level="warning")
    schema = {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 10, "maxItems": 14}
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})
    params = SamplingParams(seed=heard, max_tokens=400, grammar=grammar)
    prompt = [100 + number * 7919 % 1000 for number in range(50)]
    with EngineChild.start(engine_command(), inherited) as child:
        first = HandEngine(child, settings)
        first.submit(1, prompt, params)
        first.wait_tokens(1)
        whole = first.tokens[1]
        first.submit(2, prompt, params)
        first.wait_tokens(2, heard)
        child.kill()
        said = first.tokens[2]
        assert heard <= len(said) < len(whole)
    with EngineChild.start(engine_command(), inherited) as child:
        again = HandEngine(child, settings)
        again.submit(2, prompt, params, outputs=said)
        again.wait_tokens(2)
        assert said + again.tokens[2] == whole
    assert first.finished[1].reason is again.finished[2].reason is FinishReason.STOP
    output = LLTokenizer(str(MODEL_DIR / "tokenizer.json")).decode_str(whole[:-1])
    assert 10 <= len(json.loads(output)) <= 14
