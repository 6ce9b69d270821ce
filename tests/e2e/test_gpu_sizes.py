"""The daemon with the steps of a GPU, over HTTP: 2,048 and 8,192 tokens, 1,024 sequences, and three tiers.

`served` is another one than that of the other modules, whose tests run here too.
"""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.daemon import Daemon, daemon
from tests.e2e.test_recall import ask
from tests.e2e.test_serving import (
    test_a_fact_of_the_prompt_is_recalled,
    test_a_second_turn_finds_the_first_in_the_cache,
    test_a_seed_makes_sampling_repeatable_and_choices_differ,
    test_the_openai_client_works_streaming_and_not,
    test_the_sequences_of_a_client_that_left_end_soon,
)
from tools.embedded.recall import recall_question

__all__ = [
    "test_a_fact_of_the_prompt_is_recalled",
    "test_a_second_turn_finds_the_first_in_the_cache",
    "test_a_seed_makes_sampling_repeatable_and_choices_differ",
    "test_the_openai_client_works_streaming_and_not",
    "test_the_sequences_of_a_client_that_left_end_soon",
]

PROMPT = [5 + 7 * number % 211 for number in range(4000)]
FLAGS = (
    "--tbt-goal", "0", "--max-num-seqs", "1024", "--cpu-device-pool", "--num-gpu-blocks-override", "330",
    "--preemption-mode", "swap", "--kv-host-size", "64M", "--kv-disk-size", "128M",
)  # fmt: skip


@pytest.fixture(scope="module", params=[2048, 8192], ids=lambda size: f"{size} tokens a step")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("served")
    size = ("--max-num-batched-tokens", str(request.param))
    with daemon(folder, *size, *FLAGS, "--kv-disk-path", str(folder / "kv")) as running:
        engine = running.engine_pid()
        yield running
        running.assert_nothing_held()
        assert running.engine_pid() == engine, running.log.read_text()
        assert _faults(running.log) == []


def _faults(log: Path) -> list[str]:
    """Return the errors of a log; the lines that people read are none."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line["event"] for line in lines if line["level"] in ("error", "critical")]


def _whole(running: Daemon, prompt: list[int]) -> tuple[str, int]:
    """Return the text and the number of cached prompt tokens."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    answer = running.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 24)
    return answer.json()["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"]


def _streamed(running: Daemon, prompt: list[int]) -> str:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 24, "ignore_eos": True, "stream": True}
    with running.http.stream("POST", "/v1/completions", json=body) as stream:
        assert stream.status_code == 200
        data = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert data[-1] == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in data[:-1])


def test_prompts_of_more_than_a_step_are_answered_whole_and_streamed(served: Daemon) -> None:
    text, cached = _whole(served, PROMPT)
    assert cached == 0
    assert _streamed(served, PROMPT) == text
    again, cached = _whole(served, PROMPT)
    assert (again, cached) == (text, (len(PROMPT) - 1) // 16 * 16)
    other = PROMPT[::-1]  # it evicts most blocks of the first from HBM
    assert _streamed(served, other) == _whole(served, other)[0]
    again, cached = _whole(served, PROMPT)
    assert again == text
    assert cached > 2000
    assert served.metric("tiercel_kv_mean_run_blocks") > 1


def test_long_contexts_that_preempt_each_other_recall_their_facts(served: Daemon) -> None:
    questions = [recall_question(random.Random(90_000 + number), 1000) for number in range(6)]
    before = served.metric("vllm:num_preemptions_total")
    with ThreadPoolExecutor(len(questions)) as pool:
        crowded = list(pool.map(lambda question: ask(served, question[0], 200), questions))
    assert served.metric("vllm:num_preemptions_total") > before
    assert [ask(served, chat, 24) for chat, _ in questions] == crowded
    right = sum(answer == fact.code for answer, (_, fact) in zip(crowded, questions, strict=True))
    assert right >= len(questions) - 1
