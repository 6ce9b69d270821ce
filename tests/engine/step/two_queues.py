"""A fork on the CPU that finds races: every operator is noted with its queue, and every access needs an order.

Operators compute at once, in the order in which they are queued, so results are those of queues without races. Whether
there are races is decided by vector clocks. An access to memory that the other queue has written (or a write to memory
that it has read) is a race unless the queues have met in between. Memory is reused like that of torch's CUDA allocator:
freed memory goes to the next allocation of the queue that allocated it, so all accesses to it must be ordered before.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MAIN, SIDE = 0, 1


class RaceError(AssertionError):
    """Two accesses to the same memory without an order."""


@dataclass
class Memory:
    """The last accesses to one storage: the time of each queue. 0 means none."""

    owner: int | None  # the queue that allocated it; None: it existed before
    written: list[int] = field(default_factory=lambda: [0, 0])
    read: list[int] = field(default_factory=lambda: [0, 0])


class TwoQueues(TorchDispatchMode):
    """The lane's queue and a side queue; implements `Fork`. Use it as a context around the jobs to check."""

    def __init__(self) -> None:
        super().__init__()
        self.meetings = 0
        self.aside_operators = 0
        self.beside_operators = 0  # of the main queue while the side queue has work
        self._now = MAIN
        self._clocks = [[0, 0], [0, 0]]  # by queue: the times of both that it has waited for
        self._is_side_busy = False
        self._memory: dict[int, Memory] = {}
        self._freed: list[Memory] = []

    def meet(self) -> None:
        self.meetings += 1
        self._is_side_busy = False
        both = [max(times) for times in zip(*self._clocks, strict=True)]
        self._clocks = [both.copy(), both.copy()]

    def aside(self, job: Callable[[], object]) -> None:
        self._now = SIDE
        try:
            job()
        finally:
            self._now = MAIN
        self._is_side_busy = True

    def assert_joined(self) -> None:
        """Check that the main queue has waited for all work of the side queue."""
        assert self._clocks[MAIN][SIDE] == self._clocks[SIDE][SIDE]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        aliases = [ret.alias_info for ret in func._schema.returns]
        if aliases and all(alias is not None and not alias.is_write for alias in aliases):
            return result  # a view
        self._clocks[self._now][self._now] += 1
        self.aside_operators += self._now == SIDE
        self.beside_operators += self._now == MAIN and self._is_side_busy
        written: set[int] = set()
        for name, value in [*zip(func._schema.arguments, args, strict=False)]:
            if name.alias_info is not None and name.alias_info.is_write:
                written |= {_key(tensor) for tensor in tree_leaves(value) if isinstance(tensor, Tensor)}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._access(tensor, func.name(), is_write=_key(tensor) in written)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._access(tensor, func.name(), is_write=True)
        return result

    def _access(self, tensor: Tensor, name: str, *, is_write: bool) -> None:
        memory = self._memory.get(_key(tensor))
        if memory is None:
            memory = self._open(tensor, is_new=is_write)
        other = 1 - self._now
        seen = self._clocks[self._now][other]
        if memory.written[other] > seen or (is_write and memory.read[other] > seen):
            raise RaceError(f"{name}: memory that the other queue still uses")
        (memory.written if is_write else memory.read)[self._now] = self._clocks[self._now][self._now]

    def _open(self, tensor: Tensor, *, is_new: bool) -> Memory:
        key, memory = _key(tensor), Memory(self._now if is_new else None)
        self._memory[key] = memory
        weakref.finalize(tensor.untyped_storage(), self._free, key)
        if is_new:
            for freed in [freed for freed in self._freed if freed.owner == self._now]:
                other = 1 - self._now
                if max(freed.written[other], freed.read[other]) > self._clocks[self._now][other]:
                    raise RaceError("an allocation gets memory that the other queue still uses")
                self._freed.remove(freed)
        return memory

    def _free(self, key: int) -> None:
        memory = self._memory.pop(key, None)
        if memory is not None and memory.owner is not None:
            self._freed.append(memory)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
