"""One parser of bytes from outside, as the fuzzer sees it, and the check of one input."""

import faulthandler
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tests.fuzz.mutator import mutate_bytes

HANG_S = 20  # no input of MAX_BYTES may take so long, even on a busy machine
MAX_GROWTH_BYTES = 256 << 20  # of the peak memory of the process, over all inputs of a target
CORPUS = Path(__file__).with_name("corpus")


@dataclass(frozen=True, slots=True)
class Target:
    """A parser: `parse` gets an input and a generator for its own choices, and may raise the documented errors only."""

    name: str
    seeds: tuple[bytes, ...]
    parse: Callable[[bytes, random.Random], object]
    errors: tuple[type[BaseException], ...] = ()
    mutate: Callable[[random.Random, bytes], bytes] = mutate_bytes

    def inputs(self, rng: random.Random) -> Iterator[bytes]:
        """Yield inputs without end: the seeds and the committed corpus, then mutations of them and of mutations."""
        pool = [*self.seeds, *self.corpus()]
        yield from pool
        while True:
            text = self.mutate(rng, rng.choice(pool))
            if rng.random() < 0.05:
                pool.append(text)
            if len(pool) > 200:
                del pool[rng.randrange(len(self.seeds), len(pool))]
            yield text

    def corpus(self) -> list[bytes]:
        """Return the inputs that once showed a defect, or reach code that mutations seldom reach."""
        folder = CORPUS / self.name
        return [path.read_bytes() for path in sorted(folder.iterdir())] if folder.is_dir() else []

    def check(self, text: bytes, rng: random.Random) -> None:
        """Parse one input. Errors: whatever is not documented, and TimeoutError for a hang."""
        with _limited(), suppress(*self.errors):
            self.parse(text, rng)

    def run(self, seed: int, count: int) -> None:
        """Parse `count` inputs. Errors: AssertionError with the seed, the number of the input and the input."""
        rng = random.Random(seed)
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number, text in enumerate(self.inputs(rng)):
            if number == count:
                break
            try:
                self.check(text, random.Random(seed + number))
            except BaseException as exc:
                if isinstance(exc, KeyboardInterrupt):
                    raise
                raise AssertionError(
                    f"{self.name}: seed {seed}, input {number}: {type(exc).__name__}: {exc}\n"
                    f"{text[:2000]!r}{' ...' if len(text) > 2000 else ''}"
                ) from exc
        grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) * 1024
        assert grown_bytes < MAX_GROWTH_BYTES, f"{self.name}: seed {seed}: took {grown_bytes:,} bytes of memory"


@contextmanager
def _limited() -> Iterator[None]:
    """Raise TimeoutError if the block takes HANG_S; end the process if it is inside a call that never returns."""

    def on_alarm(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no end after {HANG_S} s")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    faulthandler.dump_traceback_later(3 * HANG_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
