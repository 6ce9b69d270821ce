"""A served page in a test: the HTTP process in a thread, a fake engine, and the actions of a person on the page."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from msgspec.structs import replace

from tests.e2e.daemon import Daemon
from tests.server.fake_engine import Script
from tests.server.harness import Running, running, server_settings, text_body
from tiercel.values.ids import TenantId
from tiercel.values.outcome import DiskState, FairGauges, Gauges, RouteGauges, TenantBlocks, TenantGauges, TierGauges
from tiercel.values.tier import Route, Tier
from tiercel.wire.frames import FromEngine

if TYPE_CHECKING:
    from playwright.sync_api import Page

REDRAWS = "Number(document.body.dataset.redraws ?? 0)"

T = TypeVar("T")


class Site:
    """The running server, for tests that are not asynchronous."""

    def __init__(self, server: Running, loop: asyncio.AbstractEventLoop) -> None:
        self.server = server
        self.url = server.url
        self._loop = loop

    def send(self, *messages: FromEngine) -> None:
        """Send a report of the engine."""
        for message in messages:
            self._loop.call_soon_threadsafe(self.server.engine.send, message)

    def complete(self, key: str | None = None, **fields: object) -> httpx.Response:
        """Request one answer and wait for its end."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return self.wait(self.server.http.post("/v1/completions", json=text_body(**fields), headers=headers))

    def metrics(self) -> dict[str, float]:
        """Return every sample of /metrics."""
        text = httpx.get(f"{self.url}/metrics").text
        return samples_of(text)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:  # Any: what a coroutine yields is asyncio's concern
        """Run work on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)


def samples_of(text: str) -> dict[str, float]:
    """Return the values by name and labels."""
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in lines}


@contextlib.contextmanager
def site(model_folder: Path, script: Script, **changes: object) -> Iterator[Site]:
    """Serve until the block ends."""
    ready: list[Site] = []
    started, done = threading.Event(), threading.Event()

    async def serve() -> None:
        async with running(replace(server_settings(model_folder), **changes), script) as server:
            ready.append(Site(server, asyncio.get_running_loop()))
            started.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: (asyncio.run(serve()), started.set()))
    thread.start()
    try:
        assert started.wait(30)
        assert ready
        yield ready[0]
    finally:
        done.set()
        thread.join(30)


def full_gauges(name: str = "default") -> Gauges:
    """Return gauges of three filled tiers and of two copies between them."""
    size = 65_536
    parts = (TenantBlocks(TenantId(name), 20, 10),)
    hbm = TierGauges(tier=Tier.HBM, block_bytes=size, blocks_total=64, blocks_used=20, blocks_cached=12, tenants=parts)
    ddr = TierGauges(tier=Tier.DDR, block_bytes=size, blocks_total=256, blocks_cached=96, hit_tokens=320)
    ssd = TierGauges(tier=Tier.SSD, block_bytes=size, blocks_total=1024, blocks_cached=200, missed_tokens=64)
    return Gauges(
        num_running=2,
        num_waiting=1,
        num_preempted=1,
        blocks_total=64,
        blocks_used=20,
        tiers=(hbm, ddr, ssd),
        routes=(
            RouteGauges(route=Route.SPILL, blocks=96, bytes=96 * size, seconds=0.5),
            RouteGauges(route=Route.RESTORE, blocks=12, bytes=12 * size, seconds=0.1),
        ),
        disk_state=DiskState.ON,
        fair=FairGauges(tenants=(TenantGauges(tenant=TenantId(name), service_s=1.0),)),
    )


def visit(page: "Page", site: Site | Daemon) -> None:
    """Open the page and wait for its first snapshot."""
    page.goto(f"{site.url}/ui")
    page.wait_for_selector("body[data-redraws]")


def wait_redraws(page: "Page", more: int = 2) -> None:
    """Wait for a number of redraws, so that the page shows a snapshot requested after the call."""
    seen = page.evaluate(REDRAWS)
    page.wait_for_selector(f'body:not([data-redraws="{seen}"])')
    for _ in range(more - 1):
        seen = page.evaluate(REDRAWS)
        page.wait_for_selector(f'body:not([data-redraws="{seen}"])')


def visible(page: "Page", selector: str) -> list[str]:
    """Return the texts of the elements that can be seen."""
    nodes = "[...document.querySelectorAll(selector)].filter(node => node.checkVisibility())"
    return page.evaluate(f"selector => {nodes}.map(node => node.innerText)", selector)


def type_key(page: "Page", key: str) -> None:
    page.get_by_label("API key", exact=True).fill(key)
    page.get_by_role("button", name="Use this key").click()


def shown(page: "Page", name: str) -> float:
    """Return the number of a tile."""
    return float(page.evaluate(f"document.getElementById('v-{name}').dataset.value"))
