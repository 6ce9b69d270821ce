"""Tables of results in Markdown.

    python benchmarks/cpu/report.py RESULTS/*.json

Prints a table for each file, and one that compares all figures with the promises for the class of the processor. All
files must be from the same machine. Exit code 1 if a promise is broken.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.cpu.promises import Judgement, exit_code, judge
from benchmarks.cpu.refusal import refuse
from benchmarks.cpu.results import OURS, KernelResults, Results, WorkloadResults, read_results

_TITLES = {
    ("W1", "out_tok_s"): ("W1, one stream, tokens/s", 1.0),
    ("W2", "out_tok_s"): ("W2, 16 streams, tokens/s", 1.0),
    ("W3", "out_tok_s"): ("W3, cold shared prefix, tokens/s", 1.0),
    ("W3w", "out_tok_s"): ("W3w, warm shared prefix, tokens/s", 1.0),
    ("W4", "gap_max_s"): ("W4, longest gap of the streams, ms", 1e3),
    ("W4", "long_ttft_s"): ("W4, first token of the long prompt, s", 1.0),
}


def workload_table(results: WorkloadResults) -> Iterator[str]:
    """Yield the lines of the table of one model: medians by server, and the ratio to the best peer."""
    servers = results.servers()
    quick = " **Quick: small sizes that only check the set-up.**" if results.is_quick else ""
    yield f"{results.model}, {_machine(results)}.{quick}"
    yield ""
    yield _row(["", *servers, "to the best peer"])
    yield _row(["---"] * (len(servers) + 2))
    for (workload, figure), (title, factor) in _TITLES.items():
        medians = results.medians(workload, figure)
        if not medians:
            continue
        disturbed = results.disturbed(workload)
        ratio = results.ratio(workload, figure)
        yield _row(
            [
                title + (f" (disturbed trials: {disturbed})" if disturbed else ""),
                *(_number(medians.get(server), factor) for server in servers),
                f"{ratio[0]:.2f} ({ratio[1]})" if ratio else "-",
            ]
        )
    sizes = [f"{results.memory_gb(server):.2f}" for server in servers]
    yield _row(["resident memory, GB" + f" ({OURS}: less KV)" * (OURS in servers), *sizes, ""])


def kernel_table(results: KernelResults) -> Iterator[str]:
    """Yield the lines of the table of kernels: values by implementation, and our share of the limit."""
    names = list(dict.fromkeys(name for row in results.rows for name in row.values))
    limits = ", ".join(f"{name} {value:.4g}" for name, value in results.limits.items())
    yield f"Kernels, {_machine(results)}. Limits: {limits}."
    yield ""
    yield _row(["", "unit", *names, "share of the limit"])
    yield _row(["---"] * (len(names) + 3))
    for row in results.rows:
        values = (_number(row.values.get(name), 1.0) for name in names)
        yield _row([row.name, row.unit, *values, f"{row.share:.0%} of {row.limit}"])


def promise_table(judgements: Iterable[Judgement]) -> Iterator[str]:
    """Yield the lines of the table of promises."""
    yield _row(["promise", "limit", "aim", "measured", ""])
    yield _row(["---"] * 5)
    for judgement in judgements:
        promise, kind = judgement.promise, judgement.kind
        measured = "unmeasured" if judgement.value is None else _with_unit(judgement.value, promise.unit)
        word = "at most" if promise.is_most else "at least"
        limit, aim = promise.limit(kind), promise.aim(kind)
        yield _row(
            [
                promise.text,
                "-" if limit is None else f"{word} {_with_unit(limit, promise.unit)}",
                "-" if aim is None else _with_unit(aim, promise.unit),
                measured,
                judgement.verdict,
            ]
        )


def judgements_of(files: Iterable[Results]) -> list[Judgement]:
    """Return all promises with the figures of these files. Errors: SystemExit if their processors differ."""
    found = list(files)
    kinds = {one.processor.kind for one in found}
    names = {one.processor.name for one in found}
    if len(kinds) != 1 or len(names) != 1:
        refuse(f"the files are of different processors: {', '.join(sorted(names))} ({', '.join(kinds)})")
    values = {name: value for one in found for name, value in one.values().items()}
    return judge(kinds.pop(), values)


def tables(files: Iterable[Results]) -> Iterator[str]:
    """Yield the lines of all tables."""
    found = list(files)
    for one in found:
        yield from workload_table(one) if isinstance(one, WorkloadResults) else kernel_table(one)
        yield ""
    yield from promise_table(judgements_of(found))


def _machine(results: Results) -> str:
    processor = results.processor
    forced = ", forced below the processor's own class" if processor.forced else ""
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    return f"{processor.kind}{forced} ({processor.name}, {results.threads} threads), {results.date[:10]}; {versions}"


def _number(value: float | None, factor: float) -> str:
    if value is None:
        return "-"
    scaled = value * factor
    return f"{scaled:.0f}" if scaled >= 100 else f"{scaled:.3g}"


def _with_unit(value: float, unit: str) -> str:
    match unit:
        case "share":
            return f"{value:.0%}"
        case "x":
            return f"{value:.2f} x"
        case _:
            return f"{value:.2f} {unit}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    files = [read_results(path) for path in parser.parse_args().files]
    print("\n".join(tables(files)))
    return exit_code(judgements_of(files))


if __name__ == "__main__":
    sys.exit(main())
