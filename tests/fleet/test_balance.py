"""The fleet's account: service is conserved, idle time is not saved up, and no tenant starves on random fleets."""

import math
import random

import pytest

from tests.seeds import fast_and_slow, fresh_seeds
from tiercel.fleet.balance import LEAD_S, MAX_LEAD_S, FleetAccount
from tiercel.values.errors import InvariantError
from tiercel.values.ids import EngineId, TenantId

A, B, C = TenantId("a"), TenantId("b"), TenantId("c")
SEEDS = fast_and_slow([*range(6), *fresh_seeds(2)], range(6, 60))


class FluidFleet:
    """Engines that share their time exactly by the weights of the tenants that have work there."""

    def __init__(
        self, account: FleetAccount, places: dict[EngineId, tuple[TenantId, ...]], every_s: float = 0.1
    ) -> None:
        self.account = account
        self.places = places
        self.every_s = 0.25
        self.totals: dict[EngineId, dict[TenantId, float]] = {engine: {} for engine in places}
        self.is_weighted = True
        for engine in places:
            account.join(engine)

    def run(self, seconds: float) -> dict[TenantId, float]:
        """Return the service of each tenant in this time, in seconds of a device."""
        before = dict(self.account.served_ms)
        for engine, tenants in self.places.items():
            self.account.note_work(engine, tenants)
        for _ in range(round(seconds / self.every_s)):
            self.account.balance()
            for engine, tenants in self.places.items():
                weights = self.account.effective_weights(engine) if self.is_weighted else {}
                parts = {tenant: weights.get(tenant, self.account.weight(tenant)) for tenant in tenants}
                for tenant, part in parts.items():
                    totals = self.totals[engine]
                    totals[tenant] = totals.get(tenant, 0.0) + 1e3 * self.every_s * part / sum(parts.values())
                self.account.note_service(engine, self.totals[engine])
        after = self.account.served_ms
        return {tenant: (ms - before.get(tenant, 0.0)) / 1e3 for tenant, ms in after.items()}


@pytest.mark.parametrize("engines", [4, 64])
def test_a_tenant_that_is_bound_to_one_engine_gets_its_share_of_the_fleet(engines: int) -> None:
    """As many tenants as two for each engine: the share of the bound one is half of its engine."""
    others = tuple(TenantId(f"t{number}") for number in range(2 * engines - 1))
    places = {EngineId(number): (*others, B) if number == 0 else others for number in range(engines)}
    fleet = FluidFleet(FleetAccount(), places)
    fleet.run(5.0)
    assert fleet.run(5.0)[B] == pytest.approx(0.5 * 5.0, rel=0.1)
    unweighted = FluidFleet(FleetAccount(), places)
    unweighted.is_weighted = False
    unweighted.run(5.0)
    assert unweighted.run(5.0)[B] < 0.3 * 5.0


def test_a_claim_that_cannot_be_met_does_not_grow() -> None:
    """Two tenants, four engines: the bound one gets its engine, and yields to the other soon when both are bound."""
    engines = [EngineId(number) for number in range(4)]
    places = {engine: ((A, B) if engine == 0 else (A,)) for engine in engines}
    fleet = FluidFleet(FleetAccount(), places)
    fleet.run(5.0)
    assert fleet.run(60.0)[B] > 0.99 * 60.0
    fleet.places = {engine: (A, B) for engine in engines}
    fleet.run(3.0)
    assert fleet.run(3.0)[A] == pytest.approx(6.0, rel=0.1)


def test_idle_time_is_not_saved_up() -> None:
    engines = [EngineId(number) for number in range(2)]
    fleet = FluidFleet(FleetAccount(), dict.fromkeys(engines, (A, C)))
    fleet.run(100.0)
    fleet.places = dict.fromkeys(engines, (A, B, C))
    served = fleet.run(10.0)
    assert served[B] == pytest.approx(served[A], rel=0.05)


def test_weights_are_those_of_the_operator_while_all_are_even() -> None:
    account = FleetAccount()
    account.set_weights({A: 3.0})
    fleet = FluidFleet(account, {EngineId(number): (A, B) for number in range(3)})
    served = fleet.run(20.0)
    assert served[A] == pytest.approx(3 * served[B])
    assert account.effective_weights() == pytest.approx({A: 3.0, B: 1.0})


def test_a_tenant_that_cannot_have_its_share_has_the_largest_factor() -> None:
    account = FleetAccount()
    for number in range(64):
        account.join(EngineId(number))
        account.note_work(EngineId(number), (A, B) if number == 0 else (A,))
    for _ in range(20):
        account.balance()
    assert account.effective_weights() == pytest.approx({A: 1 / 16, B: 16.0})


def test_a_lead_and_its_effect_are_limited() -> None:
    account = FleetAccount()
    for engine in (EngineId(0), EngineId(1)):
        account.join(engine)
        account.note_work(engine, (A, B))
    account.note_service(EngineId(0), {A: 1e9})
    ratio = math.exp(MAX_LEAD_S / LEAD_S)
    weights = account.effective_weights()
    assert weights[B] / weights[A] == pytest.approx(ratio)
    assert account.lead_s(A) < 3.0


def test_an_engine_gets_the_weights_of_the_tenants_that_have_work_there() -> None:
    account = FleetAccount()
    for engine, tenants in ((EngineId(0), (A, B)), (EngineId(1), (A,))):
        account.join(engine)
        account.note_work(engine, tenants)
    assert account.effective_weights(EngineId(1)).keys() == {A}
    account.leave(EngineId(0))
    assert account.effective_weights().keys() == {A}
    assert account.effective_weights(EngineId(0)) == {}


def test_wrong_limits_and_weights_are_refused() -> None:
    with pytest.raises(InvariantError, match=r"fleet_account\.limits"):
        FleetAccount(lead_s=0.0)
    with pytest.raises(InvariantError, match=r"fleet_account\.weight"):
        FleetAccount().set_weights({A: 0.0})


@pytest.mark.parametrize("seed", SEEDS)
def test_service_is_conserved(seed: int) -> None:
    """Engines join, leave and restart, reports are lost: the sum over tenants is what the engines have counted."""
    rng, account = random.Random(seed), FleetAccount()
    totals: dict[EngineId, dict[TenantId, float]] = {}
    reported: dict[EngineId, dict[TenantId, float]] = {}
    for number in range(400):
        engine = rng.choice(list(totals) or [EngineId(-1)])
        match rng.randrange(8):
            case 0:
                totals[EngineId(number)], reported[EngineId(number)] = {}, {}
                account.join(EngineId(number))
            case 1 if rng.random() < 0.5 and totals:
                account.leave(engine)
                del totals[engine]
            case 2:
                account.note_work(engine, rng.sample((A, B, C), rng.randrange(4)))
            case _ if engine in totals:
                tenant = rng.choice((A, B, C))
                totals[engine][tenant] = totals[engine].get(tenant, 0.0) + rng.uniform(-1.0, 100.0)
                if rng.random() < 0.7:  # or the report is lost
                    account.note_service(engine, totals[engine])
                    reported[engine] = dict(totals[engine])
            case _:
                account.note_service(engine, {A: 1.0})  # late: ignored
        weights = account.effective_weights()
        assert all(1 / 16 <= weight <= 16 for weight in weights.values())
    expected = sum(sum(counters.values()) for counters in reported.values())
    assert sum(account.served_ms.values()) == pytest.approx(expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_tenant_starves(seed: int) -> None:
    """On random fleets each tenant gets at least 0.8 of the smaller of its share and of what 1/17 of each of its
    engines gives."""
    rng = random.Random(seed)
    engines = [EngineId(number) for number in range(rng.randint(1, 12))]
    tenants = [TenantId(f"t{number}") for number in range(rng.randint(2, 8))]
    account = FleetAccount()
    account.set_weights({tenant: rng.choice((0.5, 1.0, 2.0)) for tenant in tenants})
    homes = {tenant: rng.sample(engines, rng.randint(1, len(engines))) for tenant in tenants}
    places = {engine: tuple(one for one in tenants if engine in homes[one]) for engine in engines}
    fleet = FluidFleet(account, places)
    fleet.run(10.0)
    served = fleet.run(10.0)
    whole = sum(map(account.weight, tenants))
    for tenant in tenants:
        share = 10.0 * len(engines) * account.weight(tenant) / whole
        alone = sum(
            10.0 * account.weight(tenant) / 16
            / (account.weight(tenant) / 16 + 16 * sum(account.weight(one) for one in places[home] if one != tenant))
            for home in homes[tenant]
        )  # fmt: skip
        assert served[tenant] >= min(0.8 * share, alone * (1 - 1e-6))
    assert sum(served.values()) == pytest.approx(10.0 * sum(bool(names) for names in places.values()))
