"""`tiercel run-batch` without a server: its flags, and the lines that it sends."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tiercel.cli.batch_client import BatchClient
from tiercel.cli.main import main

Captured = pytest.CaptureFixture[str]


def line(number: object, **more: object) -> bytes:
    fields = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": {"n": number}, **more}
    return json.dumps(fields).encode() + b"\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("-o out", "-i is missing"),
        ("-i in", "-o is missing"),
        ("-i nothing -o out", "nothing: there is no such file"),
        ("-i in -o in", "this is the input file"),
        ("-i in -o out --max-concurrency 0", "--max-concurrency 0"),
        ("-i in -o out --url http://x --model y", "--model"),
        ("-i in -o out --model nowhere", "nowhere: no such folder"),
        ("-i in -o out --port 80", "--port has no effect"),
        ("-i in -o out --frobnicate", "--frobnicate"),
    ],
)
def test_wrong_flags_are_named_and_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, words: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_bytes(line(1))
    assert main(["run-batch", *words.split()]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_help_fits_one_screen(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["run-batch", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--input-file" in out and "--max-concurrency" in out


def answered(
    tmp_path: Path, data: bytes, answer: Callable[[httpx.Request], httpx.Response], *, has_ended: bool = False
) -> tuple[BatchClient, dict[str | None, Any]]:
    (tmp_path / "in").write_bytes(data)

    async def run() -> BatchClient:
        async with httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(answer)) as http:
            client = BatchClient(http, tmp_path / "out", 3, lambda: has_ended)
            await client.run(tmp_path / "in")
            return client

    client = asyncio.run(run())
    found = [json.loads(text) for text in (tmp_path / "out").read_bytes().splitlines()]
    return client, {one["custom_id"]: one for one in found}


def test_a_line_is_asked_again_until_the_server_has_time(tmp_path: Path) -> None:
    asked: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content)["n"])
        if asked.count(asked[-1]) < 3:
            return httpx.Response(429, headers={"retry-after": "0"}, json={"error": {}})
        return httpx.Response(200, json={"ok": asked[-1]})

    client, found = answered(tmp_path, b"".join(map(line, range(5))), answer)
    assert (client.num_answered, client.num_failed) == (5, 0)
    assert found["3"]["response"]["body"] == {"ok": 3}
    assert sorted(asked) == sorted([*range(5)] * 3)


def test_errors_of_lines_do_not_stop_the_others(tmp_path: Path) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        number = json.loads(request.content)["n"]
        return httpx.Response(500, text="<html>") if number == 1 else httpx.Response(200, json={})

    data = line(1) + line(2) + line(3, url="/v1/files") + line(4, body={"stream": True}) + b"[]\n" + line(2)
    client, found = answered(tmp_path, data, answer)
    assert (client.num_answered, client.num_failed) == (1, 5)
    assert found["1"]["response"]["status_code"] == 500
    assert found["3"]["error"]["code"] == "invalid_url" and "line 3" in found["3"]["error"]["message"]
    assert found["4"]["response"]["status_code"] == 400


def test_a_server_that_has_ended_fails_the_rest(tmp_path: Path) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("gone", request=request)

    client, found = answered(tmp_path, line(1) + line(2), answer, has_ended=True)
    assert client.num_failed == 2 and found["1"]["error"]["code"] == "connection_error"
