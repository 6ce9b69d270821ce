"""An engine in virtual time: the real loop, planner, policy and books; a machine and a mover that only take time."""

from collections.abc import Callable, Iterable

from msgspec import Struct

from tiercel.device.sim_mover import SimMover, SimRates
from tiercel.engine.loop import EngineLoop
from tiercel.kvcache.manager import CacheManager
from tiercel.kvcache.tiers import TierLimits
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.cost import StepCosts, StepTimes, linear_times
from tiercel.scheduler.policy import Policy, open_policy
from tiercel.scheduler.step_limits import StepLimits
from tiercel.scheduler.swap_choice import SwapChooser
from tiercel.settings.settings import PreemptionMode
from tiercel.simulation.http import HttpTimes
from tiercel.simulation.machine import CostMachine
from tiercel.simulation.tally import SimTally, WatchedPlanner
from tiercel.simulation.workload import SimRequest, prompt_bytes
from tiercel.values.clock import ManualClock
from tiercel.values.errors import InvariantError
from tiercel.values.ids import SeqId
from tiercel.values.rates import Rates
from tiercel.values.request import Request, SamplingParams
from tiercel.values.tenant import PolicyName, Tenants, TenantShare
from tiercel.values.tier import Route
from tiercel.wire.frames import Submit

FINGERPRINT = b"simulation"
"""The fingerprint of the model that all simulated engines serve."""

_TICK_S = 1e-3  # virtual time between steps while no next event has a known time
_MAX_STALLED_STEPS = 1_000_000  # steps in a row without progress after which the simulation fails


class SimSettings(Struct, frozen=True, kw_only=True):
    """The engine and its machine. Settings shared with `tiercel serve` have the same name and meaning."""

    times: StepTimes = linear_times()
    policy: PolicyName = "fair"
    blocks: int = 4096
    host_blocks: int = 0
    disk_blocks: int = 0
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 32_768
    long_prefill_token_threshold: int = 0
    max_long_partial_prefills: int = 0
    tbt_goal_ms: float = 0.0
    is_goal_elastic: bool = False  # as if the operator had not set the goal
    min_prefill_share: float = 0.3
    # As on a CPU: a step without decodes ends within the goal, too, and no step is launched before it has ended.
    yields: bool = False
    async_depth: int = 1
    preemption_mode: PreemptionMode = "auto"
    has_prefix_caching: bool = True
    patience_s: float = 2.0
    rates: SimRates = SimRates()
    noise: float = 0.0  # relative, of step times, up and down
    http: HttpTimes = HttpTimes()
    concurrency: int | None = None  # clients of a closed loop; None: requests are sent at their times
    seed: int = 0

    @property
    def longest_step_ms(self) -> float:
        """The time of a step with the most tokens, sequences and context."""
        context = min(self.blocks * self.block_size, self.max_num_seqs * self.max_model_len)
        prompts = self.max_num_batched_tokens
        return (1 + self.noise) * StepCosts(self.times).predict_ms(prompts, self.max_num_seqs, context)


PolicyMaker = Callable[[SimSettings, StepCosts], Policy]


def make_policy(settings: SimSettings, costs: StepCosts) -> Policy:
    """Return the policy as the engine opens it, with the quantum from the longest step of the table."""
    return open_policy(settings.policy, costs, step_ms=settings.longest_step_ms, patience_s=settings.patience_s)


class Simulation:
    """An engine to which requests are submitted and which is stepped. It uses virtual time only."""

    def __init__(
        self, settings: SimSettings, tenants: Iterable[TenantShare], *, open_with: PolicyMaker = make_policy
    ) -> None:
        self.settings = settings
        self.shares = tuple(tenants)
        self.clock = ManualClock()
        self.tally = SimTally(self.shares, self.clock)
        self.policy = open_with(settings, StepCosts(settings.times))
        self.book = SequenceBook(self.policy, settings.max_model_len, ())
        rates = simulated_rates(settings)
        self.cache = CacheManager(
            settings.blocks,
            settings.block_size,
            FINGERPRINT,
            has_prefix_caching=settings.has_prefix_caching,
            host_blocks=settings.host_blocks,
            disk_blocks=settings.disk_blocks,
            rates=lambda: rates,
            limits=TierLimits(always_loads=settings.preemption_mode == "swap"),
        )
        # A fair policy counts the service of tenants itself.
        owner = None if self.policy.name == "fair" else (lambda seq: self.book[seq].request.tenant)
        self.machine = CostMachine(settings.times, self.clock, noise=settings.noise, seed=settings.seed, owner=owner)
        self.mover = SimMover(self.machine, self.clock, has_host=settings.host_blocks > 0, rates=settings.rates)
        limits = StepLimits(
            settings.max_num_seqs,
            settings.max_num_batched_tokens,
            settings.long_prefill_token_threshold,
            settings.max_long_partial_prefills,
            tbt_goal_ms=settings.tbt_goal_ms,
            is_goal_elastic=settings.is_goal_elastic,
            min_prefill_share=settings.min_prefill_share,
            yield_ms=settings.tbt_goal_ms if settings.yields else 0.0,
            block_bytes=settings.rates.block_bytes,
        )
        chooser = SwapChooser(settings.preemption_mode, lambda: rates)
        self.planner = WatchedPlanner(self.book, limits, chooser, self.tally)
        self.loop = EngineLoop(
            self.book, self.cache, self.planner, self.machine, self.tally, self.clock, settings.async_depth, self.mover
        )
        everybody = Tenants(1, self.shares)
        self.policy.set_tenants(everybody, 0.0)
        self.cache.set_tenants(everybody)
        self._share_by_tenant = {share.name: share for share in self.shares}
        self._count = 0
        self._stalled = 0

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self.clock.now_s()

    def submit(self, request: SimRequest, seq: SeqId | None = None) -> SeqId:
        """Submit a request to the engine now; its age counts from `request.at_s`. Return its sequence id.

        `seq`: the id of the sequence, if a fleet draws the ids; None: the next one.
        """
        if seq is None:
            self._count += 1
            seq = SeqId(self._count)
        share = self._share_by_tenant.get(request.tenant) or TenantShare(name=request.tenant)
        self.tally.submit(seq, request.tenant)
        submitted = Request(
            id=seq,
            prompt=prompt_bytes(request.prompt),
            params=SamplingParams(temperature=0.0, max_tokens=request.outputs, ignore_eos=True),
            arrival_s=request.at_s,
            tenant=request.tenant,
            band=share.band,
            scope=sharing_scope(share),
        )
        self.loop.take([Submit(submitted)])
        return seq

    def step(self, until_s: float = float("inf")) -> bool:
        """Make one step of the loop, or let time pass until a transfer lands, at most to `until_s`.

        Return False if there is nothing to do before `until_s`. Errors: InvariantError if the remaining work stalls.
        """
        if self.loop.step():
            self._stalled = 0
            return True
        due_s = self.mover.next_landing_s
        if due_s is None and self.loop.is_idle:
            return False
        self._stalled += 1
        if self._stalled > _MAX_STALLED_STEPS:
            raise InvariantError("simulation.stalled", sequences=len(self.book))
        now_s = self.now_s
        # Ageing and patience may change the plan with time alone.
        wake_s = now_s + _TICK_S if due_s is None else max(due_s, now_s) + 1e-9
        if wake_s > until_s:
            return False
        self.clock.advance(wake_s - now_s)
        return True

    def pass_time(self, until_s: float) -> None:
        """Advance the clock to `until_s`."""
        self.clock.advance(max(0.0, until_s - self.now_s))


def sharing_scope(share: TenantShare) -> bytes:
    """Return the scope in which the requests of a tenant share cached blocks: its group's, or its own."""
    return (f"group {share.group}" if share.group else f"tenant {share.name}").encode()


def simulated_rates(settings: SimSettings) -> Rates:
    """Return the rates that `tiercel calibrate` would measure on such a machine."""
    rates, costs = settings.rates, StepCosts(settings.times)
    speeds: dict[Route, float] = {}
    if settings.host_blocks:
        speeds |= {Route.SPILL: rates.spill_bytes_per_s, Route.RESTORE: rates.restore_bytes_per_s}
    if settings.disk_blocks:
        speeds |= {Route.PERSIST: rates.disk_write_bytes_per_s, Route.PREFETCH: rates.disk_read_bytes_per_s}
    tokens, context = settings.max_num_batched_tokens, 8192
    token_s = costs.predict_ms(tokens, 0, 0) / 1e3 / tokens
    far_s = costs.predict_ms(tokens, 0, context) / 1e3 / tokens
    return Rates(
        bytes_per_s_by_route=speeds,
        prefill_token_s=token_s,
        prefill_context_s=max(0.0, far_s - token_s) / context,
        block_bytes=rates.block_bytes,
        block_size=settings.block_size,
    )
