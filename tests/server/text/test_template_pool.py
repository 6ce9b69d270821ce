"""The processes that render chat templates: endless loops, endless text and dead processes cost one request each."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes import wait_gone
from tests.server.harness import MODEL, chat_body, running, server_settings
from tiercel.server.text.chat_template import ChatOptions, ChatTemplate
from tiercel.server.text.template_frames import ChatMessage, RenderJob
from tiercel.server.text.template_pool import TemplatePool
from tiercel.server.text.tokenizer import TextCodec
from tiercel.values.errors import AdmissionError, ConfigError

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
SOURCE = (
    "{{ bos_token }}{% set word = messages[0].content %}"
    f"{{% if word == 'loop' %}}{LOOP}{{% endif %}}"
    "{% if word == 'flood' %}{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}{% endif %}"
    "{% if word == 'memory' %}{{ 'x' * 3000000000 }}{{ word }}{% endif %}"
    "{% if word == 'power' %}{{ (word | length) ** 99999999 % 7 }}{% endif %}"
    "{% if word == 'dunder' %}{{ word.__class__.__mro__ }}{% endif %}"
    "{% if word == 'refuse' %}{{ raise_exception('not so') }}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if enable_thinking %}<think>{% endif %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def job(content: str = "hello", **switches: bool) -> RenderJob:
    return RenderJob([ChatMessage("user", content)], switches, add_generation_prompt=True, max_letters=10_000)


@contextmanager
def pool(source: str = SOURCE, limit_s: float = 2.0, num_workers: int = 2) -> Iterator[TemplatePool]:
    opened = TemplatePool.open(source, {"bos_token": "<s>"}, limit_s=limit_s, num_workers=num_workers)
    try:
        yield opened
    finally:
        opened.close()


def refusal_of(opened: TemplatePool, content: str) -> tuple[int, str]:
    with pytest.raises(AdmissionError) as refused:
        opened.render(job(content))
    return refused.value.status, refused.value.code


def test_a_conversation_is_rendered_in_another_process() -> None:
    with pool() as opened:
        assert opened.variables == frozenset(("bos_token", "messages", "enable_thinking", "add_generation_prompt"))
        assert opened.render(job("hello 🙂")) == "<s>user: hello 🙂\nassistant:"
        assert opened.render(job("hi", enable_thinking=True)) == "<s>user: hi\n<think>assistant:"
        (pid,) = opened.pids
        assert pid != os.getpid()
    wait_gone(pid)


def test_an_endless_template_costs_its_own_request() -> None:
    with pool(limit_s=0.3, num_workers=1) as opened:
        (first,) = opened.pids
        assert refusal_of(opened, "loop") == (400, "chat_template_timeout")
        wait_gone(first)
        (second,) = opened.pids
        assert second != first
        assert opened.render(job("hello")) == "<s>user: hello\nassistant:"
        assert opened.pids == [second]


def test_one_long_operation_is_ended_too() -> None:
    """It holds the interpreter lock of its process, where no Python signal handler would run."""
    with pool(limit_s=0.3, num_workers=1) as opened:
        assert refusal_of(opened, "power") == (400, "chat_template_timeout")
        assert opened.render(job("hello")).endswith("assistant:")


def test_text_and_memory_are_limited() -> None:
    with pool(limit_s=30.0) as opened:
        assert refusal_of(opened, "flood") == (400, "chat_template_limit")
        assert refusal_of(opened, "memory") == (400, "chat_template_limit")
        assert refusal_of(opened, "dunder") == (400, "invalid_value")
        with pytest.raises(AdmissionError, match="The chat template refuses the messages: not so"):
            opened.render(job("refuse"))
        with pytest.raises(AdmissionError, match="no Unicode text"):
            opened.render(job("\ud800"))
        assert len(opened.pids) == 1  # none of them costs a process
        assert opened.render(job("hello")).endswith("assistant:")


def test_a_killed_process_costs_no_request() -> None:
    with pool(num_workers=1) as opened:
        (first,) = opened.pids
        os.kill(first, signal.SIGKILL)
        wait_gone(first)
        assert opened.render(job()) == "<s>user: hello\nassistant:"
        assert opened.pids != [first]


def test_a_slow_rendering_does_not_hold_up_the_next() -> None:
    with pool(limit_s=20.0) as opened:
        ended = threading.Event()

        def loop() -> None:
            with pytest.raises(AdmissionError):
                opened.render(job("loop"))
            ended.set()

        thread = threading.Thread(target=loop)
        thread.start()
        time.sleep(0.2)  # the thread has taken the first process by now, or it takes the second
        for _ in range(20):
            assert opened.render(job()).endswith("assistant:")
        assert not ended.is_set()
        opened.close()
        thread.join()


def test_a_template_that_does_not_compile_is_refused_at_the_start() -> None:
    with (
        pytest.raises(ConfigError, match="the chat template does not compile: line 1 has no valid Jinja"),
        pool("{% if %}"),
    ):
        pass


_ORPHAN = """
import os, sys, threading
from tiercel.server.text.template_frames import ChatMessage, RenderJob
from tiercel.server.text.template_pool import TemplatePool
opened = TemplatePool.open(sys.argv[1], {}, limit_s=2.0, num_workers=1)
print(opened.pids[0], flush=True)
job = RenderJob([ChatMessage("user", sys.argv[2])], {}, True, 1000)
threading.Thread(target=opened.render, args=(job,), daemon=True).start()
sys.stdin.read()
"""


def cpu_s(pid: int) -> float:
    """Return the time that a process has computed in user mode."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11]) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("content", ["hello", "loop"])
def test_a_process_ends_with_its_parent(content: str) -> None:
    command = [sys.executable, "-c", _ORPHAN, SOURCE, content]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        started_s = cpu_s(pid)
        while content == "loop" and cpu_s(pid) < started_s + 0.2:  # it has begun to render
            time.sleep(0.01)
        parent.kill()
    wait_gone(pid)


def test_the_environment_of_the_process_has_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCEL_API_KEY", "secret-key")
    with pool() as opened:
        assert b"secret-key" not in Path(f"/proc/{opened.pids[0]}/environ").read_bytes()


def test_a_chat_gets_400_and_the_next_one_an_answer(model_folder: Path, codec: TextCodec) -> None:
    async def test() -> None:
        def open_template(source: str, specials: object, tool_source: str | None) -> TemplatePool:
            return TemplatePool.open(SOURCE, {"bos_token": "<s>"}, limit_s=0.5)

        async with running(server_settings(model_folder), open_template=open_template) as server:
            for path in ("/v1/chat/completions", "/tokenize"):
                body = {"model": MODEL, "messages": [{"role": "user", "content": "loop"}]}
                late = await server.http.post(path, json=body)
                assert (late.status_code, late.json()["error"]["code"]) == (400, "chat_template_timeout")
                assert "0.5 s" in late.json()["error"]["message"]
            answer = await server.http.post("/v1/chat/completions", json=chat_body(max_tokens=1))
            assert answer.status_code == 200

    asyncio.run(test())


def test_both_ways_of_rendering_give_the_same(codec: TextCodec) -> None:
    """The tests of templates render in their own process."""
    with pool() as opened:
        prompt = ChatTemplate.open(opened, codec).encode([ChatMessage("user", "hello <|im_end|>")], ChatOptions())
        assert codec.decode(prompt.tokens) == prompt.text
