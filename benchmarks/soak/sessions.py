"""The load of a soak: conversations of four tenants, with requests that are cut off or wrong among them.

Twenty sessions hold one conversation after the other. All conversations of a tenant begin with the same system text;
each turn repeats the conversation so far. The requests of a session follow from its seed and from the answers.
"""

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.whole_answer import CHAT, TEXT, Outcome, WholeAnswer, ask

TENANTS = ("archive", "chat", "search", "shop")
SESSIONS = 20
LEAVING, WRONG = 0.02, 0.01  # shares of requests whose client leaves, and of requests with a mistake
_TURNS = 6
_WORDS = ("river", "stone", "lamp", "bread", "garden", "winter", "letter", "copper", "window", "market", "silver")
_CHAT_BODY = {"messages": [{"role": "user", "content": "Hello"}]}

WRONG_BODIES: tuple[Mapping[str, object], ...] = (
    {"raw": '{"messages": [{"role": "user"'},
    {"raw": "[]"},
    {**_CHAT_BODY, "temperature": -1},
    {**_CHAT_BODY, "max_tokens": 0},
    {**_CHAT_BODY, "top_p": "high"},
    {**_CHAT_BODY, "model": "another"},
    {**_CHAT_BODY, "n": 1000},
    {**_CHAT_BODY, "stop": ["x"] * 100},
    {"messages": []},
    {"messages": [{"role": "user", "content": "word " * 5000}]},
)
"""Requests that the server must refuse with status 4xx."""


@dataclass(slots=True)
class Traffic:
    """Every request of a soak, in the order in which they were sent."""

    name: str = "soak"  # of which the request ids are made
    answers: list[WholeAnswer] = field(default_factory=list[WholeAnswer])
    wrong: list[WholeAnswer] = field(default_factory=list[WholeAnswer])  # those that must be refused
    contexts: dict[int, int] = field(default_factory=dict[int, int])  # tokens of each session's conversation
    is_over: bool = False

    def finished(self) -> list[WholeAnswer]:
        """Return the requests that were answered in full."""
        return [answer for answer in self.answers if answer.outcome is Outcome.ANSWERED]


def tenants_file() -> str:
    """Return a tenants file with four tenants of different weights."""
    tenants = [{"name": name, "key": f"{name}-key", "weight": 1 + place} for place, name in enumerate(TENANTS)]
    return json.dumps({"admin_key": "operator-key", "secret": "soak", "tenants": tenants})


class Session:
    """One client that talks without a pause until the traffic is over."""

    def __init__(self, number: int, seed: int, url: str, traffic: Traffic) -> None:
        self._number = number
        self._tenant = TENANTS[number % len(TENANTS)]
        self._draw = random.Random(f"{seed}-{number}")
        self._url = url
        self._traffic = traffic
        self._sent = 0

    async def hold(self) -> None:
        """Hold one conversation after the other."""
        while not self._traffic.is_over:
            messages = [_message("system", _system_text(self._tenant))]
            for _ in range(self._draw.randint(2, _TURNS)):
                if self._traffic.is_over:
                    return
                await self._turn(messages)

    async def _turn(self, messages: list[dict[str, str]]) -> None:
        draw = self._draw
        words = " ".join(draw.choice(_WORDS) for _ in range(draw.randint(10, 30)))
        messages.append(_message("user", f"Note {draw.randrange(1000)}: {words}."))
        fate = draw.random()
        if fate < WRONG:
            await self._send(CHAT, draw.choice(WRONG_BODIES), self._traffic.wrong)
        leave_after = draw.choice((0, 1, 2, 5, 20)) if WRONG <= fate < WRONG + LEAVING else None
        path, body = self._request(messages)
        answer = await self._send(path, body, self._traffic.answers, leave_after)
        if answer.usage is not None:
            self._traffic.contexts[self._number] = answer.usage.prompt + answer.usage.completion
        messages.append(_message("assistant", answer.text or "..."))

    def _request(self, messages: list[dict[str, str]]) -> tuple[str, dict[str, object]]:
        draw = self._draw
        body: dict[str, object] = {"max_tokens": draw.randint(16, 64), "ignore_eos": True}
        if draw.random() < 0.5:
            body |= {"temperature": 0}
        else:
            body |= {"temperature": 0.8, "seed": draw.randrange(1 << 31)}
        if draw.random() < 0.2:
            body |= {"frequency_penalty": 0.5, "presence_penalty": 0.2}
        if draw.random() < 0.1:
            body |= {"stop": ["river", "99"]}
        if draw.random() < 0.8:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if draw.random() < 0.2:
            return TEXT, {**body, "prompt": "\n".join(message["content"] for message in messages)}
        return CHAT, {**body, "messages": list(messages)}

    async def _send(
        self, path: str, body: Mapping[str, object], into: list[WholeAnswer], leave_after: int | None = None
    ) -> WholeAnswer:
        self._sent += 1
        name = f"{self._traffic.name}-{self._number}-{self._sent}"
        answer = WholeAnswer(path, body, key=f"{self._tenant}-key", request_id=name)
        into.append(answer)
        await ask(self._url, answer, leave_after=leave_after)
        return answer


async def run_sessions(url: str, seed: int, seconds: float, traffic: Traffic, is_hopeless: Callable[[], bool]) -> None:
    """Hold all sessions for this long, or until it is hopeless; return when every request has ended."""
    async with asyncio.TaskGroup() as group:
        for number in range(SESSIONS):
            group.create_task(Session(number, seed, url, traffic).hold())
        for _ in range(int(seconds)):
            if not is_hopeless():
                await asyncio.sleep(1.0)
        traffic.is_over = True


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _system_text(tenant: str) -> str:
    """Return the text that all conversations of a tenant begin with."""
    draw = random.Random(tenant)
    return f"You answer for {tenant}. " + " ".join(draw.choice(_WORDS) for _ in range(120))
