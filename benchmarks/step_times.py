"""The table of step times of a model on this machine, and its error for shapes that are not in it.

    python benchmarks/step_times.py [MODEL] [--seconds 1.5] [--starts 1] [--shapes 20] [--sequences 256] [--seed 0]

Measures as `tiercel serve` does at its start, `--starts` times with the same new cache folder, then runs random steps
and prints predicted and measured milliseconds. The last column is the error after one common factor, which the engine
learns while it runs. Other work on the machine changes all times; the load average is printed, too.

Exit code 1 if the median error of the table as it was measured, without that factor, is above `--most-error` (0.1).
"""

import argparse
import os
import random
import statistics
import sys
import tempfile

import torch

from tiercel.device.registry import open_device
from tiercel.embedded import MODEL_DIR
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.measure.step_grid import StepGrid, StepShape
from tiercel.engine.measure.step_times import TrialForward, limits_of, open_step_times
from tiercel.engine.memory.capacity import size_pool
from tiercel.engine.models.base import kv_spec
from tiercel.engine.models.registry import load_model
from tiercel.engine.native.library import load_library
from tiercel.scheduler.cost import StepCosts, StepTimes
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import MonotonicClock


def show(times: StepTimes) -> None:
    """Print the table, with one row for each pair of prefill tokens and decodes."""
    print(f"{'prefill':>8}{'decodes':>8} | ms at context" + "".join(f"{c:>9}" for c in times.context_tokens))
    width = len(times.context_tokens)
    for row, (prefill, decodes) in enumerate((p, d) for p in times.prefill_tokens for d in times.decodes):
        values = times.ms[row * width : (row + 1) * width]
        print(f"{prefill:>8}{decodes:>8} |              " + "".join(f"{ms:>9.2f}" for ms in values))


def draw(grid: StepGrid, rng: random.Random) -> StepShape:
    """Draw a step with log-uniform sizes."""
    limits = grid.limits
    while True:
        prefill = 0 if rng.random() < 0.3 else round(limits.step_tokens ** rng.random())
        decodes = 0 if rng.random() < 0.2 else round(limits.max_num_seqs ** rng.random())
        context = round(grid.context_tokens[-1] ** rng.random())
        shape = StepShape(0 if prefill == 1 else prefill, decodes, context)
        if prefill + decodes <= limits.step_tokens and not grid.has(shape) and grid.slices(shape) is not None:
            return shape


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(MODEL_DIR))
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument("--shapes", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-error", type=float, default=0.1, help="median error that is accepted")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = EngineSettings(
            model=args.model, max_num_seqs=args.sequences, calibration_s=args.seconds, cache_folder=folder
        )
        device = open_device(settings.device, settings.threads)
        torch_device = torch.device(device.name)
        attention = open_attention(settings.attention_backend, torch_device, device.processors, device.capability)
        library = load_library() if device.name == "cpu" else None
        model = load_model(settings, torch_device, attention, library=library)
        spec = kv_spec(model, settings.block_size)
        capacity = size_pool(settings, spec, device, model.max_model_len, model.weights_bytes)
        shape = (capacity.blocks + 1, spec.layers, spec.block_size, spec.kv_heads, 2 * spec.head_dim)
        kv = torch.empty(shape, dtype=model.precision.kv, device=torch_device)
        lane, clock = device.open_lane(), MonotonicClock()
        tables: list[StepTimes] = []
        for start in range(max(1, args.starts)):
            started_s = clock.now_s()
            tables.append(open_step_times(settings, model, kv, spec, device, lane, clock, capacity))
            print(f"start {start + 1}: {clock.now_s() - started_s:.2f} s")
    times = tables[-1]
    show(times)
    limits = limits_of(settings, model, device, capacity)
    grid, costs, rng = StepGrid(limits), StepCosts(times), random.Random(args.seed)
    trial = TrialForward(model, kv, spec, lane, clock)
    warm = grid.slices(StepShape(0, 1, 0))
    assert warm is not None
    trial.fastest_ms(warm, 0.1)
    rows: list[tuple[StepShape, float, float]] = []
    for shape in sorted(draw(grid, rng) for _ in range(args.shapes)):
        slices = grid.slices(shape)
        assert slices is not None
        rows.append((shape, costs.predict_ms(*shape), trial.fastest_ms(slices, 1.0)))
    factor = statistics.median(measured / predicted for _, predicted, measured in rows)
    print(f"\n{'prefill':>8}{'decodes':>8}{'context':>9}{'predicted':>11}{'measured':>10}{'error':>8}{'scaled':>8}")
    for (prefill, decodes, context), predicted, measured in rows:
        error, scaled = predicted / measured - 1, factor * predicted / measured - 1
        print(f"{prefill:>8}{decodes:>8}{context:>9}{predicted:>11.2f}{measured:>10.2f}{error:>8.0%}{scaled:>8.0%}")
    errors = sorted(abs(predicted / measured - 1) for _, predicted, measured in rows)
    scaled = sorted(abs(factor * predicted / measured - 1) for _, predicted, measured in rows)
    for name, values in (("as measured", errors), (f"times {factor:.2f}", scaled)):
        print(f"error {name}: median {statistics.median(values):.1%}, largest {values[-1]:.0%}")
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, {args.model}")
    lane.close()
    error = statistics.median(errors)
    if error > args.most_error:
        print(f"FAILED: the median error is {error:.1%}, more than {args.most_error:.0%}")
    return int(error > args.most_error)


if __name__ == "__main__":
    sys.exit(main())
