"""A forward in phases: what is computed between the attentions of two layers, and the attentions themselves.

Matrix products are bound by arithmetic, attention of decodes by memory. Cut in this way, two forwards can overlap: the
attention of one runs beside the products of the other (`engine.step.halves`). A single forward runs its phases in turn.
"""

from collections.abc import Callable, Generator
from typing import Protocol, runtime_checkable

from torch import Tensor

from tiercel.engine.forward.state import ForwardState


class AttentionCall:
    """The attention of one layer of one forward. Its operands stay referenced until its result is taken.

    So memory of the operands is not reused before the queue that computes the next phase has waited for the attention,
    and not kept longer than that.
    """

    def __init__(self, job: Callable[[], Tensor]) -> None:
        self._job: Callable[[], Tensor] | None = job
        self._result: Tensor | None = None

    def run(self) -> None:
        """Compute the attention."""
        assert self._job is not None
        self._result = self._job()

    def take(self) -> Tensor:
        """Return the result, and let go of it and of the operands."""
        result, self._result, self._job = self._result, None, None
        assert result is not None
        return result


Phases = Generator[AttentionCall, None, Tensor]
"""A forward that yields each layer's attention to be run before the generator goes on, and returns final states."""


@runtime_checkable
class PhasedModel(Protocol):
    """A model that computes forwards in phases."""

    def phases(self, tokens: Tensor, kv: Tensor, state: ForwardState) -> Phases:
        """Compute what `Model.forward` computes. Shapes: see there."""
        ...


def run_in_turn(phases: Phases) -> Tensor:
    """Run a forward whose attention is computed between its other phases. Shapes: returns [T, hidden]."""
    while True:
        try:
            call = next(phases)
        except StopIteration as end:
            return end.value
        call.run()
