"""`tiercel top`: a live table of what a server does, from its /metrics."""

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from tiercel.cli.console import fail

if TYPE_CHECKING:
    import httpx
    from rich.console import Console

    from tiercel.cli.monitor import Monitor


def top(
    url: Annotated[str, typer.Option(help="Where the server listens, with or without /v1.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(help="Key of the API. \\[TIERCEL_API_KEY]", metavar="KEY")] = None,
    interval: Annotated[float, typer.Option(help="Time between two readings.", metavar="SECONDS", min=0.1)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table and leave.")] = False,
) -> int:
    """Watch a running server: queue, memory, tokens per second, latencies, tenants. Ctrl-C leaves.

    Rates and percentiles are those of the last ten seconds. Works with any server
    that exports vLLM's metrics; what a server does not export is shown as a dash.
    """
    # lazy: no other verb needs the HTTP client and the tables
    import httpx
    from rich.console import Console

    # lazy: as above
    from tiercel.cli.monitor import MetricsError, Monitor
    from tiercel.config import client_api_key

    key = api_key or client_api_key()
    root = url.rstrip("/").removesuffix("/v1")
    monitor = Monitor(max(interval, 10.0))
    console = Console(highlight=False)
    with httpx.Client(headers={"Authorization": f"Bearer {key}"} if key else {}) as client:
        try:
            _read(monitor, client, root)
            if once or not sys.stdout.isatty():
                _print_once(monitor, client, root, min(interval, 1.0), console)
            else:
                _watch(monitor, client, root, interval, console)
        except MetricsError as exc:
            fail(str(exc))
            return 1
        except KeyboardInterrupt:
            return 0
    return 0


def _read(monitor: "Monitor", client: "httpx.Client", url: str) -> None:
    # lazy: no other verb needs the HTTP client
    from tiercel.cli.monitor import read_metrics

    monitor.take(time.monotonic(), read_metrics(client, url))


def _print_once(monitor: "Monitor", client: "httpx.Client", url: str, wait_s: float, console: "Console") -> None:
    # lazy: no other verb needs the tables
    from tiercel.cli.live_table import render

    time.sleep(wait_s)
    _read(monitor, client, url)
    console.print(render(monitor.figures(), url))


def _watch(monitor: "Monitor", client: "httpx.Client", url: str, interval_s: float, console: "Console") -> None:
    """Until Ctrl-C. A server that does not answer for a while is waited for."""
    # lazy: no other verb needs the tables
    from rich.live import Live

    # lazy: as above
    from tiercel.cli.live_table import render
    from tiercel.cli.monitor import MetricsError

    with Live(render(monitor.figures(), url), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            trouble = ""
            try:
                _read(monitor, client, url)
            except MetricsError as exc:
                trouble = str(exc)
            live.update(render(monitor.figures(), url, trouble), refresh=True)
