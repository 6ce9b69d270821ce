"""The verdict at the end of a benchmark."""

from collections.abc import Iterable


def all_met(checks: Iterable[tuple[str, bool]]) -> bool:
    """Print each check, a text and whether it is met. Return whether all of them are."""
    checks = list(checks)
    for text, is_met in checks:
        print(f"  {'ok    ' if is_met else 'MISSED'} {text}")
    return all(is_met for _, is_met in checks)
