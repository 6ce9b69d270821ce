"""What all suites report at the end."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how often the conformance tests excused a differing token, in how many comparisons."""
    counts = [
        value
        for report in terminalreporter.getreports("passed")
        if report.when == "call"
        for name, value in report.user_properties
        if name == "excused_tokens"
    ]
    if counts:
        terminalreporter.write_line(
            f"conformance: a differing token was excused {sum(counts)} times in {len(counts)} tests "
            "(margin of the two likeliest under 1e-4)"
        )
