"""How much of long prompts one step looks at, all sequences together."""

MAX_HASHES = 512
"""Blocks that a step hashes, about 0.6 ms: the first in the policy's order come first, the others in later steps."""

_MAX_LOOKS = 1024  # blocks that a step looks up one by one, about 2 ms
_MAX_PEEKS = 512  # blocks that a step hashes for prompts that have just come


class StepBudget:
    """The hashes and look-ups that the current step may still make, all sequences together.

    A new step begins when a sequence is looked at for the first time after a plan was drawn.
    """

    def __init__(self) -> None:
        self.hashes = MAX_HASHES
        self.looks = _MAX_LOOKS
        self.peeks = _MAX_PEEKS
        self.is_short = False  # a sequence has not got what it asked for
        self._is_drawn = False

    def begin(self) -> None:
        """A step begins, if none is under way."""
        if self._is_drawn:
            self.hashes, self.looks, self.peeks = MAX_HASHES, _MAX_LOOKS, _MAX_PEEKS
            self._is_drawn = self.is_short = False

    def draw(self) -> None:
        """The plan of the step is being drawn: whatever comes next is another step's."""
        self.begin()
        self._is_drawn = True

    def take_hashes(self, wanted: int) -> int:
        """Return how many of the wanted blocks may be hashed now."""
        taken = min(wanted, self.hashes)
        self.hashes -= taken
        self.is_short |= taken < wanted
        return taken

    def take_looks(self, wanted: int) -> int:
        """Return how many of the wanted blocks may be looked up now."""
        taken = min(wanted, self.looks)
        self.looks -= taken
        self.is_short |= taken < wanted
        return taken
