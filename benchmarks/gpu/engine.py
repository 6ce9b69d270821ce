"""The engine without HTTP, for the sections that measure it: dummy weights, exact lengths, seeded prompts."""

import random
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.gpu.dummy import LLAMA_3_8B, write_model
from tiercel.cli.bench_offline import engine_requests, plan_offline
from tiercel.engine.offline import OfflineEngine, OfflineRequest, OfflineRun
from tiercel.loadtest.load.request_list import ListedRequest
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import MonotonicClock

VOCAB = 100_000  # prompts are drawn from the ids below this
UNBOUND = {"tbt_goal": 0, "calibration_seconds": 0}  # steps of the full token budget, as in other engines


def engine_settings(folder: Path, **flags: object) -> EngineSettings:
    """Resolve flags as `tiercel bench throughput` does, for a model of random weights. Errors: ConfigError."""
    model = folder / "llama-3-8b"
    if "model" not in flags:
        write_model(model, LLAMA_3_8B)
    given = {"model": str(model), "load_format": "dummy", "device": "cuda", **UNBOUND, **flags}
    return plan_offline(given).settings


def open_engine(settings: EngineSettings) -> OfflineEngine:
    """Open an engine. Errors: ConfigError."""
    return OfflineEngine.open(settings, MonotonicClock())


def draw(engine: OfflineEngine, count: int, prompt: int, output: int, seed: int) -> list[ListedRequest]:
    """Return requests of one prompt length and one output length; the same on every machine."""
    rng, ids = random.Random(f"{seed}/{count}/{prompt}/{output}"), range(min(VOCAB, engine.facts.vocab_size))
    return [ListedRequest(prompt_token_ids=rng.choices(ids, k=prompt), output_len=output) for _ in range(count)]


def asked(requests: Sequence[ListedRequest]) -> list[OfflineRequest]:
    """Return greedy requests that run to their full length."""
    return engine_requests(requests, 0.0)


def step_ends(run: OfflineRun) -> list[float]:
    """Return the end of each step of a run, in seconds since the first one began."""
    laps = run.laps
    ends: list[float] = []
    at_s = 0.0
    for parts in zip(laps.plan_s, laps.launch_s, laps.wait_s, laps.commit_s, strict=True):
        at_s += sum(parts)
        ends.append(at_s)
    return ends


def full_steps(run: OfflineRun) -> list[tuple[float, float]]:
    """Return (seconds, mean output tokens per sequence before the step) of the steps in which all sequences decoded."""
    ends = step_ends(run)
    first_s = [answer.first_s for answer in run.answers]
    begin_s, end_s = max(first_s), min(answer.last_s for answer in run.answers)
    starts = [sum(end <= one for end in ends) for one in first_s]
    mean_start = sum(starts) / len(starts)
    return [
        (end - before, index - mean_start)
        for index, (before, end) in enumerate(zip([0.0, *ends], ends, strict=False))
        if before > begin_s and end < end_s
    ]


def step_ms(run: OfflineRun) -> float:
    """Return the median time of the steps in which every sequence decoded. Errors: ValueError if there was none."""
    steps = full_steps(run)
    if not steps:
        raise ValueError("no step in which every sequence decoded")
    return 1e3 * median(seconds for seconds, _ in steps)


def device_s(run: OfflineRun) -> float:
    """Return the seconds in which the device computed; 0 if they were not measured."""
    return sum(run.laps.nano_batch_s)
