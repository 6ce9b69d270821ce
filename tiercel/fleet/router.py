"""The choice of an engine for a sequence: the least predicted time to its first token, within the tenant's share."""

import random
from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct

from tiercel.fleet.engine_load import EngineLoad
from tiercel.fleet.prefix_index import PrefixIndex
from tiercel.values.block_key import PromptHeads
from tiercel.values.errors import InvariantError
from tiercel.values.ids import EngineId, KeyHead, SeqId, TenantId
from tiercel.values.rates import EngineSpeed

SHARE_QUANTUM_MS = 2000.0
"""The unfinished work of a tenant at one engine, beyond its mean over all engines, up to which it follows its prefix.

A larger quantum finds more prefixes; a smaller one spreads a tenant's load more evenly (the quantum of a worker in
D2LPM, arXiv 2501.14312, section 4.2).
"""

_FIRST_OUTPUTS = 128.0  # expected output tokens of a tenant of which no answer has ended
_OUTPUTS_ALPHA = 0.1  # weight of the newest answer in the mean length of a tenant's answers
_BEHIND = 1 / 16  # of all work of an engine counts, even where it is not ahead: it takes rows, blocks and step time
_TIE = 1.01  # predictions are not exact to 1 %, and fronts that do not know of each other must not choose alike


class PromptWork(Struct, frozen=True, kw_only=True):
    """A sequence that needs an engine, as far as the choice depends on it."""

    tenant: TenantId
    num_tokens: int  # of the prompt, and of outputs if it is resumed
    max_outputs: int  # tokens that it may still generate
    heads: PromptHeads = PromptHeads()  # see `block_key.prompt_heads`


class RouteChoice(Struct, frozen=True):
    """The engine for a sequence, and what is expected there."""

    engine: EngineId
    cached_tokens: int  # of the prompt, that the engine has or will have when it comes to the sequence
    first_token_ms: float  # predicted time to the first token


class _Underway:
    """A sequence that is at an engine."""

    __slots__ = ("decode_ms", "engine", "promised", "prompt_ms", "tenant")

    def __init__(self, engine: EngineId, tenant: TenantId, prompt_ms: float, decode_ms: float) -> None:
        self.engine = engine
        self.tenant = tenant
        self.prompt_ms = prompt_ms  # 0 from the first token on
        self.decode_ms = decode_ms
        self.promised: tuple[KeyHead, ...] = ()


class Router:
    """Chooses engines for sequences, and keeps the books that the choice depends on.

    `choose` has no effects; `begin`, `note_first_token` and `end` tell what became of a choice, and must be called for
    every sequence in that order (`note_first_token` may be left out). The index is fed by its owner: what the engines
    store and drop. The promises in it are made here.

    Cost of a choice: O(heads + engines); measured by `benchmarks/routing.py`.
    """

    def __init__(
        self,
        index: PrefixIndex,
        draw: random.Random,
        *,
        quantum_ms: float = SHARE_QUANTUM_MS,
        follows: bool = True,
        has_late_news: bool = False,
    ) -> None:
        """`draw` breaks ties. Without `follows` prefixes are ignored, for comparisons.

        `has_late_news`: engines announce keys some time after the first token. Until `note_news` they stay promised.
        """
        self.index = index
        self._draw = draw
        self._quantum_ms = quantum_ms
        self._follows = follows
        self._has_late_news = has_late_news
        self._unannounced: dict[EngineId, list[KeyHead]] = {}  # promised heads of prompts that are computed
        self._loads: dict[EngineId, EngineLoad] = {}
        self._closed: set[EngineId] = set()  # engines that get no more sequences
        self._underway: dict[SeqId, _Underway] = {}
        self._weights: Mapping[TenantId, float] = {}
        self._ms_by_tenant: dict[TenantId, float] = {}  # unfinished work over all engines
        self._outputs_by_tenant: dict[TenantId, float] = {}  # mean length of answers, in tokens

    @property
    def engines(self) -> Collection[EngineId]:
        """The engines that have joined."""
        return self._loads.keys()

    @property
    def num_underway(self) -> int:
        """Number of sequences at engines."""
        return len(self._underway)

    def engine_of(self, seq: SeqId) -> EngineId | None:
        """Return the engine that a sequence is at; None if it is at none."""
        underway = self._underway.get(seq)
        return None if underway is None else underway.engine

    def work_ms(self, engine: EngineId, tenant: TenantId | None = None) -> float:
        """Return the unfinished work at an engine, of one tenant or of all. Errors: KeyError if it has not joined."""
        load = self._loads[engine]
        return load.total_ms if tenant is None else load.of(tenant)

    def tenants_at(self, engine: EngineId) -> Collection[TenantId]:
        """Return the tenants with unfinished work at an engine. Errors: KeyError if it has not joined."""
        return self._loads[engine].tenants

    def sequence_ms(self, seq: SeqId) -> float:
        """Return the unfinished work of a sequence; 0 if it is at no engine."""
        underway = self._underway.get(seq)
        return 0.0 if underway is None else underway.prompt_ms + underway.decode_ms

    def sequences_of(self, engine: EngineId) -> list[SeqId]:
        """Return the sequences at an engine in the order of their ids. Cost: O(all sequences)."""
        return sorted(seq for seq, underway in self._underway.items() if underway.engine == engine)

    # ---- engines

    def join(self, engine: EngineId, speed: EngineSpeed, heads: Iterable[KeyHead] = ()) -> None:
        """Add an engine without work, with everything that it has cached. Errors: InvariantError if it is there."""
        self.index.join(engine, heads)
        self._loads[engine] = EngineLoad(speed)

    def close(self, engine: EngineId) -> None:
        """Choose the engine no more; it goes on with what it has. Errors: KeyError if it has not joined."""
        if engine not in self._loads:
            raise KeyError(engine)
        self._closed.add(engine)

    def leave(self, engine: EngineId) -> list[SeqId]:
        """Remove an engine and its work. Return its sequences, which need another one, in the order of their ids."""
        left = self.sequences_of(engine)
        for seq in left:
            self._remove(seq)
        self.index.leave(engine)
        self._unannounced.pop(engine, None)
        self._loads.pop(engine, None)
        self._closed.discard(engine)
        return left

    # ---- tenants

    def set_weights(self, weights: Mapping[TenantId, float]) -> None:
        """Set the tenants' configured weights; 1 for others. They count for work that is added from now on.

        Errors: InvariantError if a weight is not a positive number.
        """
        if any(not 0 < weight < float("inf") for weight in weights.values()):
            raise InvariantError("router.weight")
        self._weights = dict(weights)
        self._outputs_by_tenant = {t: mean for t, mean in self._outputs_by_tenant.items() if t in self._weights}

    # ---- sequences

    def choose(self, work: PromptWork, among: Collection[EngineId] | None = None) -> RouteChoice | None:
        """Return the engine with the least predicted time to the first token; None if there is none to choose.

        That time is the work ahead of the tenant plus the prompt tokens that are not cached. Cached tokens count only
        where the tenant's unfinished work is within its share: its mean over all engines plus the quantum. Times within
        1 % are equal, and one of them is drawn. `among`: the engines to choose from, if not all.
        """
        depth_by_engine = self.index.find(work.heads.heads) if self._follows and work.heads.heads else {}
        tenant, tokens = work.tenant, work.num_tokens
        weight = self._weights.get(tenant, 1.0)
        most_ms = self._quantum_ms + self._ms_by_tenant.get(tenant, 0.0) / max(len(self._loads), 1)
        found: list[tuple[float, RouteChoice]] = []
        least = float("inf")
        for engine in self._loads if among is None else among:
            load = self._loads.get(engine)
            if load is None or engine in self._closed:
                continue
            depth = depth_by_engine.get(engine, 0)
            # A last token is computed in any case.
            cached = min(work.heads.ends[depth - 1], tokens - 1) if depth else 0
            prompt_ms = load.speed.prompt_ms(cached, tokens)
            ahead_ms = load.ahead_ms(tenant, weight, prompt_ms)
            cost_ms = ahead_ms + prompt_ms + _BEHIND * load.total_ms
            if cached and load.of(tenant) > most_ms:
                cost_ms += load.speed.prompt_ms(0, cached)
            if cost_ms <= least * _TIE:
                least = min(least, cost_ms)
                found.append((cost_ms, RouteChoice(engine, cached, ahead_ms + prompt_ms)))
        ties = [choice for cost_ms, choice in found if cost_ms <= least * _TIE]
        return self._draw.choice(ties) if ties else None

    def begin(self, seq: SeqId, work: PromptWork, choice: RouteChoice) -> None:
        """Note that a sequence was sent to the engine of a choice.

        Its work counts there, and the keys of its prompt count as promised. Errors: InvariantError if the sequence is
        at an engine already; KeyError if the engine has left.
        """
        if seq in self._underway:
            raise InvariantError("router.twice", seq=seq)
        load = self._loads[choice.engine]
        expected = min(self._outputs_by_tenant.get(work.tenant, _FIRST_OUTPUTS), work.max_outputs)
        underway = _Underway(
            choice.engine,
            work.tenant,
            load.speed.prompt_ms(choice.cached_tokens, work.num_tokens),
            load.speed.decode_ms * expected,
        )
        underway.promised = self.index.promise(choice.engine, work.heads.heads)
        self._underway[seq] = underway
        self._add(underway, underway.prompt_ms + underway.decode_ms)

    def note_first_token(self, seq: SeqId) -> None:
        """Note that the prompt of a sequence is computed: the engine has announced its keys, or will in its news."""
        underway = self._underway.get(seq)
        if underway is not None:
            self._end_prompt(underway)

    def note_news(self, engine: EngineId) -> None:
        """Note that an engine has announced the keys of all prompts that it has computed so far."""
        self.index.retract(engine, self._unannounced.pop(engine, ()))

    def end(self, seq: SeqId, num_outputs: int | None = None) -> None:
        """Note that a sequence has ended or is to leave its engine; unknown ones are ignored.

        `num_outputs`: the length of the answer in tokens; None: it was not completed, and tells nothing.
        """
        underway = self._underway.get(seq)
        if underway is None:
            return
        if num_outputs is not None:
            mean = self._outputs_by_tenant.get(underway.tenant, float(num_outputs))
            self._outputs_by_tenant[underway.tenant] = mean + _OUTPUTS_ALPHA * (num_outputs - mean)
        self._remove(seq)

    # ---- inside

    def _remove(self, seq: SeqId) -> None:
        underway = self._underway.pop(seq)
        self._end_prompt(underway)
        self._add(underway, -underway.decode_ms)

    def _end_prompt(self, underway: _Underway) -> None:
        self._add(underway, -underway.prompt_ms)
        underway.prompt_ms = 0.0
        if self._has_late_news:
            self._unannounced.setdefault(underway.engine, []).extend(underway.promised)
        else:
            self.index.retract(underway.engine, underway.promised)
        underway.promised = ()

    def _add(self, underway: _Underway, ms: float) -> None:
        tenant = underway.tenant
        self._loads[underway.engine].add(tenant, self._weights.get(tenant, 1.0), ms)
        total_ms = self._ms_by_tenant.get(tenant, 0.0) + ms
        if total_ms > 1e-6:  # less is the rounding of floats
            self._ms_by_tenant[tenant] = total_ms
        else:
            self._ms_by_tenant.pop(tenant, None)
