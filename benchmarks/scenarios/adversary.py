"""Tenants that try to get more than their share of a small engine, and the service gap that they reach."""

import random

from tiercel.scheduler.account import Account
from tiercel.scheduler.cost import linear_times
from tiercel.scheduler.fairness import TenantBook
from tiercel.simulation.gap import GapMeter
from tiercel.simulation.simulator import PolicyMaker, SimSettings, Simulation, make_policy
from tiercel.simulation.workload import PromptPart, SimRequest, Sources
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.tenant import TenantShare
from tiercel.wire.frames import Abort

MOODS = ("flood", "hog", "giant", "pulse", "shy", "echo", "trickle", "settle", "idle")
ALWAYS = ("flood", "hog", "giant")
"""Methods with requests that always wait."""

_TIMES = linear_times(base_ms=2.0, prefill_ms=0.2, decode_ms=1.0, context_ms=0.001)


class Schemer:
    """One tenant, which changes its method of getting more than its share."""

    def __init__(
        self, share: TenantShare, rng: random.Random, sources: Sources, moods: tuple[str, ...], first: str,
        first_s: float,
    ) -> None:  # fmt: skip
        self.share = share
        self._rng = rng
        self._sources = sources
        self._moods = moods
        self._mood = first or rng.choice(moods)
        self._until_s = first_s or rng.expovariate(1 / 8)
        self._leaving: list[tuple[float, SeqId]] = []

    def act(self, simulation: Simulation) -> None:
        """Submit requests by the current method."""
        rng, now_s = self._rng, simulation.now_s
        if self._leaving and self._leaving[0][0] <= now_s:
            simulation.loop.take([Abort((self._leaving.pop(0)[1],))])
        if now_s >= self._until_s:
            self._mood = rng.choice(self._moods)
            self._until_s = now_s + rng.expovariate(1 / 8)
        mine = sum(one.request.tenant == self.share.name for one in simulation.book.waiting.values())
        most = simulation.settings.blocks * simulation.settings.block_size
        match self._mood:
            case "flood":  # always small waiting requests
                for _ in range(mine, 3):
                    self._ask(simulation, rng.randint(1, 200), rng.randint(1, 10))
            case "hog":  # long use of rows
                for _ in range(mine, 2):
                    self._ask(simulation, rng.randint(1, 8), rng.randint(50, most // 2))
            case "giant":  # a request that fits only on an empty machine
                for _ in range(0 if mine else 2):
                    self._ask(simulation, most - 60, rng.randint(1, 50))
            case "pulse":  # a burst after a pause
                if not mine and rng.random() < 0.01:
                    for _ in range(rng.randint(1, 12)):
                        self._ask(simulation, rng.randint(1, 300), rng.randint(1, 100))
            case "shy":  # ends before the patience of others is over
                if not mine and not self._leaving:
                    seq = self._ask(simulation, most - 60, 10)
                    self._leaving.append((now_s + rng.uniform(0.01, 0.12), seq))
            case "echo":  # equal prompts: the others wait for the blocks of the first
                source = self._sources.new()
                for _ in range(mine, 3):
                    self._ask(simulation, 200, rng.randint(1, 20), source)
            case "settle":  # running requests, none waiting
                rows = simulation.settings.max_num_seqs
                if not mine and len(simulation.book.running) < rows - rows // 3:
                    self._ask(simulation, 1, rng.randint(50, most // 2))
            case "trickle":  # one at a time
                if not mine and rng.random() < 0.2:
                    self._ask(simulation, rng.randint(1, 20), rng.randint(1, 40))
            case _:
                pass

    def _ask(self, simulation: Simulation, prompt: int, outputs: int, source: int | None = None) -> SeqId:
        source = self._sources.new() if source is None else source
        return simulation.submit(SimRequest(simulation.now_s, self.share.name, (PromptPart(source, prompt),), outputs))


def widest_gap(seed: int, steps: int, open_with: PolicyMaker = make_policy) -> float:
    """Return the largest gap that the tenants of a seed reach, relative to the bound: above 1 the bound is broken."""
    rng = random.Random(seed)
    shares = [
        TenantShare(name=TenantId(f"t{number}"), weight=rng.choice([0.5, 1.0, 1.0, 2.0, 4.0]))
        for number in range(rng.randint(2, 5))
    ]
    settings = SimSettings(
        times=_TIMES,
        blocks=rng.choice([24, 64]),
        host_blocks=rng.choice([0, 64]),
        block_size=16,
        max_num_seqs=rng.choice([4, 8]),
        max_num_batched_tokens=rng.choice([16, 64]),
        tbt_goal_ms=rng.choice([0.0, 15.0]),
        async_depth=rng.choice([0, 1]),
        patience_s=rng.choice([0.1, 1.0]),
        noise=0.1,
        seed=seed,
    )
    simulation = Simulation(settings, shares, open_with=open_with)
    fair = simulation.policy.fair
    assert isinstance(fair, TenantBook)
    alone_s = rng.choice([0.0, 10.0])  # the first tenant is alone at first
    sources = Sources()
    schemers = [
        Schemer(
            share, rng, sources, ALWAYS if number < 2 else MOODS,
            ("idle" if number else "settle") if alone_s else "", alone_s,
        )
        for number, share in enumerate(shares)
    ]  # fmt: skip
    accounts = [Account(0, share.name) for share in shares]
    meter = GapMeter(fair, accounts, simulation.planner.preemptor.largest_price_ms)
    for number in range(steps):
        for schemer in schemers:
            schemer.act(simulation)
        meter.look()
        if not simulation.step(simulation.now_s + 0.01):
            simulation.pass_time(simulation.now_s + 0.01)
        meter.look()
        if number % 500 == 0:
            simulation.loop.check_integrity()
    gap_ms, bound_ms = meter.widest
    return gap_ms / bound_ms
