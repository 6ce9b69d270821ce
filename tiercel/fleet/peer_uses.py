"""The other fronts of a fleet: what they have allowed of the limits of tenants, and the share that is left here."""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from tiercel.values.ids import TenantId
from tiercel.values.limit_use import LimitUse

LEASE_S = 3.0
"""The time after its last message for which a front counts. Engines abort the sequences of a front whose connection has
ended; those of a front that is stopped run on for longer than this."""

_MEMORY_S = 120.0  # then every limit per minute has forgotten what a front that was away has allowed meanwhile
_PRIOR = 1.0  # requests that every front counts as asked for: one that was idle may allow something at once
_MAX_PEERS = 256  # fronts that are remembered; there are at most 64 at a time


class PeerCharge(Struct, frozen=True):
    """The part of a tenant's limits that another front has newly allowed."""

    requests: float = 0.0
    tokens: float = 0.0
    requests_left: float | None = None
    """The part that this front has left, if it was not heard before: no front has more than the one with the least."""

    tokens_left: float | None = None


class _Peer:
    """One front, by what it has told."""

    __slots__ = ("heard_s", "number", "total_by_tenant", "use_by_tenant")

    def __init__(self) -> None:
        self.heard_s = 0.0
        self.number = 0  # of its last message, counted from 1
        self.use_by_tenant: Mapping[TenantId, LimitUse] = {}  # in its last message
        self.total_by_tenant: dict[TenantId, LimitUse] = {}  # in the last message that named the tenant


class PeerUses:
    """The other fronts, as they last told. The time is given with each call."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._peers: dict[bytes, _Peer] = {}
        self._present: tuple[_Peer, ...] = ()

    @property
    def num_present(self) -> int:
        """Number of other fronts whose lease has not ended, as of the last `expire` or `take`."""
        return len(self._present)

    def take(
        self, front: bytes, number: int, uses: Mapping[TenantId, LimitUse], now_s: float
    ) -> dict[TenantId, PeerCharge]:
        """Note what a front tells, and return what is new since it last told.

        Messages are numbered by their front. One that comes twice, or after a later one, changes nothing.
        """
        peer = self._peers.get(front)
        is_new = peer is None
        if peer is None:
            if len(self._peers) >= _MAX_PEERS:
                del self._peers[min(self._peers, key=lambda other: self._peers[other].heard_s)]
            peer = self._peers[front] = _Peer()
        if number <= peer.number:
            return {}
        peer.heard_s, peer.number, peer.use_by_tenant = now_s, number, uses
        charges: dict[TenantId, PeerCharge] = {}
        for tenant, use in uses.items():
            before = peer.total_by_tenant.get(tenant)
            peer.total_by_tenant[tenant] = use
            if before is None and is_new:
                charges[tenant] = PeerCharge(requests_left=use.requests_left, tokens_left=use.tokens_left)
            elif before is None or before.life != use.life:
                charges[tenant] = PeerCharge(use.requests, use.tokens)
            elif (use.requests, use.tokens) != (before.requests, before.tokens):
                charges[tenant] = PeerCharge(use.requests - before.requests, use.tokens - before.tokens)
        self.expire(now_s)
        return charges

    def expire(self, now_s: float) -> None:
        """Count fronts whose lease has expired no more, and forget those that were silent for long."""
        for front in [front for front, peer in self._peers.items() if now_s - peer.heard_s > _MEMORY_S]:
            del self._peers[front]
        self._present = tuple(peer for peer in self._peers.values() if now_s - peer.heard_s <= self._lease_s)

    def num_open(self, tenant: TenantId) -> int:
        """Return the number of a tenant's unfinished sequences at the other fronts."""
        return sum(use.num_open for use in self._uses(tenant))

    def num_reserved(self, tenant: TenantId) -> int:
        """Return the number of sequences that the other fronts may add before they tell again."""
        return sum(use.num_reserved for use in self._uses(tenant))

    def share(self, tenant: TenantId, asked: float) -> float:
        """Return this front's share of what is left, from 0 to 1, when it was recently asked for `asked` requests.

        The shares of all fronts add up to 1 if all know the same.
        """
        own = _PRIOR + asked
        others = _PRIOR * len(self._present) + sum(use.asked for use in self._uses(tenant))
        return own / (own + others)

    def _uses(self, tenant: TenantId) -> Iterable[LimitUse]:
        return (use for peer in self._present if (use := peer.use_by_tenant.get(tenant)) is not None)
