"""The rules of SECURITY.md that no test of a single room shows, and the table that names a test for every rule."""

import ast
import asyncio
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.server.fake_engine import Script
from tests.server.harness import MODEL, Running, chat_body, server_settings, text_body, until, with_server

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "SECURITY.md"
ROW = re.compile(r"^\| (S\d+) \|.*\|(.*)\|$", re.MULTILINE)


def test_every_rule_has_a_test_that_exists() -> None:
    rows = dict(ROW.findall(PAGE.read_text(encoding="utf-8")))
    assert list(rows) == [f"S{number}" for number in range(1, 15)]
    for rule, cell in rows.items():
        _check_tests(rule, cell)


def test_every_field_that_stands_for_more_has_a_bound_and_a_test_that_exist() -> None:
    _, _, section = PAGE.read_text(encoding="utf-8").partition("## Expansion\n")
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for field, factor, bound, tests in rows:
        assert factor.strip(), field
        for path in re.findall(r"`(tiercel/[^`]+)`", bound):
            assert (ROOT / path).is_file(), (field, path)
        _check_tests(field, tests)


def _check_tests(rule: str, cell: str) -> None:
    names = re.findall(r"`([^`]+)`", cell)
    assert names, rule
    for name in names:
        path, _, test = name.partition("::")
        assert (ROOT / path).exists(), (rule, name)
        if test:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
            assert test in functions, (rule, name)


def test_ruff_refuses_what_unpickles(tmp_path: Path) -> None:
    """S1. The product is searched by `tests/test_architecture.py`; the linter sees the tools and the benchmarks too."""
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]["lint"]
    assert "S" in rules["select"]
    assert not {"S301", "S302", "S307", "S102"} & set(rules["ignore"])
    folders = (ROOT / name for name in ("benchmarks", "tools", "docker"))
    banned = re.compile(r"^\s*(?:import|from) (?:pickle|marshal|shelve|dill|cloudpickle|joblib)\b", re.MULTILINE)
    for file in (file for folder in folders for file in folder.rglob("*.py")):
        assert not banned.search(file.read_text(encoding="utf-8")), file
    sample = tmp_path / "sample.py"
    sample.write_text("import marshal\nimport pickle\n\npickle.loads(b'')\nmarshal.loads(b'')\n")
    command = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), str(sample)]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert "S301" in found
    assert "S302" in found


_asked: list[tuple[str, object]] = []
_is_listening = False


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if _is_listening and event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        _asked.append((event, arguments[1] if event == "socket.connect" else arguments[0]))


def test_requests_make_the_server_connect_nowhere(model_folder: Path) -> None:
    """S8. An audit hook sees every connection and every look-up of a name that Python makes."""
    global _is_listening
    sys.addaudithook(_hear)
    address = "http://192.0.2.1/x"

    async def test(server: Running) -> None:
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": address}}]}]
        refused = await server.http.post("/v1/chat/completions", json={"model": MODEL, "messages": image})
        assert refused.status_code == 400
        for body in ({**text_body(max_tokens=1), "model": address}, text_body(address, max_tokens=1)):
            await server.http.post("/v1/completions", json=body, headers={"x-request-id": address, "referer": address})
        answer = await server.http.post("/v1/chat/completions", json=chat_body(address, max_tokens=1))
        assert answer.status_code == 200
        for path in ("/metrics", "/ui", f"/v1/models/{address}"):
            await server.http.get(path, headers={"forwarded": f"for={address}"})
        assert {where for _, where in _asked} == {("127.0.0.1", server.port)}  # the client of this test

    _asked.clear()
    _is_listening = True
    try:
        with_server(server_settings(model_folder), test)
    finally:
        _is_listening = False


def test_a_client_that_leaves_ends_only_its_own_request(model_folder: Path) -> None:
    """S10. Sequences have ids of the server: a request with the `X-Request-Id` of another one does not touch it."""

    async def test(server: Running) -> None:
        async def ask(tokens: int, name: str) -> int:
            body = text_body(max_tokens=tokens, ignore_eos=True)
            return (await server.http.post("/v1/completions", json=body, headers={"x-request-id": name})).status_code

        kept = asyncio.create_task(ask(40, "same"))
        left = [asyncio.create_task(ask(100, name)) for name in ("same", "sam", "same-2")]
        await until(lambda: server.context.client.sequences.num_open == 4)
        for task in left:
            task.cancel()
        assert await kept == 200

    with_server(server_settings(model_folder), test, Script(step_s=0.01))


def test_the_operators_routes_are_these(model_folder: Path) -> None:
    """S12. Nothing runs code, loads weights or changes what is not a live setting."""

    async def test(server: Running) -> None:
        paths = (await server.http.get("/openapi.json")).json()["paths"]
        found = {f"{method} {path}" for path, methods in paths.items() if "admin" in path for method in methods}
        assert found == {
            *("get /admin/tenants", "put /admin/tenants", "get /admin/config", "patch /admin/config"),
            "post /admin/reload",
        }

    with_server(server_settings(model_folder), test, disable_fastapi_docs=False)
