"""Stop strings, found independently of the cuts between chunks."""

from collections.abc import Sequence

from msgspec import Struct


class TextRules(Struct, frozen=True, kw_only=True):
    """The rules by which tokens become the text that the client sees."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    visible_texts: frozenset[str] = frozenset()  # special tokens with these texts are shown all the same
    min_tokens: int = 0


class StopStep(Struct, frozen=True):
    """Text that may be shown, and the stop string that ended it, if any."""

    text: str
    found: str | None = None


class StopScanner:
    """Finds the stop string that is complete first. Holds back text that may be the start of a stop string.

    The result does not depend on how the text was cut into chunks.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""

    @property
    def is_holding(self) -> bool:
        """Whether text is held back."""
        return bool(self._held)

    def feed(self, text: str, *, may_stop: bool = True) -> StopStep:
        """Take the next text. With `may_stop` false (before `min_tokens`) stop strings in it are ignored."""
        if not self._stops:
            return StopStep(text)
        if not may_stop:
            shown, self._held = self._held + text, ""
            return StopStep(shown)
        text = self._held + text
        found = self._first(text)
        if found is not None:
            start, stop = found
            self._held = ""
            return StopStep(text[: start + len(stop)] if self._include_stop else text[:start], stop)
        keep = self._prefix_length(text)
        self._held = text[len(text) - keep :]
        return StopStep(text[: len(text) - keep])

    def flush(self) -> str:
        """Return the text held back at the end, where no stop string was completed."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        """Return start and text of the stop string with the earliest end; among equals the longest."""
        hits = [(text.find(stop), stop) for stop in self._stops]
        ends = [(start + len(stop), start, stop) for start, stop in hits if start >= 0]
        if not ends:
            return None
        _, start, stop = min(ends)
        return start, stop

    def _prefix_length(self, text: str) -> int:
        """Return the number of characters at the end of the text that may be the start of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
