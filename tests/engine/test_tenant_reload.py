"""A reload of many tenants, over several steps."""

from collections import Counter

from tiercel.engine.tenant_reload import TenantReload
from tiercel.simulation.simulator import SimSettings, Simulation
from tiercel.simulation.workload import PromptPart, SimRequest, Sources
from tiercel.values.ids import TenantId
from tiercel.values.tenant import Tenants, TenantShare

MANY = 600


def shares(band: int, weight: float) -> tuple[TenantShare, ...]:
    """Return shares in which only the first tenant has a band, and only the last a weight."""
    return tuple(
        TenantShare(
            name=TenantId(f"t{number}"), band=band if not number else 0, weight=weight if number == MANY - 1 else 1.0
        )
        for number in range(MANY)
    )


def test_a_reload_during_another_one_completes_both() -> None:
    simulation, sources = Simulation(SimSettings(policy="priority", max_num_seqs=1), shares(0, 1.0)), Sources()
    for _ in range(300):
        simulation.submit(SimRequest(0.0, TenantId("t0"), (PromptPart(sources.new(), 40),), 4))
    reload = TenantReload(simulation.book, simulation.cache)
    reload.start(Tenants(2, shares(1, 1.0)), 0.0)
    assert reload.go_on()
    assert reload.go_on()
    reload.start(Tenants(3, shares(1, 2.0)), 0.0)
    while reload.go_on():
        pass
    assert Counter(one.band for one in simulation.book.waiting.values()) == {1: 300}
