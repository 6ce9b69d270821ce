"""Random bodies get only 2xx and 4xx answers and leave nothing behind."""

import random
from pathlib import Path

from tests.server.fake_engine import Script
from tests.server.harness import MODEL, Running, server_settings, until, with_server
from tiercel.server.api.schemas.chat import ChatFields
from tiercel.server.api.schemas.completion import CompletionFields

BODIES = 400
ODD: list[object] = [
    *[None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, 2**31, 2**63, -(2**63), 10**40, "", "x", "5", "ü🙂", "\u0000"],
    *["<|im_end|>", [], {}, [1], [1, 2, 3], ["a"], [[1], [2]], [None], [[]], {"type": "text"}, {"5": 1}, {"a": None}],
    *[[{"role": "user", "content": "x"}], [{"role": "user", "content": [{"type": "text", "text": "\ud7ff"}]}]],
    *[[{"role": "assistant", "content": None}], [{"role": "user"}], [{}], "x" * 5000, list(range(300))],
]


def _body(chance: random.Random, fields: list[str], good: dict[str, object]) -> dict[str, object]:
    body = dict(good) if chance.random() < 0.8 else {}
    for name in chance.sample(fields, chance.randint(0, min(4, len(fields)))):
        body[name] = chance.choice(ODD)
    return body


def test_random_bodies_never_break_the_server(model_folder: Path) -> None:
    chance = random.Random(20)
    routes: list[tuple[str, list[str], dict[str, object]]] = [
        (
            "/v1/chat/completions",
            [*ChatFields.model_fields, "tools", "response_format", "echo"],
            {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
        ),
        ("/v1/completions", list(CompletionFields.model_fields), {"prompt": "hello", "max_tokens": 3}),
        ("/tokenize", ["prompt", "messages", "add_special_tokens", "chat_template_kwargs"], {"prompt": "hello"}),
        ("/detokenize", ["tokens", "model"], {"tokens": [5]}),
    ]

    async def test(server: Running) -> None:
        seen: dict[int, int] = {}
        for _ in range(BODIES):
            route, fields, good = chance.choice(routes)
            body = _body(chance, fields, {"model": MODEL, **good})
            answer = await server.http.post(route, json=body)
            seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
            assert answer.status_code in (200, 400, 404), (route, body, answer.text)
        assert min(seen[200], seen[400]) > 50
        await until(lambda: server.context.client.sequences.num_unfinished == 0)
        assert server.context.admission.num_reserved == 0
        assert (server.context.client.sequences.num_tokenless, server.engine.live) == (0, 0)

    with_server(server_settings(model_folder), test, Script())
