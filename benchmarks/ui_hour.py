"""The page at /ui under load for an hour: redraws per second, and growth of its memory.

    python benchmarks/ui_hour.py [--model FOLDER] [--seconds 3600] [--every 30] [--json FILE] [--pictures DIR]
    python benchmarks/ui_hour.py --seconds 180 --clients 6 --picture docs/ui.png     the picture in docs/ui.md

Starts `tiercel serve` with three tenants, three tiers and room for a few sequences, keeps it busy with a closed loop of
conversations, and reads the page in headless Chromium with the admin key. A garbage collection precedes each reading.
The history of the charts fills for five minutes: growth counts from then, or from the first reading of a shorter run.
Exit code 1 if the page redrew less than twice per second in an interval, or if its heap grew by more than a tenth.
Client, server and browser share the machine.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from benchmarks.daemon import Daemon, running_daemon

if TYPE_CHECKING:
    from playwright.async_api import CDPSession, Page

ADMIN = "operator-key"
TENANTS = {"archive": 1, "chat": 2, "search": 1}  # name: weight
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
WARM_S = 300.0  # the charts show the last five minutes
MIN_REDRAWS_PER_S = 2.0
MAX_GROWTH = 0.10


def daemon_in(folder: Path, model: str | None, flags: list[str]) -> AbstractContextManager[Daemon]:
    """Return a daemon with three tenants and small tiers, as a context manager."""
    rows = "\n".join(f"  - {{name: {name}, key: {name}-key, weight: {weight}}}" for name, weight in TENANTS.items())
    (folder / "tenants.yaml").write_text(f"admin_key: {ADMIN}\nsecret: benchmark\ntenants:\n{rows}\n")
    return running_daemon(
        [
            *([model] if model else []),
            *("--tenants-config", str(folder / "tenants.yaml"), "--cpu-device-pool"),
            *("--kv-cache-memory-bytes", "24M", "--kv-host-size", "48M"),
            *("--kv-disk-path", str(folder / "kv"), "--kv-disk-size", "256M", *flags),
        ],
        folder / "serve.log",
    )


async def talk(url: str, tenant: str, number: int) -> None:
    """Hold conversations of a few turns about one of a few long texts, without end."""
    draw = random.Random(f"{tenant}{number}")
    async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {tenant}-key"}, timeout=120) as http:
        for turn in itertools.count():
            text = f"Report {draw.randrange(8)} of {tenant}. " * draw.choice((10, 30, 60))
            body = {"prompt": f"{text}\nQuestion {turn}:", "max_tokens": draw.randrange(16, 160), "ignore_eos": True}
            with contextlib.suppress(httpx.HTTPError):
                await http.post("/v1/completions", json=body)
            await asyncio.sleep(draw.random() * 0.5)


@contextlib.asynccontextmanager
async def load(url: str, clients: int) -> AsyncIterator[None]:
    """Run this many clients for each tenant until the block ends."""
    tasks = [asyncio.create_task(talk(url, tenant, number)) for tenant in TENANTS for number in range(clients)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def page_at(url: str, key: str) -> AsyncIterator["Page"]:
    """Open the page and enter the key."""
    from playwright.async_api import async_playwright

    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        raise SystemExit("there is no Chromium here; `make test-ui` installs it where root may")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=list(QUIET))
        page = await browser.new_page(viewport={"width": 1360, "height": 1000})
        await page.goto(f"{url}/ui")
        await page.get_by_label("API key").fill(key)
        await page.get_by_role("button", name="Use this key").click()
        await page.wait_for_selector("body[data-redraws]")
        yield page
        await browser.close()


async def look(page: "Page", session: "CDPSession", began_s: float) -> dict[str, float]:
    """Return the redraws and the heap of the page after a collection."""
    at_s = time.monotonic() - began_s
    redraws = float(await page.evaluate("Number(document.body.dataset.redraws)"))
    await session.send("HeapProfiler.collectGarbage")
    heap = await session.send("Runtime.getHeapUsage")
    nodes = float(await page.evaluate("document.getElementsByTagName('*').length"))
    return {"at_s": at_s, "redraws": redraws, "heap_bytes": float(heap["usedSize"]), "elements": nodes}


async def take_pictures(page: "Page", folder: Path) -> None:
    """Take screenshots: light, dark, and of the size of a phone."""
    for name, scheme, width in (("light", "light", 1360), ("dark", "dark", 1360), ("phone", "dark", 360)):
        await page.emulate_media(color_scheme=scheme)
        await page.set_viewport_size({"width": width, "height": 1000})
        await asyncio.sleep(1.0)
        await page.screenshot(path=str(folder / f"{name}.png"), full_page=True)


async def take_picture(page: "Page", file: Path) -> None:
    """Take the picture of the documentation: the whole page with an answer in the chat, in 256 colours."""
    from PIL import Image

    await page.get_by_label("Tenant's key").fill("chat-key")
    await page.get_by_label("Tokens", exact=True).fill("32")
    await page.get_by_label("Your message").fill("The code of Anna is 4821. What is the code of Anna?")
    await page.keyboard.press("Enter")
    await page.wait_for_selector(".said.assistant:not(.is-coming):not(:empty)", timeout=120_000)
    await page.evaluate("document.activeElement.blur()")
    await asyncio.sleep(1.0)
    await page.screenshot(path=str(file), full_page=True)
    with Image.open(file) as picture:
        small = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    small.save(file, optimize=True)


async def watch(url: str, args: argparse.Namespace) -> list[dict[str, float]]:
    """Read the page at intervals until the time is over."""
    looks: list[dict[str, float]] = []
    async with load(url, args.clients), page_at(url, ADMIN) as page:
        session = await page.context.new_cdp_session(page)
        began_s = time.monotonic()
        print(f"{'s':>7} {'redraws/s':>10} {'heap KiB':>9} {'elements':>9}")
        while True:
            looks.append(await look(page, session, began_s))
            now, before = looks[-1], looks[-2] if len(looks) > 1 else None
            rate = (now["redraws"] - before["redraws"]) / (now["at_s"] - before["at_s"]) if before else 0.0
            print(
                f"{now['at_s']:>7.0f} {rate:>10.2f} {now['heap_bytes'] / 1024:>9.0f} {now['elements']:>9.0f}",
                flush=True,
            )
            if now["at_s"] >= args.seconds:
                break
            await asyncio.sleep(min(args.every, args.seconds - now["at_s"] + 0.01))
        if args.pictures is not None:
            await take_pictures(page, args.pictures)
        if args.picture is not None:
            await take_picture(page, args.picture)
    return looks


def summary(looks: list[dict[str, float]]) -> dict[str, float]:
    """Return the redraws in the slowest interval, and the growth since the charts were full."""
    rates = [(b["redraws"] - a["redraws"]) / (b["at_s"] - a["at_s"]) for a, b in itertools.pairwise(looks)]
    first = next((one for one in looks if one["at_s"] >= WARM_S), looks[0])
    return {
        "seconds": looks[-1]["at_s"],
        "least_redraws_per_s": min(rates, default=0.0),
        "mean_redraws_per_s": (looks[-1]["redraws"] - looks[0]["redraws"]) / max(looks[-1]["at_s"], 1e-9),
        "heap_from_s": first["at_s"],
        "heap_first_bytes": first["heap_bytes"],
        "heap_last_bytes": looks[-1]["heap_bytes"],
        "heap_growth": looks[-1]["heap_bytes"] / first["heap_bytes"] - 1,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; the embedded model if none is given")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two looks")
    parser.add_argument("--clients", type=int, default=4, help="of each of the three tenants")
    parser.add_argument("--json", type=Path, help="write every look and the summary here")
    parser.add_argument("--pictures", type=Path, help="leave screenshots in this folder")
    parser.add_argument("--picture", type=Path, help="write the picture of the documentation to this file")
    args, flags = parser.parse_known_args()
    if args.pictures is not None:
        args.pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ui-hour-") as name, daemon_in(Path(name), args.model, flags) as (url, *_):
        looks = asyncio.run(watch(url, args))
    figures = summary(looks)
    least, mean = figures["least_redraws_per_s"], figures["mean_redraws_per_s"]
    print(f"{figures['seconds']:.0f} s: {mean:.2f} redraws/s, never under {least:.2f}")
    before, after = figures["heap_first_bytes"] / 1024, figures["heap_last_bytes"] / 1024
    print(
        f"heap {before:.0f} KiB after {figures['heap_from_s']:.0f} s, "
        f"{after:.0f} KiB at the end: {figures['heap_growth']:+.1%}"
    )
    if args.json is not None:
        args.json.write_text(json.dumps({"summary": figures, "looks": looks}, indent=1))
    is_good = figures["least_redraws_per_s"] >= MIN_REDRAWS_PER_S and figures["heap_growth"] <= MAX_GROWTH
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
