"""The gauges of all engines of a front as those of one engine."""

from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from tiercel.server.links.link import EngineLink
from tiercel.values.outcome import (
    DiskState,
    ExpertGauges,
    FairGauges,
    Gauges,
    GrammarGauges,
    PreemptionCount,
    RouteGauges,
    SwitchGauges,
    TenantBlocks,
    TenantGauges,
    TierGauges,
)

_LEVELS: Final = (
    "num_running",
    "num_waiting",
    "num_preempted",
    "blocks_total",
    "blocks_used",
    "blocks_cached",
    "threads",
)
"""Gauges that an engine without work has no part in; all other numbers count since the start."""

_TOTALS: Final = tuple(
    field.name
    for field in msgspec.structs.fields(Gauges)
    if field.type is int and field.name not in _LEVELS and field.name != "step_tokens"
)
_WORST_DISK: Final = (DiskState.OFF, DiskState.READ_ONLY, DiskState.ON, DiskState.NONE)

G = TypeVar("G", TierGauges, RouteGauges, SwitchGauges, TenantGauges)
S = TypeVar("S", bound=Struct)


class FleetGauges:
    """Adds up the gauges of the engines. Counters of engines that were lost stay in the sums."""

    def __init__(self) -> None:
        self._past = Gauges()  # of engines that were lost: totals only
        self._details = Gauges()  # the parts that only some reports have, summed

    def retire(self, link: EngineLink) -> None:
        """Keep the totals of an engine that was lost."""
        self._past = _sum_of((self._past, _totals_of(link.gauges)))
        link.gauges = Gauges()

    def take(self, link: EngineLink, gauges: Gauges, links: Sequence[EngineLink]) -> Gauges:
        """Note the gauges of an engine's step, and return the sum over all engines. `step_tokens` is this step's."""
        has_details = bool(gauges.tiers or gauges.fair)
        link.gauges = gauges.after(link.gauges)
        everyone = [one.gauges for one in links]
        if has_details:
            self._details = _details_of([self._past, *everyone])
        details = self._details
        return replace(
            _sum_of([self._past, *everyone]),
            step_tokens=gauges.step_tokens,
            tiers=details.tiers,
            routes=details.routes,
            sequences=details.sequences,
            fair=details.fair,
            preemptions_by_reason=details.preemptions_by_reason,
            switches=details.switches,
            grammars=details.grammars,
            disk_state=details.disk_state,
        )


def _sum_of(parts: Iterable[Gauges]) -> Gauges:
    """Return the sums of the numbers, without the details."""
    totals = dict.fromkeys((*_LEVELS, *_TOTALS), 0)
    for part in parts:
        for name in totals:
            totals[name] += getattr(part, name)
    return replace(Gauges(), **totals)


def _totals_of(gauges: Gauges) -> Gauges:
    return replace(Gauges(), **{name: getattr(gauges, name) for name in _TOTALS})


def _details_of(parts: Sequence[Gauges]) -> Gauges:
    reasons: dict[str, int] = {}
    for part in parts:
        for reason, count in part.preemptions_by_reason.items():
            reasons[reason] = reasons.get(reason, 0) + count
    fairs = [part.fair for part in parts if part.fair is not None]
    states = {part.disk_state for part in parts}
    return Gauges(
        tiers=tuple(_tier(group) for group in _grouped((tier for part in parts for tier in part.tiers), "tier")),
        routes=tuple(_added(group) for group in _grouped((route for part in parts for route in part.routes), "route")),
        sequences=tuple(one for part in parts for one in part.sequences),
        fair=_fair(fairs) if fairs else None,
        preemptions_by_reason=reasons,  # type: ignore[arg-type]
        switches=tuple(_added(group) for group in _grouped((one for part in parts for one in part.switches), "mode")),
        grammars=_added([GrammarGauges(), *(part.grammars for part in parts)]),
        experts=_added([ExpertGauges(), *(part.experts for part in parts)]),
        disk_state=next(state for state in _WORST_DISK if state in states),
    )


def _grouped(gauges: Iterable[G], name: str) -> list[list[G]]:
    groups: dict[object, list[G]] = {}
    for one in gauges:
        groups.setdefault(getattr(one, name), []).append(one)
    return list(groups.values())


def _added(group: Sequence[S]) -> S:
    """Return the first of a group with the sums of all its numbers."""
    names = [field.name for field in msgspec.structs.fields(group[0]) if field.type in (int, float)]
    return replace(group[0], **{name: sum(getattr(one, name) for one in group) for name in names})


def _tier(group: Sequence[TierGauges]) -> TierGauges:
    blocks: dict[str, list[TenantBlocks]] = {}
    for one in (tenant for tier in group for tenant in tier.tenants):
        blocks.setdefault(one.tenant, []).append(one)
    tenants = [
        replace(some[0], used=sum(t.used for t in some), cached=sum(t.cached for t in some)) for some in blocks.values()
    ]
    return replace(
        _added(group),
        block_bytes=group[0].block_bytes,
        mean_run_blocks=sum(tier.mean_run_blocks for tier in group) / len(group),
        tenants=tuple(sorted(tenants, key=lambda one: -one.used)),
    )


def _fair(fairs: Sequence[FairGauges]) -> FairGauges:
    """Return the worst fairness of any engine, and the tenants' service over all of them."""
    tenants: list[TenantGauges] = []
    for group in _grouped((tenant for fair in fairs for tenant in fair.tenants), "tenant"):
        counts: dict[tuple[str, str], PreemptionCount] = {}
        for one in (count for tenant in group for count in tenant.preemptions):
            before = counts.get((one.reason, one.mode))
            counts[one.reason, one.mode] = one if before is None else replace(one, count=one.count + before.count)
        starving_s = max(tenant.starving_s for tenant in group)
        tenants.append(replace(_added(group), starving_s=starving_s, preemptions=tuple(counts.values())))
    return FairGauges(
        competing=max(fair.competing for fair in fairs),
        jain=min((fair.jain for fair in fairs if fair.jain is not None), default=None),
        gap_s=max((fair.gap_s for fair in fairs if fair.gap_s is not None), default=None),
        tenants=tuple(tenants),
    )
