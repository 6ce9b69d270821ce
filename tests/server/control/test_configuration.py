"""Settings that change while the server runs: by files and by requests, whole or not at all."""

import asyncio
import json
import logging
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.server.harness import Running, running, text_body, until
from tiercel.settings.config import resolve
from tiercel.settings.settings import EngineSettings

CONFIG = "/admin/config"
BOSS = {"authorization": "Bearer boss"}
TENANTS = "tenants: [{name: acme, key: one}]\n"


@pytest.fixture(autouse=True)
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of ours."""
    for name in os.environ:
        if name.startswith(("TIERCEL_", "VLLM_")):
            monkeypatch.delenv(name)


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    """A model folder as `resolve` wants it."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "config.json").write_text("{}")
    return folder


class Operator:
    """A server, its settings file, and a client with the admin key."""

    def __init__(self, server: Running, file: Path) -> None:
        self.server = server
        self.file = file

    @property
    def settings(self) -> Any:
        return self.server.context.settings

    @property
    def version(self) -> int:
        return self.server.context.configuration.current.version

    async def get(self) -> dict[str, Any]:
        answer = await self.server.http.get(CONFIG, headers=BOSS)
        assert answer.status_code == 200
        assert answer.headers["etag"] == f'"{answer.json()["version"]}"'
        return answer.json()

    async def patch(self, values: object, **headers: str) -> Any:
        return await self.server.http.patch(CONFIG, json=values, headers=BOSS | headers)

    async def reload(self) -> Any:
        return await self.server.http.post("/admin/reload", headers=BOSS)

    async def metric(self, name: str) -> float:
        text = (await self.server.http.get("/metrics")).text
        return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


def operate(folder: Path, tmp_path: Path, test: Callable[[Operator], Awaitable[None]], **flags: object) -> None:
    file = tmp_path / "tiercel.toml"
    if not file.exists():
        file.write_text("max-num-queued-reqs = 100\n")

    async def run() -> None:
        origin = resolve(
            {"model": str(folder), "config": str(file), "admin_key": "boss", "served_model_name": ["tiny"], **flags}
        )
        async with running(replace(origin.settings.server, port=0), origin=origin) as server:
            await test(Operator(server, file))

    asyncio.run(run())


def test_it_shows_every_setting_with_its_source_and_no_secret(folder: Path, tmp_path: Path) -> None:
    async def test(operator: Operator) -> None:
        shown = await operator.get()
        assert (shown["version"], shown["source"]) == (1, "start")
        assert shown["changed_at"].endswith("+00:00")
        settings = shown["settings"]
        assert settings["max-num-queued-reqs"] == {
            "value": 100,
            "source": "file",
            "name": str(operator.file),
            "is_live": True,
        }
        assert settings["max-num-seqs"] == {"value": None, "source": "default", "name": None, "is_live": True}
        assert settings["admin-key"] == {"value": "***", "source": "flag", "name": "--admin-key", "is_live": False}
        assert "boss" not in json.dumps(shown)

    operate(folder, tmp_path, test)


def test_only_the_admin_may(folder: Path, tmp_path: Path) -> None:
    async def test(operator: Operator) -> None:
        http = operator.server.http
        for headers in ({}, {"authorization": "Bearer nobody"}):
            answers = [
                await http.get(CONFIG, headers=headers),
                await http.patch(CONFIG, json={"log-level": "debug"}, headers=headers),
                await http.post("/admin/reload", headers=headers),
            ]
            assert [answer.status_code for answer in answers] == [401] * 3
        assert operator.version == 1

    operate(folder, tmp_path, test)


def test_a_request_changes_limits_policy_and_log_level_at_once(folder: Path, tmp_path: Path) -> None:
    async def test(operator: Operator) -> None:
        before = await operator.metric("tiercel_config_last_change_timestamp_seconds")
        answer = await operator.patch(
            {
                "max-num-queued-reqs": 7,
                "max_body_bytes": "64K",
                "scheduling-policy": "fcfs",
                "max-num-seqs": 32,
                "tbt-goal": 0.5,
                "log-level": "ERROR",
                "max-logprobs": 3,
            }
        )
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert (body["version"], body["source"]) == (2, "request")
        assert body["settings"]["max-num-seqs"] == {
            "value": 32,
            "source": "request",
            "name": "request body",
            "is_live": True,
        }
        settings = operator.settings
        assert (settings.max_num_queued_reqs, settings.max_body_bytes, settings.scheduling_policy) == (
            7,
            65_536,
            "fcfs",
        )
        assert logging.getLogger().level == logging.ERROR
        await until(lambda: bool(operator.server.engine.settings))
        reported = operator.server.engine.settings[-1]
        assert reported.version == 2
        engine = reported.settings
        assert isinstance(engine, EngineSettings)
        assert (engine.scheduling_policy, engine.max_num_seqs, engine.tbt_goal_s) == ("fcfs", 32, 0.5)
        assert await operator.metric("tiercel_config_version") == 2
        assert await operator.metric("tiercel_config_last_change_timestamp_seconds") >= before

    operate(folder, tmp_path, test)


def test_the_new_limits_act(folder: Path, tmp_path: Path) -> None:
    async def test(operator: Operator) -> None:
        async def ask(**fields: object) -> tuple[int, str]:
            answer = await operator.server.http.post("/v1/completions", json=text_body(max_tokens=2, **fields))
            return answer.status_code, answer.text

        assert (await ask(logprobs=4, n=8))[0] == 200
        assert (await ask(user="x" * 2000))[0] == 200
        assert (await operator.patch({"max-logprobs": 3, "max-num-queued-reqs": 4})).status_code == 200
        assert (await ask(logprobs=4))[0] == 400
        status, text = await ask(n=8)
        assert status == 400
        assert "the queue of this server holds" in text
        assert (await operator.patch({"max-body-bytes": 1024})).status_code == 200
        assert (await ask(user="x" * 2000))[0] == 413
        assert (await operator.patch({"max-body-bytes": None, "max-num-queued-reqs": None})).status_code == 200
        assert (await ask(user="x" * 2000, n=8))[0] == 200

    operate(folder, tmp_path, test)


@pytest.mark.parametrize(
    ("values", "status", "code", "words"),
    [
        (
            {"max-num-seqs": 0},
            400,
            "invalid_config",
            "request body: max-num-seqs = 0: expected a whole number, from 1 to 65,536",
        ),
        ({"max-num-seq": 5}, 400, "invalid_config", "there is no setting max-num-seq; did you mean max-num-seqs?"),
        ({"nonsense": None}, 400, "invalid_config", "there is no setting nonsense"),
        ({"quantization": "aqw"}, 400, "invalid_config", "quantization = aqw: expected one of auto, int8, int4"),
        ({"scheduling-policy": "lifo"}, 400, "invalid_config", "expected one of fair, priority, fcfs"),
        ({"log-level": "debug", "tbt-goal": "soon"}, 400, "invalid_config", "tbt-goal = soon: expected a number"),
        ({"max-num-seqs": True}, 400, "invalid_config", "max-num-seqs = True: expected a whole number"),
        ({"kv-disk-daily-writes": "1G"}, 400, "invalid_config", "--kv-disk-daily-writes needs --kv-disk-path"),
        (
            {"max_num_seqs": 5, "max-num-seqs": 6},
            400,
            "invalid_config",
            "request body: max_num_seqs and max-num-seqs are the same setting",
        ),
        (
            {"port": 9, "log-level": "debug"},
            409,
            "restart_required",
            "request body: port = 9: needs a restart: the listener is set up at the start",
        ),
        ({"dtype": "float16"}, 409, "restart_required", "needs a restart: the model is loaded at the start"),
        (
            {"admin-key": "hush"},
            409,
            "restart_required",
            "request body: admin-key = ***: needs a restart: access is set up",
        ),
        (
            {"max-num-seqs": 257},
            409,
            "restart_required",
            "the server started with the default, which is 256 on some devices",
        ),
        ({}, 400, "invalid_config", "request body: expected an object of settings"),
        ([1], 400, "invalid_config", "request body: expected an object of settings"),
    ],
)
def test_an_invalid_change_changes_nothing_and_is_reported_with_its_reason(
    values: object, status: int, code: str, words: str, folder: Path, tmp_path: Path
) -> None:
    async def test(operator: Operator) -> None:
        before, level = operator.settings, logging.getLogger().level
        answer = await operator.patch(values)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (status, code)
        assert words in error["message"]
        assert "hush" not in answer.text
        assert (operator.settings, operator.version, logging.getLogger().level) == (before, 1, level)
        assert not operator.server.engine.settings
        assert await operator.metric("tiercel_config_errors_total") == (1 if isinstance(values, dict) and values else 0)

    operate(folder, tmp_path, test)


def test_a_value_that_is_not_a_json_object_is_refused(folder: Path, tmp_path: Path) -> None:
    async def test(operator: Operator) -> None:
        for content, kind, words in (
            ("{", "application/json", "request body: not JSON"),
            ('{"a": 1, "a": 2}', "application/json", "request body: not JSON"),
            ("a = 1", "text/plain", "Unsupported Media Type"),
        ):
            answer = await operator.server.http.patch(CONFIG, content=content, headers=BOSS | {"content-type": kind})
            assert answer.status_code == 400
            assert words in answer.json()["error"]["message"]

    operate(folder, tmp_path, test)


def test_a_change_can_be_bound_to_a_version(folder: Path, tmp_path: Path) -> None:
    async def test(operator: Operator) -> None:
        assert (await operator.patch({"stall-timeout": 60}, **{"if-match": '"1"'})).status_code == 200
        late = await operator.patch({"stall-timeout": 70}, **{"if-match": '"1"'})
        assert (late.status_code, late.json()["error"]["code"]) == (412, "version_mismatch")
        assert operator.settings.stall_timeout_s == 60
        assert await operator.metric("tiercel_config_errors_total") == 0  # nothing was wrong
        assert (await operator.patch({"stall-timeout": 70}, **{"if-match": "*"})).status_code == 400

    operate(folder, tmp_path, test)


def test_changes_at_once_are_made_one_by_one(folder: Path, tmp_path: Path) -> None:
    async def test(operator: Operator) -> None:
        answers = await asyncio.gather(*(operator.patch({"stream-interval": 2 + index}) for index in range(8)))
        assert sorted(answer.json()["version"] for answer in answers) == list(range(2, 10))
        last = max(answers, key=lambda answer: answer.json()["version"]).json()
        assert last["settings"]["stream-interval"]["value"] == operator.settings.stream_interval
        await until(lambda: len(operator.server.engine.settings) == 8)
        assert [reported.version for reported in operator.server.engine.settings] == list(range(2, 10))

    operate(folder, tmp_path, test)


def test_a_reload_reads_the_file_and_drops_changes_made_by_requests(folder: Path, tmp_path: Path) -> None:
    async def test(operator: Operator) -> None:
        assert (await operator.patch({"max-logprobs": 3})).status_code == 200
        operator.file.write_text('max-num-queued-reqs = 55\nlog-level = "warning"\n')
        answer = await operator.reload()
        assert (answer.status_code, answer.json()) == (200, {"config_version": 3, "tenants_version": 1})
        settings = operator.settings
        assert (settings.max_num_queued_reqs, settings.max_logprobs, settings.log_level) == (55, 20, "warning")
        shown = (await operator.get())["settings"]
        assert shown["max-logprobs"]["source"] == "default"
        assert (await operator.reload()).json()["config_version"] == 3  # nothing is new

    operate(folder, tmp_path, test)


@pytest.mark.parametrize(
    "edited", ['max-num-queued-reqs = 55\nscheduling-policy = "fcfs"\n', "block-size = 32\n", "broken = \n", None]
)
def test_a_request_leaves_edits_of_the_file_to_the_reload(edited: str | None, folder: Path, tmp_path: Path) -> None:
    async def test(operator: Operator) -> None:
        before = (await operator.get())["settings"]
        if edited is None:
            operator.file.unlink()
        else:
            operator.file.write_text(edited)
        for values in ({"max-logprobs": 3}, {"max-num-queued-reqs": 7}, {"max-num-queued-reqs": None}):
            assert (await operator.patch(values)).status_code == 200
        shown = (await operator.get())["settings"]
        assert {key for key in before if shown[key] != before[key]} == {"max-logprobs"}
        assert (shown["max-num-queued-reqs"]["value"], shown["max-num-queued-reqs"]["source"]) == (100, "file")

    operate(folder, tmp_path, test)


def test_a_request_is_applied_on_top_of_the_last_reload(folder: Path, tmp_path: Path) -> None:
    async def test(operator: Operator) -> None:
        operator.file.write_text("max-num-queued-reqs = 55\n")
        assert (await operator.reload()).status_code == 200
        operator.file.write_text("port = 9\n")
        assert (await operator.reload()).status_code == 409
        assert (await operator.patch({"max-logprobs": 3})).status_code == 200
        assert (operator.settings.max_num_queued_reqs, operator.settings.max_logprobs) == (55, 3)

    operate(folder, tmp_path, test)


def test_flags_still_win_over_the_file_at_a_reload_and_requests_win_over_flags(folder: Path, tmp_path: Path) -> None:
    async def test(operator: Operator) -> None:
        operator.file.write_text("max-num-queued-reqs = 5\nmax-logprobs = 5\n")
        assert (await operator.reload()).status_code == 200
        assert (operator.settings.max_num_queued_reqs, operator.settings.max_logprobs) == (5, 9)
        assert (await operator.patch({"max-logprobs": 2})).status_code == 200
        assert operator.settings.max_logprobs == 2

    operate(folder, tmp_path, test, max_logprobs="9")


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("max-num-queued-reqs = 0\n", 400, "tiercel.toml: max-num-queued-reqs = 0: expected a whole number"),
        ("prot = 1\n", 400, "there is no setting prot; did you mean port?"),
        ("max-num-queued-reqs = \n", 400, "not a TOML file"),
        ("max-num-queued-reqs = 3\nport = 9\nblock-size = 32\n", 409, "block-size = 32: needs a restart: memory and"),
        ("max-num-queued-reqs = 3\nport = 9\nblock-size = 32\n", 409, "port = 9: needs a restart: the listener"),
        (f"allowed-origins = {'[' * 3000}", 400, "not a TOML file: nested too deeply"),
        (f"port = {'9' * 5000}\n", 400, "not a TOML file: Exceeds the limit"),
        (f"port.{'.'.join('a' * 3000)} = 1\n", 400, "tiercel.toml: port = ...: expected"),
        (None, 400, "cannot be read: No such file"),
    ],
)
def test_a_wrong_file_keeps_everything_as_it_was(
    text: str | None, status: int, words: str, folder: Path, tmp_path: Path
) -> None:
    async def test(operator: Operator) -> None:
        before = operator.settings
        if text is None:
            operator.file.unlink()
        else:
            operator.file.write_text(text)
        answer = await operator.reload()
        assert answer.status_code == status
        assert words in answer.json()["error"]["message"]
        assert (operator.settings, operator.version) == (before, 1)
        assert (await operator.server.http.get("/ready")).status_code == 200
        assert await operator.metric("tiercel_config_errors_total") == 1

    operate(folder, tmp_path, test)


def test_a_setting_that_leaves_the_file_falls_back_or_wants_a_restart(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tiercel.toml").write_text("max-logprobs = 2\nblock-size = 32\n")

    async def test(operator: Operator) -> None:
        operator.file.write_text("max-logprobs = 2\n")
        answer = await operator.reload()
        assert answer.status_code == 409
        assert "block-size: back to 16: needs a restart" in answer.json()["error"]["message"]
        operator.file.write_text("block-size = 32\n")
        assert (await operator.reload()).status_code == 200
        assert operator.settings.max_logprobs == 20

    operate(folder, tmp_path, test)


@pytest.mark.parametrize("is_config_wrong", [False, True])
def test_settings_and_tenants_are_reloaded_together_or_not_at_all(
    is_config_wrong: bool, folder: Path, tmp_path: Path
) -> None:
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(TENANTS)

    async def test(operator: Operator) -> None:
        async def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return (await operator.server.http.get("/v1/models", headers=headers)).status_code

        good = {operator.file: "max-logprobs = 5\n", tenants: TENANTS.replace("one", "two")}
        bad = {operator.file: "max-logprobs = -5\n", tenants: "tenants: []\n"}
        wrong = operator.file if is_config_wrong else tenants
        for file in good:
            file.write_text((bad if file == wrong else good)[file])
        assert (await operator.reload()).status_code == 400
        assert (operator.settings.max_logprobs, await status("one"), await status("two")) == (20, 200, 401)
        wrong.write_text(good[wrong])
        assert (await operator.reload()).json() == {"config_version": 2, "tenants_version": 2}
        assert (operator.settings.max_logprobs, await status("one"), await status("two")) == (5, 401, 200)

    operate(folder, tmp_path, test, tenants_config=str(tenants))


def test_a_missing_tenants_file_is_counted_as_a_refusal_of_the_tenants(folder: Path, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(TENANTS)

    async def test(operator: Operator) -> None:
        tenants.unlink()
        answer = await operator.reload()
        assert answer.status_code == 400 and "there is no such file" in answer.text
        page = (await operator.server.http.get("/metrics", headers=BOSS)).text
        assert "tiercel_tenants_config_errors_total 1" in page
        assert "tiercel_config_errors_total 0" in page

    operate(folder, tmp_path, test, tenants_config=str(tenants))


def test_a_server_that_was_put_together_by_hand_keeps_its_settings(folder: Path) -> None:
    async def test() -> None:
        origin = resolve({"model": str(folder), "admin_key": "boss"})
        async with running(replace(origin.settings.server, port=0)) as server:
            answer = await server.http.patch(CONFIG, json={"max-logprobs": 1}, headers=BOSS)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_config")
            assert (await server.http.get(CONFIG, headers=BOSS)).json()["settings"] == {}
            assert (await server.http.post("/admin/reload", headers=BOSS)).json()["config_version"] == 1

    asyncio.run(test())


def test_an_engine_that_becomes_ready_later_gets_earlier_changes(folder: Path, tmp_path: Path) -> None:
    async def test() -> None:
        file = tmp_path / "tiercel.toml"
        file.write_text("")
        origin = resolve({"model": str(folder), "config": str(file), "admin_key": "boss"})
        async with running(replace(origin.settings.server, port=0), wait=False, origin=origin) as server:
            answer = await server.http.patch(CONFIG, json={"scheduling-policy": "priority"}, headers=BOSS)
            assert answer.status_code == 200
            await until(lambda: bool(server.engine.settings))
            assert server.engine.settings[-1].settings.scheduling_policy == "priority"

    asyncio.run(test())
