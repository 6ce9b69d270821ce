"""The table of `tiercel top`."""

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tiercel.cli.monitor import PERCENTS, Figures, TenantFigures
from tiercel.loadtest.report.wording import NONE, show_bytes_per_s, show_number, show_percent, show_s

_BAR_CELLS = 16
_NEARLY_FULL = 0.95


def render(figures: Figures, url: str, trouble: str = "") -> RenderableType:
    """One screen. `trouble`: why the newest reading failed."""
    parts: list[RenderableType] = [_head(figures, url, trouble), Text(), _levels(figures)]
    if figures.latencies_s:
        parts += [Text(), _latencies(figures)]
    if figures.tenants:
        parts += [Text(), _tenants(figures.tenants)]
    return Group(*parts)


def _head(figures: Figures, url: str, trouble: str) -> Text:
    line = Text.assemble((figures.model or "server", "bold"), f" at {url}")
    line.append(f"   rates over {show_s(figures.window_s)}" if figures.window_s else "", style="dim")
    if trouble:
        line.append(f"\n{trouble}", style="bold red")
    return line


def _levels(figures: Figures) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 3, 0, 0), pad_edge=False)
    for _ in range(2):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True)
    total = "" if figures.preemptions is None else f" ({figures.preemptions:,.0f} in all)"
    left: list[tuple[str, RenderableType]] = [
        ("running", show_number(figures.running)),
        ("waiting", show_number(figures.waiting)),
        ("KV blocks", _bar(figures.kv_usage)),
        *((tier, _bar(share)) for tier, share in figures.tiers.items()),
    ]
    right: list[tuple[str, RenderableType]] = [
        ("tokens in", _per_s(figures.tokens_in_per_s)),
        ("tokens out", _per_s(figures.tokens_out_per_s)),
        ("requests done", _per_s(figures.finished_per_s)),
        ("prefix hits", show_percent(figures.hit_rate)),
        ("preemptions", f"{_per_s(figures.preemptions_per_s)}{total}"),
        *((f"  by {mode}", f"{count:,.0f} in all") for mode, count in figures.preemptions_by_mode.items()),
        *((route, show_bytes_per_s(moved)) for route, moved in figures.transfers_per_s.items()),
    ]
    for place in range(max(len(left), len(right))):
        table.add_row(*_cell(left, place), *_cell(right, place))
    return table


def _cell(rows: Sequence[tuple[str, RenderableType]], place: int) -> tuple[RenderableType, RenderableType]:
    return rows[place] if place < len(rows) else ("", "")


def _latencies(figures: Figures) -> Table:
    table = _numbers("latency", *(f"p{percent}" for percent in PERCENTS))
    for name, values in figures.latencies_s.items():
        table.add_row(name, *map(_seconds, values))
    return table


def _tenants(tenants: Sequence[TenantFigures]) -> Table:
    """A row a tenant; columns that no tenant has are left out."""
    columns = [column for column in _tenant_columns(tenants) if any(cell != NONE for cell in column[1])]
    table = _numbers("tenant", *(title for title, _ in columns))
    for place, tenant in enumerate(tenants):
        table.add_row(Text(tenant.name), *(cells[place] for _, cells in columns))
    return table


def _tenant_columns(tenants: Sequence[TenantFigures]) -> Iterator[tuple[str, list[str]]]:
    yield "running", [show_number(tenant.running) for tenant in tenants]
    yield "waiting", [show_number(tenant.waiting) for tenant in tenants]
    yield "in", [_per_s(tenant.tokens_in_per_s) for tenant in tenants]
    yield "out", [_per_s(tenant.tokens_out_per_s) for tenant in tenants]
    yield "share", [show_percent(tenant.share) for tenant in tenants]
    yield "fair", [show_percent(tenant.fair_share) for tenant in tenants]
    for place, percent in enumerate(PERCENTS):
        yield f"TTFT p{percent}", [_seconds(tenant.ttft_s[place] if tenant.ttft_s else None) for tenant in tenants]


def _numbers(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(first, no_wrap=True)
    for title in others:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _seconds(value: float | None) -> str:
    return "beyond" if value is not None and math.isinf(value) else show_s(value)


def _per_s(value: float | None) -> str:
    return NONE if value is None else f"{show_number(value)}/s"


def _bar(share: float | None) -> Text:
    if share is None:
        return Text(NONE)
    full = round(min(max(share, 0.0), 1.0) * _BAR_CELLS)
    colour = "red" if share >= _NEARLY_FULL else "cyan"
    return Text.assemble(
        ("\N{BLACK SQUARE}" * full, colour), ("\N{MIDDLE DOT}" * (_BAR_CELLS - full), "dim"), f" {show_percent(share)}"
    )
