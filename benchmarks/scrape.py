"""Time of a scrape of /metrics with a thousand tenants that have all sent requests.

    python benchmarks/scrape.py                          1,000 tenants, 50 scrapes, about ten seconds
    python benchmarks/scrape.py --detail                 with ?detail=tenants
    python benchmarks/scrape.py --tenants 5000 --scrapes 20

The real HTTP process of the tests' harness (uvicorn on loopback, a fake engine) answers a request of every tenant, so
that the engine's books have all of them. A client process scrapes. Prints one JSON line, times in milliseconds:

    wall      of the HTTP call, as the client sees it
    cpu       of making the page, in its thread
    stall     delay of a timer of one millisecond on the event loop, the worst of each scrape
    idle      the same without a scrape, over the same time

Exit code 1 if, without --detail, there are more than ten lines per tenant, or if a scrape stalls the event loop by more
than `--most-stall-ms` (10) at 95 %.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import structlog
from msgspec.structs import replace

from tests.server.builders import build_byte_level
from tests.server.fake_engine import Script
from tests.server.harness import Running, running, server_settings, text_body, until
from tiercel.server.tenancy.tenants import Tenant
from tiercel.values.outcome import FairGauges, Gauges, PreemptionCount, TenantGauges
from tiercel.wire.frames import Report

MAX_LINES = 10
_AT_ONCE = 16
_PAUSE_S = 0.05  # between scrapes
_TICK_S = 0.001
_CLIENT = """
import json, sys, time, urllib.request
for line in sys.stdin:
    start = time.perf_counter()
    with urllib.request.urlopen(line.strip()) as answer:
        size = len(answer.read())
    print(json.dumps([1e3 * (time.perf_counter() - start), size]), flush=True)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--scrapes", type=int, default=50)
    parser.add_argument("--detail", action="store_true", help="more than ten lines a tenant")
    parser.add_argument("--most-stall-ms", type=float, default=10.0)
    wanted = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_byte_level().save(str(folder / "tokenizer.json"))
        tenants = [{"name": f"tenant-{index}", "key": f"k{index}"} for index in range(wanted.tenants)]
        (folder / "tenants.yaml").write_text(json.dumps({"tenants": tenants}))
        figures = asyncio.run(_measure(folder, wanted.scrapes, has_detail=wanted.detail))
    print(json.dumps({"tenants": wanted.tenants, "scrapes": wanted.scrapes, "detail": wanted.detail, **figures}))
    has_many = not wanted.detail and figures["most_lines_a_tenant"] > MAX_LINES
    return int(has_many or figures["stall"]["p95"] > wanted.most_stall_ms)


async def _measure(folder: Path, scrapes: int, *, has_detail: bool) -> dict[str, Any]:  # Any: JSON
    settings = replace(server_settings(folder), tenants_config=str(folder / "tenants.yaml"), enable_log_requests=False)
    async with running(settings, Script()) as server:
        tenants = server.context.tenants.table.tenants
        await _see(server, tenants)
        exposition = server.context.metrics.exposition
        cpu_ms: list[float] = []
        for _ in range(10):
            start_s = time.thread_time()
            page = exposition(has_detail=has_detail)
            cpu_ms.append(1e3 * (time.thread_time() - start_s))
        lines = [line for line in page.decode().splitlines() if 'tenant="' in line]
        url = f"{server.url}/metrics{'?detail=tenants' if has_detail else ''}\n".encode()
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _CLIENT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert client.stdin is not None
        assert client.stdout is not None
        wall_ms: list[float] = []
        stall_ms: list[float] = []
        size = 0
        for number in range(scrapes + 1):
            with _Ticks() as ticks:
                client.stdin.write(url)
                took_ms, size = json.loads(await client.stdout.readline())
            if number:  # the first one opens a connection and imports
                wall_ms.append(took_ms)
                stall_ms.append(ticks.worst_ms)
            await asyncio.sleep(_PAUSE_S)
        client.stdin.close()
        await client.wait()
        idle_ms: list[float] = []
        for _ in range(scrapes):
            with _Ticks() as ticks:
                await asyncio.sleep(statistics.median(wall_ms) / 1e3)
            idle_ms.append(ticks.worst_ms)
    return {
        "bytes": size,
        "lines_of_tenants": len(lines),
        "most_lines_a_tenant": round(len(lines) / len(tenants), 2),
        "wall": _spread(wall_ms),
        "cpu": _spread(cpu_ms),
        "stall": _spread(stall_ms),
        "idle": _spread(idle_ms),
    }


class _Ticks:
    """Measures the delay of a timer of the event loop."""

    def __init__(self) -> None:
        self.worst_ms = 0.0
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> "_Ticks":
        self._task = asyncio.get_running_loop().create_task(self._tick())
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._task is not None
        self._task.cancel()

    async def _tick(self) -> None:
        while True:
            due_s = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.worst_ms = max(self.worst_ms, 1e3 * (time.perf_counter() - due_s))


async def _see(server: Running, tenants: tuple[Tenant, ...]) -> None:
    """Send a request of every tenant, and a report of the engine with all of them."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def ask(key: str) -> None:
        async with places:
            headers = {"authorization": f"Bearer {key}"}
            answer = await server.http.post("/v1/completions", json=text_body(max_tokens=2), headers=headers)
            answer.raise_for_status()

    async with asyncio.TaskGroup() as group:
        for index in range(len(tenants)):
            group.create_task(ask(f"k{index}"))
    for tenant in tenants:
        server.context.metrics.on_throttled(tenant.name, "requests")
    gauges = tuple(
        TenantGauges(
            tenant=tenant.name,
            service_s=12.345678,
            starving_s=1.25,
            preemptions=(PreemptionCount("debt", "swap", 3), PreemptionCount("growth", "recompute", 1)),
        )
        for tenant in tenants
    )
    server.engine.send(
        Report(gauges=Gauges(fair=FairGauges(competing=len(tenants), jain=0.97, gap_s=1.5, tenants=gauges)))
    )
    await until(lambda: server.context.client.gauges.fair is not None)


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 2),
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 2),
        "worst": round(ordered[-1], 2),
    }


if __name__ == "__main__":
    sys.exit(main())
