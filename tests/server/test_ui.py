"""/ui: its files are open and safe; the dashboard snapshot needs a key, is bounded and agrees with /metrics."""

import asyncio
import contextlib
import dataclasses
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.server.fake_engine import Script
from tests.server.harness import Running, running, server_settings, text_body, until, with_server
from tiercel.server.tenancy.auth import Viewer
from tiercel.server.ui.dashboard import MAX_REQUESTS, MAX_TENANTS, MAX_TIER_TENANTS, Dashboard
from tiercel.server.ui.past import KEPT_S, PERIOD_S, ServerPast
from tiercel.values.clock import ManualClock
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import (
    FairGauges,
    Gauges,
    RouteGauges,
    SequenceGauges,
    SequenceState,
    TenantBlocks,
    TenantGauges,
    TierGauges,
)
from tiercel.values.tier import Route, Tier
from tiercel.wire.frames import Report

TENANTS = """\
admin_key: boss
secret: s
tenants:
  - {name: acme, key: one, weight: 3}
  - {name: beta, key: two, weight: 1}
"""
SLOW = Script(step_s=0.02)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(TENANTS)
    return path


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def _look(server: Running, key: str | None = None) -> Any:
    answer = await server.http.get("/ui/data", headers={} if key is None else _bearer(key))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def _complete(server: Running, key: str, prompt: str = "hello world", **more: object) -> Any:
    return await server.http.post("/v1/completions", json=text_body(prompt, **more), headers=_bearer(key))


# ---- files


def test_the_files_need_no_key_and_have_a_strict_policy(model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> None:
        page = await server.http.get("/ui")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        names = re.findall(r'(?:src|href)="(ui/[^"]+)"', page.text)
        assert {name.rsplit(".", 1)[1] for name in names} == {"js", "css", "svg"}
        for answer in [page, *[await server.http.get(f"/{name}") for name in names]]:
            policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
            assert answer.status_code == 200, answer.url
            assert policy["default-src"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            assert policy["require-trusted-types-for"] == "'script'"
            assert "unsafe" not in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"

    with_server(server_settings(model_folder), test, tenants_config=str(file))


def test_the_page_has_no_inline_script_no_inline_style_and_no_foreign_address() -> None:
    folder = Path(__file__).resolve().parents[2] / "tiercel/server/ui/static"
    for path in folder.glob("*"):
        if path.suffix not in (".html", ".js", ".css", ".svg"):
            continue
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//cdn|@import|data:(?!\s)", text.replace("'data: ", "")), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), path.name
        if path.suffix == ".html":
            assert not re.search(r"<style|<script(?![^>]*\ssrc=)|\sstyle=|\son[a-z]+=", text)
    licence = folder / "vendor/uplot/LICENSE"
    assert "MIT" in licence.read_text(encoding="utf-8")


def test_an_unchanged_file_is_not_sent_again(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        first = await server.http.get("/ui/app.js")
        again = await server.http.get("/ui/app.js", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        changed = await server.http.get("/ui/app.js", headers={"if-none-match": '"other"'})
        assert (changed.status_code, changed.content) == (200, first.content)

    with_server(server_settings(model_folder), test)


@pytest.mark.parametrize(
    "path", ["/ui/nothing.js", "/ui/../server/app.py", "/ui/%2e%2e/routes.py", "/ui/vendor", "/ui//app.js", "/uix"]
)
def test_only_files_of_the_page_are_served(path: str, model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")

    with_server(server_settings(model_folder), test)


def test_a_trailing_slash_redirects_to_the_page(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.get("/ui/")
        assert (answer.status_code, answer.headers["location"]) == (308, "../ui")

    with_server(server_settings(model_folder), test)


# ---- who may see what


def test_without_keys_everything_is_shown(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        assert (await server.http.post("/v1/completions", json=text_body(max_tokens=3))).status_code == 200
        reported = await _look(server)
        assert reported["viewer"] == {"role": "operator", "tenant": "default", "has_chat": True}
        assert reported["engine"]["state"] == "ready"
        assert reported["work"]["generation_tokens"] == 3
        assert [row["name"] for row in reported["tenants"]["rows"]] == ["default"]

    with_server(server_settings(model_folder), test)


@pytest.mark.parametrize("key", [None, "wrong", "two2"])
def test_a_wrong_key_gets_401(key: str | None, model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.get("/ui/data", headers={} if key is None else _bearer(key))
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"

    with_server(server_settings(model_folder), test, tenants_config=str(file))
    with_server(server_settings(model_folder), test, api_keys=("one",))


def test_without_a_tenants_file_every_key_is_the_operators(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        assert (await _look(server, "one"))["viewer"]["role"] == "operator"

    with_server(server_settings(model_folder), test, api_keys=("one",))


def test_a_tenant_sees_its_own_data_and_the_operator_all(model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> None:
        for key, tokens in (("one", 2), ("two", 5)):
            assert (await _complete(server, key, max_tokens=tokens)).status_code == 200
        server.engine.send(Report(gauges=_full_gauges()))
        await until(lambda: bool(server.context.client.gauges.tiers))
        own, everything = await _look(server, "one"), await _look(server, "boss")

        assert own["viewer"] == {"role": "tenant", "tenant": "acme", "has_chat": True}
        assert "beta" not in json.dumps(own)
        assert own["work"]["generation_tokens"] == 2
        assert own["work"]["gap"] is own["work"]["finished"] is own["tiers"][0]["hit_tokens"] is None
        assert own["routes"] == []
        assert own["queue"]["waiting"] == 7
        assert own["tiers"][0]["used"] == 4000
        assert own["tiers"][0]["tenants"] == [{"name": "acme", "used": 3000, "cached": 1000}]

        assert everything["viewer"] == {"role": "operator", "tenant": None, "has_chat": True}
        assert everything["work"]["generation_tokens"] == 7
        assert [row["name"] for row in everything["tenants"]["rows"]] == ["beta", "acme"]
        assert everything["tiers"][1]["hit_tokens"] == 320
        assert everything["routes"] == [
            {"route": "hbm_ddr", "blocks": 64, "bytes": 64_000, "seconds": 0.5, "failures": 1, "late": 2}
        ]

    with_server(server_settings(model_folder), test, tenants_config=str(file))


def _full_gauges() -> Gauges:
    parts = (TenantBlocks(TenantId("acme"), 3, 1), TenantBlocks(TenantId("beta"), 1, 2))
    return Gauges(
        num_waiting=7,
        tiers=(
            TierGauges(tier=Tier.HBM, block_bytes=1000, blocks_total=10, blocks_used=4, blocks_cached=3, tenants=parts),
            TierGauges(tier=Tier.DDR, block_bytes=1000, blocks_total=40, blocks_cached=8, hit_tokens=320),
        ),
        routes=(RouteGauges(route=Route.SPILL, bytes=64_000, seconds=0.5, blocks=64, failures=1, late=2),),
        fair=FairGauges(jain=0.9, tenants=(TenantGauges(tenant=TenantId("acme"), service_s=1.5, starving_s=2.0),)),
    )


# ---- what it shows


def test_fair_shares_count_the_tenants_that_want_service_now(model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> None:
        stream = {"stream": True, "max_tokens": 200, "ignore_eos": True}
        async with (
            server.http.stream("POST", "/v1/completions", json=text_body(**stream), headers=_bearer("one")) as first,
            server.http.stream("POST", "/v1/completions", json=text_body(**stream), headers=_bearer("two")) as second,
        ):
            assert first.status_code == second.status_code == 200
            await until(lambda: server.context.client.sequences.num_started == 2)
            rows = {row["name"]: row for row in (await _look(server, "boss"))["tenants"]["rows"]}
            assert {name: row["fair_share"] for name, row in rows.items()} == {"acme": 0.75, "beta": 0.25}
            assert {name: row["running"] for name, row in rows.items()} == {"acme": 1, "beta": 1}
        await until(lambda: server.engine.live == 0)

    with_server(server_settings(model_folder), test, SLOW, tenants_config=str(file))


def test_requests_are_shown_with_their_state_and_without_their_text(model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> None:
        stream = {"stream": True, "max_tokens": 200, "ignore_eos": True}
        body = text_body("naïve secret words", **stream)
        async with server.http.stream("POST", "/v1/completions", json=body, headers=_bearer("one")):
            await until(lambda: server.context.client.sequences.num_started == 1)
            reported = await _look(server, "one")
            (row,) = reported["requests"]["rows"]
            assert (row["tenant"], row["state"], row["most_outputs"]) == ("acme", "decode", 200)
            assert row["output_tokens"] >= 1
            assert row["ttft_s"] > 0
            assert "secret" not in json.dumps(reported)
            assert (await _look(server, "two"))["requests"] == {"rows": [], "running": 0, "waiting": 0}

            server.engine.script = dataclasses.replace(SLOW, step_s=60.0)  # the fake engine sends no further report
            gave_way = SequenceGauges(SeqId(row["seq"]), SequenceState.PREEMPTED, 11, 2)
            tiers = _full_gauges().tiers
            server.engine.send(Report(gauges=Gauges(tiers=tiers, sequences=(gave_way,))))
            await until(lambda: server.context.client.gauges.sequences == (gave_way,))
            await asyncio.sleep(0.25)  # snapshots are up to 0.2 s old
            (row,) = (await _look(server, "boss"))["requests"]["rows"]
            assert (row["state"], row["computed_tokens"], row["preemptions"]) == ("preempted", 11, 2)
            server.engine.send(Report(gauges=Gauges(num_running=1)))
            await until(lambda: server.context.client.gauges.num_running == 1)
            assert server.context.client.gauges.sequences == (gave_way,), "fields left out of a report keep their value"
            assert server.context.client.gauges.tiers == tiers

    with_server(server_settings(model_folder), test, SLOW, tenants_config=str(file))


def test_the_snapshot_agrees_with_metrics_and_is_not_counted(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for tokens in (1, 4, 9):
            await server.http.post("/v1/completions", json=text_body(max_tokens=tokens))
        reported = await _look(server)
        text = (await server.http.get("/metrics")).text
        metric = {
            line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[:1] != "#"
        }
        labels = 'engine="0",model_name="tiny"'
        assert reported["work"]["generation_tokens"] == metric[f"vllm:generation_tokens_total{{{labels}}}"] == 14
        assert reported["work"]["prompt_tokens"] == metric[f"vllm:prompt_tokens_total{{{labels}}}"]
        assert reported["work"]["finished"] == 3
        first = reported["work"]["first_token"]
        assert len(first["counts"]) == len(first["bounds"]) + 1
        assert first["counts"][-1] == metric[f"vllm:time_to_first_token_seconds_count{{{labels}}}"] == 3
        assert "/ui/data" not in text

    with_server(server_settings(model_folder), test)


def test_viewers_of_one_moment_share_one_count_of_each_tenant(model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> None:
        for key, tokens in (("one", 2), ("two", 5)):
            assert (await _complete(server, key, max_tokens=tokens)).status_code == 200
        clock, metrics = ManualClock(), server.context.metrics.tenants
        counted: list[TenantId] = []

        def counts(name: TenantId) -> tuple[int, int]:
            counted.append(name)
            return 0, 0

        metrics.open(counts, dict)
        dashboard = Dashboard(dataclasses.replace(server.context, clock=clock))
        tenants = server.context.tenants.table.by_name.values()
        for viewer in (Viewer(None, is_operator=True), *(Viewer(tenant, is_operator=False) for tenant in tenants)):
            dashboard.snapshot(viewer)
        assert sorted(counted) == ["acme", "beta"]
        clock.advance(0.5)
        dashboard.snapshot(Viewer(None, is_operator=True))
        assert len(counted) == 4, "after 0.2 s the numbers are gathered again"

    with_server(server_settings(model_folder), test, tenants_config=str(file))


@pytest.mark.parametrize("policy", ["fair", "priority"])
def test_a_tenant_with_only_a_waiting_request_is_shown_as_waiting(policy: str, model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> None:
        async with _open(server, [_bearer("one")], text_body(max_tokens=9)):
            await until(lambda: server.context.client.sequences.num_tokenless == 1)
            if policy == "fair":
                reported = TenantGauges(tenant=TenantId("acme"), starving_s=150.0)
                server.engine.send(Report(gauges=Gauges(fair=FairGauges(tenants=(reported,)))))
                await until(lambda: server.context.client.gauges.fair is not None)
            page = (await server.http.get("/metrics", headers=_bearer("boss"))).text
            (line,) = re.findall(r'^tiercel_tenant_starvation_age_seconds\{tenant="acme"\} (\S+)$', page, re.MULTILINE)
            (row,) = (await _look(server, "boss"))["tenants"]["rows"]
            assert (float(line), row["starving_s"]) == (150.0, 150.0) if policy == "fair" else float(line) > 0

    with_server(server_settings(model_folder), test, Script(step_s=60.0), tenants_config=str(file))


def test_the_size_of_the_snapshot_is_bounded(model_folder: Path, tmp_path: Path) -> None:
    names = [f"tenant-with-a-rather-long-name-{index:03}" for index in range(300)]
    rows = "\n".join(f"  - {{name: {name}, key: key-{name}}}" for name in names)
    path = tmp_path / "many.yaml"
    path.write_text(f"admin_key: boss\nsecret: s\ntenants:\n{rows}\n")
    settings = replace(server_settings(model_folder), tenants_config=str(path))

    async def test() -> None:
        async with running(settings, Script(step_s=60.0)) as server:
            body = text_body(max_tokens=9, n=2)
            async with _open(server, [_bearer(f"key-{name}") for name in names[:60]], body):
                await until(lambda: server.context.client.sequences.num_unfinished == 120)
                parts = tuple(TenantBlocks(TenantId(name), 5, 5) for name in names[:32])
                tier = TierGauges(tier=Tier.HBM, block_bytes=1000, blocks_total=900, tenants=parts)
                fair = FairGauges(tenants=tuple(TenantGauges(tenant=TenantId(name)) for name in names))
                server.engine.send(Report(gauges=Gauges(tiers=(tier,), fair=fair)))
                await until(lambda: bool(server.context.client.gauges.tiers))
                answer = await server.http.get("/ui/data", headers=_bearer("boss"))
                reported = answer.json()
                assert len(reported["tenants"]["rows"]) == MAX_TENANTS
                assert reported["tenants"]["seen"] == 300
                assert len(reported["requests"]["rows"]) == MAX_REQUESTS
                assert reported["requests"]["waiting"] == 120
                assert len(reported["tiers"][0]["tenants"]) == MAX_TIER_TENANTS
                assert len(answer.content) < 32 * 1024
                assert {row["waiting"] for row in reported["tenants"]["rows"]} == {2}, "the busiest are named"

    asyncio.run(test())


@contextlib.asynccontextmanager
async def _open(server: Running, headers: list[dict[str, str]], body: dict[str, object]) -> AsyncIterator[None]:
    """Open requests that end with the block."""
    posts = [server.http.post("/v1/completions", json=body, headers=one) for one in headers]
    tasks = [asyncio.ensure_future(post) for post in posts]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_the_snapshot_is_served_while_the_model_loads(model_folder: Path) -> None:
    async def test() -> None:
        async with running(server_settings(model_folder), Script(load_s=60.0), wait=False) as server:
            await until(lambda: server.context.client.status.stage == "loading weights")
            reported = await _look(server)
            assert (reported["engine"]["state"], reported["engine"]["stage"]) == ("loading", "loading weights")
            assert reported["engine"]["context_tokens"] is None
            assert reported["work"]["first_token"] == {"bounds": [], "counts": []}

    asyncio.run(test())


# ---- the past


def test_the_last_ten_minutes_are_kept_and_no_more(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        clock = ManualClock(5000.0)
        past = ServerPast(dataclasses.replace(server.context, clock=clock))
        assert (await server.http.post("/v1/completions", json=text_body(max_tokens=3))).status_code == 200
        for _ in range(400):
            past.take()
            clock.advance(PERIOD_S)
        kept = past.snapshot(is_operator=True)
        assert kept.at_s[-1] - kept.at_s[0] == KEPT_S - PERIOD_S
        assert kept.work is not None
        columns = (kept.running, kept.waiting, kept.preempted, kept.work.prompt_tokens, kept.work.gap.counts)
        assert {len(column) for column in columns} == {len(kept.at_s)} == {int(KEPT_S / PERIOD_S)}
        assert kept.work.generation_tokens[-1] == 3
        assert (kept.work.first_token.counts[-1][-1], kept.work.gap.counts[-1][-1]) == (1, 2)
        assert len(kept.work.gap.bounds) == len(kept.work.gap.counts[-1]) - 1

    with_server(server_settings(model_folder), test)


def test_the_past_needs_a_key_and_shows_the_work_of_all_to_the_operator_only(model_folder: Path, file: Path) -> None:
    async def test(server: Running) -> None:
        await _complete(server, "one", max_tokens=3)
        assert (await server.http.get("/ui/past")).status_code == 401
        boss, acme = [(await server.http.get("/ui/past", headers=_bearer(key))).json() for key in ("boss", "one")]
        assert boss["at_s"]
        assert len(boss["work"]["generation_tokens"]) == len(boss["at_s"]) == len(acme["running"])
        assert acme["work"] is None
        assert "/ui/past" not in (await server.http.get("/metrics", headers=_bearer("boss"))).text

    with_server(server_settings(model_folder), test, tenants_config=str(file))
