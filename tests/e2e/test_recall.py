"""Answers of the embedded model while sequences are preempted: wrong KV would give a wrong answer."""

import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.daemon import Daemon, daemon
from tests.e2e.prompts import ONE_THREAD
from tools.embedded.chats import Chat
from tools.embedded.recall import recall_question

QUESTIONS = 50
CONTEXT = 400  # tokens
LONG = 280  # output tokens with ignore_eos: enough to exceed the pool


def ask(running: Daemon, chat: Chat, tokens: int) -> str:
    """Return the first four-digit number of the answer."""
    messages = [{"role": turn.role, "content": turn.content} for turn in chat]
    body = {"messages": messages, "temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    answer = running.http.post("/v1/chat/completions", json=body, timeout=300).raise_for_status()
    found = re.search(r"\d{4}", answer.json()["choices"][0]["message"]["content"])
    return found.group() if found else ""


@pytest.mark.slow
def test_recall_survives_three_tiers_and_a_pool_for_a_few(tmp_path: Path) -> None:
    questions = [recall_question(random.Random(70_000 + number), CONTEXT) for number in range(QUESTIONS)]
    flags = (
        "--cpu-device-pool", "--num-gpu-blocks-override", "90", "--max-model-len", "1024", "--preemption-mode", "swap",
        "--kv-host-size", "24M", "--kv-disk-path", str(tmp_path / "kv"), "--kv-disk-size", "128M", *ONE_THREAD,
    )  # fmt: skip
    with daemon(tmp_path, *flags) as small:
        with ThreadPoolExecutor(QUESTIONS) as pool:
            crowded = list(pool.map(lambda question: ask(small, question[0], LONG), questions))
        assert small.metric("vllm:num_preemptions_total") >= QUESTIONS / 2
        right = sum(answer == fact.code for answer, (_, fact) in zip(crowded, questions, strict=True))
        assert right >= QUESTIONS - 1
        assert [ask(small, chat, 24) for chat, _ in questions] == crowded
        small.assert_nothing_held()
        assert small.stop() == 0
