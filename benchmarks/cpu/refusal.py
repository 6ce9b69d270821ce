"""The end of a benchmark that cannot measure."""

import sys
from typing import NoReturn

EXIT_REFUSED = 2


def refuse(text: str) -> NoReturn:
    """Print one line of explanation and end with exit code 2."""
    print(text, file=sys.stderr)
    raise SystemExit(EXIT_REFUSED)
