"""`tiercel calibrate`: find out which cuts of a step pay for a model on this machine."""

from tiercel.cli.console import warn
from tiercel.config import resolve
from tiercel.errors import TiercelError
from tiercel.openmp import adopt_engine_environment
from tiercel.scheduler.nanobatch import SplitRow


def calibrate(given: dict[str, object]) -> int:
    """Search for the cuts of a step that save time on this machine.

    Runs steps of many shapes whole and in several nano-batches, for about five
    minutes on an idle machine, and saves the table where `tiercel serve` of the
    same model looks for it. Without a table every step is one nano-batch. Steps
    of up to 256 tokens, a CPU's default, have not been found to gain.
    --help=all lists all flags.
    """
    resolved = resolve(given)
    for line in resolved.warnings:
        warn(line)
    adopt_engine_environment()
    # lazy: it imports torch, which takes seconds and reads the environment
    from tiercel.engine.measure.split_search import calibrate_splits

    def tell(row: SplitRow) -> None:
        best = min(row.cuts, key=lambda timed: timed.ratio)
        print(
            f"{row.prefill_tokens:>6} {row.decodes:>8} {row.context_tokens:>8}   {best.ratio:>6.3f}   "
            f"prompts in {best.split.prompt_parts}, decodes in {best.split.decode_parts}",
            flush=True,
        )

    print("prompt  decodes  context     best   cut: its time over that of the whole step")
    try:
        path = calibrate_splits(resolved.settings.engine, tell)
    except OSError as exc:
        raise TiercelError("calibrate.not_kept", f"the table cannot be saved: {exc}") from exc
    print(f"saved in {path}")
    return 0
