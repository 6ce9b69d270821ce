"""The engine's kernels against the limits of this machine, which are measured in the same run.

    python benchmarks/cpu/kernels.py --models MODELS [--only qwen05b] [--parts linear,attention,prefill] --out RESULTS

linear     all matrix products of one forward for 1 to 2,048 rows, beside oneDNN's packed products and torch's
attention  one layer's decode attention of 16 sequences with contexts of 512 to 4,096 tokens, beside gather + sdpa
prefill    a prompt of 2,048 tokens through the whole model, in one forward and in steps of 256 tokens

The share of the limit is the time that reading the bytes at the measured bandwidth, or computing at the measured peak
(whichever takes longer), would need, over the time that it took. Prefill counts its matrix products and those of
attention; everything else in its time is lost to the share. The limits are measured before and after, and the higher
ones count. Each time is the best of at least three. Exit code 1 if a promise for the class of the processor is broken.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.cpu.limits import PEAK_BY_CLASS, READ, measure_limits
from benchmarks.cpu.processor import ProcessorClass, read_processor
from benchmarks.cpu.promises import exit_code
from benchmarks.cpu.refusal import refuse
from benchmarks.cpu.report import judgements_of, tables
from benchmarks.cpu.results import KernelResults, KernelRow, write_results
from benchmarks.cpu.versions import own_versions
from tiercel.system.openmp import adopt_engine_environment

if TYPE_CHECKING:
    from benchmarks.cpu.kernel_trials import KernelTrials, TimedWork

PARTS = ("linear", "attention", "prefill")


def row_of(timed: "TimedWork", limits: dict[str, float], kind: ProcessorClass) -> KernelRow:
    """Return the row of a kernel: attention against the bandwidth, prefill against the peak, the rest against both."""
    peak = PEAK_BY_CLASS[kind]
    least_s = {
        READ: timed.work.bytes / limits[READ] / 1e9,
        peak: timed.work.operations / limits[peak] / 1e9,
    }
    match timed.name.partition(".")[0]:
        case "attention":
            limit = READ
        case "linear":
            limit = max(least_s, key=lambda name: least_s[name])
        case _:
            limit = peak
    return KernelRow(
        name=timed.name,
        unit="ms",
        values={name: 1e3 * seconds for name, seconds in timed.seconds.items()},
        share=least_s[limit] / timed.seconds["ours"],
        limit=limit,
    )


def _run(
    trials: "KernelTrials", parts: list[str], rows: tuple[int, ...], contexts: tuple[int, ...]
) -> Iterator["TimedWork"]:
    if "attention" in parts:
        yield from trials.attention(contexts)
    if "prefill" in parts:
        yield from trials.prefill()
    if "linear" in parts:
        yield from trials.linear(rows)


def main() -> int:
    arguments = _parse()
    adopt_engine_environment()
    # lazy: torch reads the environment when it is loaded
    import torch

    from benchmarks.cpu.kernel_trials import CONTEXTS, ROWS, KernelTrials

    processor = read_processor(os.environ.get("TIERCEL_CPU_CLASS"))
    threads = arguments.threads or processor.threads
    torch.set_num_threads(threads)
    before = measure_limits(processor.kind, threads)
    timed: list[TimedWork] = []
    versions = own_versions(None)
    for name in arguments.only:
        folder = arguments.models / name
        if not (folder / "config.json").exists():
            refuse(
                f"{folder} is no model folder; python benchmarks/cpu/make_models.py {arguments.models} --only {name}"
            )
        trials = KernelTrials.open(folder)
        versions |= trials.facts
        for one in _run(trials, arguments.parts, arguments.rows or ROWS, arguments.contexts or CONTEXTS):
            timed.append(one)
            shown = ", ".join(f"{key} {1e3 * seconds:.2f} ms" for key, seconds in one.seconds.items())
            print(f"{one.name}: {shown}", file=sys.stderr, flush=True)
    after = measure_limits(processor.kind, threads)
    limits = {name: max(value, after[name]) for name, value in before.items()}
    results = KernelResults(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=sys.argv,
        processor=processor,
        threads=threads,
        versions=versions,
        limits=limits,
        rows=[row_of(one, limits, processor.kind) for one in timed],
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / ("kernels.json" if not processor.forced else f"kernels-{processor.kind}.json")
    write_results(path, results)
    print("\n".join(tables([results])))
    print(f"results: {path}", file=sys.stderr)
    return exit_code(judgements_of([results]))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder made by make_models.py")
    parser.add_argument("--only", type=_words, default=["qwen05b", "llama1b"], help="models, with commas")
    parser.add_argument("--parts", type=_words, default=list(PARTS), help="with commas; default: all")
    parser.add_argument("--rows", type=_numbers, help="of the matrix products, with commas")
    parser.add_argument("--contexts", type=_numbers, help="of attention, in tokens, with commas")
    parser.add_argument("--out", type=Path, default=Path("results-cpu"), help="folder for the result")
    parser.add_argument("--threads", type=int, help="default: every core")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} unknown; known are {', '.join(PARTS)}")
    return arguments


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
