"""The place of every sequence of a front, by what the engines tell: their keys, their speed and whom they served."""

import random
from collections.abc import Callable, Iterable, Mapping

from tiercel.fleet.balance import FleetAccount
from tiercel.fleet.moves import Moves, SequenceMove
from tiercel.fleet.prefix_index import PrefixIndex
from tiercel.fleet.router import PromptWork, Router
from tiercel.values.ids import EngineId, KeyHead, SeqId, TenantId
from tiercel.values.rates import EngineSpeed
from tiercel.values.tenant import Tenants

WEIGHTS_S = 0.25
"""The least time between two looks at the service of tenants, as engines report it."""

_SAME = 0.02  # weights that differ by less are not sent again


class Placement:
    """The router of a front, and the account of its tenants over all engines.

    Error: tenants that only other fronts serve count as working at an engine while its news name them.
    """

    def __init__(self, work_of: Callable[[SeqId], PromptWork], draw: random.Random) -> None:
        """`work_of`: see `Moves`; `draw` breaks ties."""
        self._index = PrefixIndex()
        self._router = Router(self._index, draw, has_late_news=True)
        self._account = FleetAccount()
        self._served_ms: dict[EngineId, dict[TenantId, float]] = {}  # since the engine joined
        self._served: dict[EngineId, frozenset[TenantId]] = {}  # tenants in the last news of an engine
        self._sent: dict[EngineId, dict[TenantId, float]] = {}  # weights that the engines use
        self._weighed_s = float("-inf")
        self.moves = Moves(self._router, work_of)

    @property
    def num_engines(self) -> int:
        """Number of engines that have joined."""
        return len(self._sent)

    def work_ms(self, engine: EngineId) -> float:
        """Return the unfinished work of this front at an engine, in predicted milliseconds of its device."""
        return self._router.work_ms(engine)

    def set_tenants(self, tenants: Tenants) -> None:
        """Use the weights of these tenants."""
        weights = {share.name: share.weight for share in tenants.tenants}
        self._router.set_weights(weights)
        self._account.set_weights(weights)
        self._account.forget_idle()
        for sent in self._sent.values():
            sent.clear()  # the engines begin with the new weights

    def join(self, engine: EngineId, speed: EngineSpeed) -> list[SequenceMove]:
        """Add an engine; see `Moves.join`. Its keys come with its news."""
        self._account.join(engine)
        self._served_ms[engine], self._served[engine], self._sent[engine] = {}, frozenset(), {}
        return self.moves.join(engine, speed)

    def lose(self, engine: EngineId) -> list[SequenceMove]:
        """Remove an engine; see `Moves.lose`."""
        self._account.leave(engine)
        for book in (self._served_ms, self._served, self._sent):
            book.pop(engine, None)
        return self.moves.lose(engine)

    def close(self, engine: EngineId) -> None:
        """Choose an engine no more; what it has stays there. Errors: KeyError if it has not joined."""
        self._router.close(engine)

    def take_news(
        self,
        engine: EngineId,
        stored: Iterable[KeyHead],
        dropped: Iterable[KeyHead],
        served_ms: Mapping[TenantId, float],
    ) -> None:
        """Note keys that an engine has stored and dropped, and the service of tenants there since its last news."""
        self._index.drop(engine, dropped)
        self._index.store(engine, stored)
        self._router.note_news(engine)
        totals_ms = self._served_ms[engine]
        for tenant, ms in served_ms.items():
            totals_ms[tenant] = totals_ms.get(tenant, 0.0) + ms
        self._served[engine] = frozenset(served_ms)
        self._account.note_service(engine, {tenant: totals_ms[tenant] for tenant in served_ms})

    def weigh(self, now_s: float) -> dict[EngineId, dict[TenantId, float]]:
        """Return the weights that engines are to be told, at most every `WEIGHTS_S`.

        With one engine these are the configured weights: what an engine was told before must not stay.
        """
        if now_s - self._weighed_s < WEIGHTS_S:
            return {}
        self._weighed_s = now_s
        for engine in self._sent:
            self._account.note_work(engine, {*self._router.tenants_at(engine), *self._served[engine]})
        self._account.balance()
        due: dict[EngineId, dict[TenantId, float]] = {}
        for engine, sent in self._sent.items():
            weights = self._account.effective_weights(engine)
            if len(self._sent) == 1:
                weights = {tenant: self._account.weight(tenant) for tenant in weights}
            changed = {tenant: weight for tenant, weight in weights.items() if _differs(weight, sent.get(tenant))}
            if changed:
                sent.update(changed)
                due[engine] = changed
        return due


def _differs(weight: float, sent: float | None) -> bool:
    return sent is None or abs(weight - sent) > _SAME * sent
