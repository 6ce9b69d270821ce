"""`tiercel calibrate`: measure the best split of a step into nano-batches, or which steps overlap in halves."""

from pathlib import Path

from tiercel.cli.console import warn
from tiercel.device.base import Device
from tiercel.scheduler.nanobatch import SplitRow
from tiercel.settings.config import resolve
from tiercel.settings.settings import EngineSettings
from tiercel.system.openmp import adopt_engine_environment
from tiercel.values.errors import TiercelError


def calibrate(given: dict[str, object]) -> int:
    """Measure into how many nano-batches a step should be split on this machine.

    Runs steps of many shapes unsplit and in several nano-batches, for about five
    minutes on an idle machine, and writes the table where `tiercel serve` of the
    same model reads it. Without a table every step is one nano-batch. Steps of
    up to 256 tokens, the default on a CPU, have not been faster when split.
    On a GPU it measures which steps are at least 1.15 times as fast in two
    halves that overlap; without a table none overlaps.
    --help=all lists all flags.
    """
    resolved = resolve(given)
    for line in resolved.warnings:
        warn(line)
    adopt_engine_environment()
    settings = resolved.settings.engine
    # lazy: they import torch, which takes seconds and reads the environment
    from tiercel.device.registry import open_device

    device = open_device(settings.device, settings.threads)
    calibrate_device = _calibrate_overlap if device.name == "cuda" else _calibrate_splits
    try:
        path = calibrate_device(settings, device)
    except OSError as exc:
        raise TiercelError("calibrate.not_kept", f"the table cannot be written: {exc}") from exc
    print(f"written to {path}")
    return 0


def _calibrate_splits(settings: EngineSettings, device: Device) -> Path | None:
    # lazy: as above
    from tiercel.engine.measure.split_search import calibrate_splits

    def show(row: SplitRow) -> None:
        best = min(row.cuts, key=lambda timed: timed.ratio)
        print(
            f"{row.prefill_tokens:>6} {row.decodes:>8} {row.context_tokens:>8}   {best.ratio:>6.3f}   "
            f"prompts in {best.split.prompt_parts}, decodes in {best.split.decode_parts}",
            flush=True,
        )

    print("prompt  decodes  context     best   split: time relative to the unsplit step")
    return calibrate_splits(settings, show, device)


def _calibrate_overlap(settings: EngineSettings, device: Device) -> Path | None:
    # lazy: as above
    from tiercel.engine.measure.overlap_search import LEAST_GAIN, OverlapRow, calibrate_overlap

    def show(row: OverlapRow) -> None:
        word = "overlaps" if row.gain >= LEAST_GAIN else "serial"
        print(f"{row.tokens:>6} {row.decodes:>8} {row.gain:>6.3f}   {word}", flush=True)

    print(f"tokens  decodes   gain   of two overlapping halves; used from {LEAST_GAIN} on")
    return calibrate_overlap(settings, show, device)
