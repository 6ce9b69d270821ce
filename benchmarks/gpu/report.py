"""Write the figures as one JSON file and one table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from benchmarks.gpu.figure import Figure, SectionResult
from benchmarks.gpu.targets import TARGETS, batch_verdict, overlap_verdict, values_of

FORMAT = 1


def as_json(facts: Mapping[str, object], results: Sequence[SectionResult]) -> dict[str, object]:
    """The whole run; `format` is raised if an older reader would misread the file."""
    values = values_of(figure for result in results for figure in result.figures)
    return {
        "format": FORMAT,
        **facts,
        "targets": [
            {
                "text": target.text,
                "figure": target.figure,
                "limit": target.limit(values),
                "is_most": target.is_most,
                "unit": target.unit,
                "value": values.get(target.figure),
                "verdict": target.verdict(values),
            }
            for target in TARGETS
        ],
        "overlap": overlap_verdict(values),
        "batches": batch_verdict(values),
        "sections": [asdict(result) for result in results],
    }


def as_table(facts: Mapping[str, object], results: Sequence[SectionResult]) -> str:
    """Return the run in markdown: machine, targets, figures and failures."""
    values = values_of(figure for result in results for figure in result.figures)
    lines = [f"# GPU, {facts.get('date', 'no date')}", ""]
    lines += [f"- {name.replace('_', ' ')}: {_fact(value)}" for name, value in facts.items() if name != "date"]
    lines += ["", "| target | at | measured | |", "|---|---|---|---|"]
    for target in TARGETS:
        sign = "at most" if target.is_most else "at least"
        limit = f"{sign} {show(target.limit(values))} {target.unit}".strip()
        value = values.get(target.figure)
        told = "" if value is None else f"{show(value)} {target.unit}".strip()
        lines.append(f"| {target.text} | {limit} | {told} | {target.verdict(values)} |")
    lines += ["", overlap_verdict(values), "", batch_verdict(values)]
    for result in results:
        lines += ["", f"## {result.section}, {result.seconds:.0f} s", ""]
        if result.figures:
            lines += ["| figure | | |", "|---|---|---|"]
            lines += [_row(result.section, figure) for figure in result.figures]
        if result.failures:
            lines += ["", *(f"- failed: {failure.part}: {failure.reason}" for failure in result.failures)]
        if result.left_out:
            lines += ["", f"- no time for: {', '.join(result.left_out)}"]
    return "\n".join(lines) + "\n"


def show(value: float) -> str:
    """Format a number with four significant digits."""
    if value != value or abs(value) == float("inf"):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _row(section: str, figure: Figure) -> str:
    told = ", ".join(f"{name} {_fact(fact)}" for name, fact in figure.facts.items())
    return f"| {figure.name.removeprefix(section + '.')} | {show(figure.value)} {figure.unit} | {told} |"


def _fact(value: object) -> str:
    match value:
        case dict():
            return ", ".join(f"{name} {_fact(part)}" for name, part in value.items())
        case float():
            return show(value)
        case _:
            return str(value).replace("|", "/")
