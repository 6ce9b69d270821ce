"""A cache that tenants share by weight, without seeing each other's values."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from tiercel.values.ids import TenantId

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Entry(NamedTuple, Generic[V]):
    value: V
    num_bytes: int


class SharedCache(Generic[K, V]):
    """Values by tenant and key, up to a number of bytes in all.

    A value is found by the tenant that put it only, so the time of a request tells a tenant nothing about the others.
    Beyond the limit, the tenant that holds most for its weight loses the value that it used least recently. A tenant
    that holds less than its share of the limit by weight among the tenants with values therefore loses nothing.
    """

    def __init__(self, limit_bytes: int, weight_of: Callable[[TenantId], float] = lambda tenant: 1.0) -> None:
        self._limit_bytes = limit_bytes
        self._weight_of = weight_of
        self._values: dict[TenantId, OrderedDict[K, _Entry[V]]] = {}
        self._bytes: dict[TenantId, int] = {}
        self.held_bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._values.values()))

    def get(self, tenant: TenantId, key: K) -> V | None:
        """Return a value, which is now the tenant's most recently used one."""
        values = self._values.get(tenant)
        if values is None or key not in values:
            return None
        values.move_to_end(key)
        return values[key].value

    def put(self, tenant: TenantId, key: K, value: V, num_bytes: int) -> None:
        """Keep a value in place of an earlier one. A value that is larger than the limit is not kept.

        Cost: a look at each tenant for every value that is dropped.
        """
        self.pop(tenant, key)
        if num_bytes > self._limit_bytes:
            return
        self._values.setdefault(tenant, OrderedDict())[key] = _Entry(value, num_bytes)
        self._count(tenant, num_bytes)
        while self.held_bytes > self._limit_bytes:
            owner = max(self._bytes, key=lambda one: self._bytes[one] / self._weight_of(one))
            self.pop(owner, next(iter(self._values[owner])))

    def pop(self, tenant: TenantId, key: K) -> V | None:
        """Take a value out of the cache and return it; None if it is not there."""
        values = self._values.get(tenant)
        entry = None if values is None else values.pop(key, None)
        if entry is None:
            return None
        self._count(tenant, -entry.num_bytes)
        return entry.value

    def _count(self, tenant: TenantId, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        self._bytes[tenant] = self._bytes.get(tenant, 0) + num_bytes
        if not self._values[tenant]:  # tenants come and go
            del self._values[tenant], self._bytes[tenant]
