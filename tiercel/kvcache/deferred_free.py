"""Slots whose free is deferred until the last launched step that touches them has committed."""

from array import array
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tiercel.kvcache.slot_index import SlotIndex, Slots, view
from tiercel.kvcache.slot_state import SlotState
from tiercel.values.ids import SlotId

_DEFERRED = int(SlotState.DEFERRED)


class DeferredFrees:
    """Unreferenced slots by the last launched step that touches them.

    The pool sets the state of a slot to DEFERRED when it adds the slot here. A slot that is hit before its step commits
    changes its state and stays listed; `settle` passes over it.
    """

    def __init__(self, states: npt.NDArray[np.uint8]) -> None:
        """`states` is the pool's view of its slots' states, which this book reads."""
        self.count = 0  # slots whose state is DEFERRED
        self.committed = 0  # last committed step
        self._last_steps = array("q", bytes(8 * len(states)))
        self.last_steps = view(self._last_steps)  # the last launched step that touches a slot, as of its release
        self._states = states
        self._parts_by_step: dict[int, list[SlotId | Slots]] = {}  # in order of release; many at once are one part

    def note_step(self, slot: int, last_step: int) -> int:
        """Note that launched steps up to `last_step` touch a slot. Return the last step that does."""
        last_step = self._last_steps[slot] = max(self._last_steps[slot], last_step)
        return last_step

    def note_step_many(self, index: SlotIndex, last_step: int) -> npt.NDArray[np.int64]:
        """Note that launched steps up to `last_step` touch these slots. Return the last step for each slot."""
        last_steps = np.maximum(index.read(self.last_steps), last_step)
        index.write(self.last_steps, last_steps)
        return last_steps

    def last_step(self, slot: int) -> int:
        """Return the last launched step that touches a slot, as of its release."""
        return self._last_steps[slot]

    def add(self, slot: SlotId, step: int) -> None:
        """Defer the free of a slot until a step has committed."""
        self._parts_by_step.setdefault(step, []).append(slot)
        self.count += 1

    def add_many(self, slots: Slots, steps: npt.NDArray[np.int64]) -> None:
        """Defer the free of these slots, in this order, each until its step has committed."""
        self.count += len(slots)
        is_one_step = bool((steps == steps[0]).all())
        for step in [int(steps[0])] if is_one_step else sorted(set(steps.tolist())):
            part = slots if is_one_step else slots[steps == step]
            self._parts_by_step.setdefault(step, []).append(part)

    def remove(self, count: int = 1) -> None:
        """Note that slots were hit before their step committed."""
        self.count -= count

    def settle(self, step: int) -> Iterator[SlotId | SlotIndex]:
        """Note that steps up to `step` have committed. Yield the slots that nothing touches any more, in order."""
        self.committed = step
        for launched in [launched for launched in self._parts_by_step if launched <= step]:
            for part in self._parts_by_step.pop(launched):
                # A slot that was hit meanwhile has another state; one released again is listed under a later step.
                if isinstance(part, np.ndarray):
                    index = SlotIndex(part)
                    is_settled = (index.read(self._states) == _DEFERRED) & (index.read(self.last_steps) <= step)
                    index = index.filter(is_settled)
                    self.count -= len(index)
                    yield index
                elif self._states[part] == _DEFERRED and self._last_steps[part] <= step:
                    self.count -= 1
                    yield part

    def slots_by_step(self) -> dict[int, list[int]]:
        """Return the listed slots by step, for tests."""
        return {
            step: [slot for part in parts for slot in (part.tolist() if isinstance(part, np.ndarray) else [part])]
            for step, parts in self._parts_by_step.items()
        }
