"""The budget of one step for looking up blocks of long prompts, for all sequences together."""

MAX_HASHES = 512
"""Blocks that a step hashes, about 0.6 ms. The sequences that come first in the policy's order are served first."""

MAX_BATCH = 1024
"""Blocks that are looked up at once, as long as a tier holds all of them."""

BLOCKS_PER_LOOK = 4
"""This many blocks of a batch cost as much as one block that is looked up alone."""

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
        """Begin a step, unless one is under way."""
        if self._is_drawn:
            self.hashes, self.looks, self.peeks = MAX_HASHES, _MAX_LOOKS, _MAX_PEEKS
            self._is_drawn = self.is_short = False

    def draw(self) -> None:
        """Note that the step's plan is being drawn: the next `begin` begins another step."""
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

    def take_peek(self) -> bool:
        """Return whether one more block of a new prompt may be hashed now."""
        if not self.peeks:
            return False
        self.peeks -= 1
        return True
