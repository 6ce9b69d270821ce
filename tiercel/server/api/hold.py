"""Something that is counted until it is released."""

from collections.abc import Callable
from types import TracebackType
from typing import Self


class Hold:
    """Memory, or parts of the store, that stay counted until `release`, or until the `with` block ends."""

    __slots__ = ("_release",)

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Count it no longer. A second call has no effect."""
        release, self._release = self._release, None
        if release is not None:
            release()
