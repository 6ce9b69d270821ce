"""Start the engine process, tied to its parent before anything is imported that takes long.

Usage: `python -m tiercel.engine --fd N`; see `tiercel.engine.process`.
"""

import argparse
import os

from tiercel.engine.orphan import end_with_parent
from tiercel.system.process_limits import blame, show_memory_limits
from tiercel.system.standard_streams import error_stream, guard_streams, say

EXIT_CRASH = 3  # as of `process`


def main() -> int:
    """Tie this process to its parent, then run the engine. Return the exit code."""
    guard_streams()
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--fd", type=int, required=True)
    known, _ = parser.parse_known_args()
    end_with_parent(known.fd)
    try:
        # lazy: torch takes seconds to import, and the parent may die meanwhile
        from tiercel.engine import process
    except (ImportError, MemoryError, OSError) as exc:  # of torch, if a limit of this process forbids to map it
        if not show_memory_limits():
            raise
        say(f"tiercel: the engine cannot be loaded: {blame(exc)}", error_stream())
        return EXIT_CRASH
    return process.main()


if __name__ == "__main__":
    code = main()
    error_stream().flush()
    # Worker threads may still be computing. Exiting this way does not wait for them.
    os._exit(code)
