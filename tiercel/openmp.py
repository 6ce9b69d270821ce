"""How the engine's OpenMP threads behave: variables that libgomp reads when a process loads torch.

Only the compute lane computes with several threads, as many as `--threads` says: a second team beside it, the main
thread's, makes libgomp take the cores for overcommitted and sleep at every barrier. And one that waits at a barrier
for a partner without a core gives its own core up after about 0.4 ms instead of 16. Figures: docs/performance.md.
https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html
"""

import os

_FIXED = {"OMP_NUM_THREADS": "1"}
_UNLESS_SET = {"GOMP_SPINCOUNT": "10000"}
_FACTS = (*_FIXED, *_UNLESS_SET, "OMP_WAIT_POLICY")


def engine_environment() -> dict[str, str]:
    """All variables of a process that computes. How long threads spin is the operator's to say."""
    return {**_UNLESS_SET, **os.environ, **_FIXED}


def adopt_engine_environment() -> None:
    """Let this process compute as the engine does. To be called before it loads torch."""
    os.environ.update(engine_environment())


def thread_facts() -> tuple[str, ...]:
    """What the times of steps depend on."""
    return tuple(os.environ.get(name, "") for name in _FACTS)
