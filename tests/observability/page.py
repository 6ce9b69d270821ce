"""A real /metrics page: the HTTP process after traffic of two tenants, with an engine whose books hold everything."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from tests.observability.promql import Catalog
from tests.server.fake_engine import Script
from tests.server.harness import Running, running, server_settings, text_body, until
from tiercel.values.ids import TenantId
from tiercel.values.outcome import (
    DiskState,
    FairGauges,
    Gauges,
    PreemptionCount,
    RouteGauges,
    SwitchGauges,
    TenantGauges,
    TierGauges,
)
from tiercel.values.tier import Route, Tier
from tiercel.wire.frames import Report

TENANTS = """
admin_key: boss
tenants:
  - {name: anna, key: one, weight: 3, slo: {ttft_s: 1.0, tbt_s: 0.001}}
  - {name: berta, key: two, requests_per_minute: 3}
"""
GAUGES = Gauges(
    blocks_total=64,
    steps=1000,
    nano_batches=1100,
    prefix_queries=10_000,
    prefix_hits=4000,
    preemptions=9,
    preemptions_swap=5,
    preemptions_recompute=4,
    preemptions_by_reason={"band": 5, "debt": 4},
    swapped_tokens=640,
    recomputed_tokens=50,
    drafts=20,
    proposed_tokens=80,
    accepted_tokens=60,
    switches=(SwitchGauges("swap", 2, 0.5, 0.75), SwitchGauges("recompute", 1, 1.5, 1.25)),
    tiers=(
        TierGauges(
            tier=Tier.HBM, block_bytes=1024, blocks_total=64, blocks_used=8, hit_tokens=3000, missed_tokens=7000
        ),
        TierGauges(tier=Tier.DDR, block_bytes=1024, blocks_total=128, blocks_cached=9, hit_tokens=600, evictions=3),
        TierGauges(
            tier=Tier.SSD, block_bytes=1024, blocks_total=512, hit_tokens=400, daily_blocks=512, writable_blocks=100
        ),
    ),
    routes=tuple(
        RouteGauges(route=route, transfers=3, blocks=9, bytes=9216, seconds=0.01, copies=3)
        for route in (Route.SPILL, Route.RESTORE, Route.PERSIST, Route.PREFETCH, Route.VERIFY)
    ),
    disk_state=DiskState.ON,
    fair=FairGauges(
        competing=2,
        jain=0.9,
        gap_s=0.5,
        tenants=tuple(
            TenantGauges(
                tenant=TenantId(name),
                service_s=2.5,
                starving_s=0.5,
                preemptions=(PreemptionCount("band", "swap", 5), PreemptionCount("debt", "recompute", 4)),
            )
            for name in ("anna", "berta")
        ),
    ),
)


def read_page(model_folder: Path, folder: Path, *, detail: bool = True) -> str:
    """Serve, make every counter exist, and read the page over HTTP."""
    file = folder / "tenants.yaml"
    file.write_text(TENANTS)
    settings = replace(
        server_settings(model_folder), tenants_config=str(file), files_path=str(folder / "files"), max_num_queued_reqs=2
    )

    async def run() -> str:
        async with running(settings, Script(cached=1, step_s=0.01, max_running=1, fail_prompt_with=7)) as server:
            server.context.metrics.watch_engine(os.getpid)
            await _traffic(server)
            assert (await server.http.put("/admin/tenants", content=b"[", headers=_key("boss"))).status_code == 400
            server.engine.send(Report(gauges=GAUGES))
            await until(lambda: server.context.client.gauges.fair is not None)
            query = "?detail=tenants" if detail else ""
            return (await server.http.get(f"/metrics{query}")).raise_for_status().text

    return asyncio.run(run())


def catalog(page: str) -> Catalog:
    """Return the series that Prometheus stores for this page: it adds the labels of the target, and `up`."""
    target = {"job": "tiercel", "instance": "tiercel:8000"}
    found = Catalog((name, {**labels, **target}) for name, labels in samples(page))
    found.add("up", [frozenset(target.items())])
    return found


def samples(page: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Names and labels of every series."""
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            yield sample.name, sample.labels


async def _traffic(server: Running) -> None:
    for key in ("one", "two"):
        assert (await _ask(server, key, max_tokens=4)).status_code == 200
    async with asyncio.TaskGroup() as group:  # a queue that overflows
        answers = [group.create_task(_ask(server, "one", max_tokens=40)) for _ in range(6)]
    assert {answer.result().status_code for answer in answers} == {200, 503}
    assert (await _ask(server, "one", prompt=[7])).status_code == 500
    statuses = {(await _ask(server, "two", max_tokens=1)).status_code for _ in range(4)}
    assert 429 in statuses
    await until(lambda: server.context.client.sequences.num_unfinished == 0)


async def _ask(server: Running, key: str, **fields: object) -> httpx.Response:
    return await server.http.post("/v1/completions", json=text_body(**fields), headers=_key(key))


def _key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
