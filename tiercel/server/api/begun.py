"""A generation that has been submitted and has no answer yet."""

from dataclasses import dataclass

from tiercel.server.api.delta_encoder import ReplyShape
from tiercel.server.api.hold import Hold
from tiercel.server.api.stream import FailureNote, StreamRules
from tiercel.server.client.generation import Generation


@dataclass(frozen=True, slots=True)
class BegunAnswer:
    """A generation that has been submitted, and what its answer needs."""

    shape: ReplyShape
    generation: Generation
    room: Hold
    rules: StreamRules
    note: FailureNote
    is_streamed: bool
    kept: int | None  # number of choices of each prompt in the answer; None = all
    num_choices: int  # that are computed of each prompt
