"""`tiercel calibrate`: measure the best split of a step into nano-batches."""

from tiercel.cli.console import warn
from tiercel.config import resolve
from tiercel.errors import TiercelError
from tiercel.openmp import adopt_engine_environment
from tiercel.scheduler.nanobatch import SplitRow


def calibrate(given: dict[str, object]) -> int:
    """Measure into how many nano-batches a step should be split on this machine.

    Runs steps of many shapes unsplit and in several nano-batches, for about five
    minutes on an idle machine, and writes the table where `tiercel serve` of the
    same model reads it. Without a table every step is one nano-batch. Steps of
    up to 256 tokens, the default on a CPU, have not been faster when split.
    --help=all lists all flags.
    """
    resolved = resolve(given)
    for line in resolved.warnings:
        warn(line)
    adopt_engine_environment()
    # lazy: it imports torch, which takes seconds and reads the environment
    from tiercel.engine.measure.split_search import calibrate_splits

    def show(row: SplitRow) -> None:
        best = min(row.cuts, key=lambda timed: timed.ratio)
        print(
            f"{row.prefill_tokens:>6} {row.decodes:>8} {row.context_tokens:>8}   {best.ratio:>6.3f}   "
            f"prompts in {best.split.prompt_parts}, decodes in {best.split.decode_parts}",
            flush=True,
        )

    print("prompt  decodes  context     best   split: time relative to the unsplit step")
    try:
        path = calibrate_splits(resolved.settings.engine, show)
    except OSError as exc:
        raise TiercelError("calibrate.not_kept", f"the table cannot be written: {exc}") from exc
    print(f"written to {path}")
    return 0
