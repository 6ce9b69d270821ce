"""The behaviour of the engine's OpenMP threads: environment variables that libgomp reads when a process loads torch.

Only the compute lane uses several threads, as set by `--threads`. With a second team, of the main thread, libgomp
would consider the cores overcommitted and sleep at every barrier. GOMP_SPINCOUNT makes a thread that waits at a
barrier yield its core after about 0.4 ms instead of 16. Figures: docs/performance.md.
https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html
"""

import os

_FIXED = {"OMP_NUM_THREADS": "1"}
_UNLESS_SET = {"GOMP_SPINCOUNT": "10000"}
_FACTS = (*_FIXED, *_UNLESS_SET, "OMP_WAIT_POLICY")


def engine_environment() -> dict[str, str]:
    """Return the environment of a process that computes. GOMP_SPINCOUNT is kept if it is set."""
    return {**_UNLESS_SET, **os.environ, **_FIXED}


def adopt_engine_environment() -> None:
    """Set the environment of this process to that of the engine. Call it before torch is loaded."""
    os.environ.update(engine_environment())


def thread_facts() -> dict[str, str]:
    """Return the variables on which step times depend."""
    return {name: os.environ.get(name, "") for name in _FACTS}
