"""`tiercel bench latency`: measure the latency of one batch, repeated, without HTTP."""

from collections.abc import Callable
from typing import Annotated, Any

from tiercel.cli.bench_offline import (
    BENCHMARK,
    OfflineBar,
    OfflineFlags,
    engine_requests,
    offline_command,
    open_offline,
    plan_offline,
)
from tiercel.settings.option import Option, options_of, read_options
from tiercel.values.errors import ConfigError

_COUNT = (1, 10**9)


class LatencyFlags(OfflineFlags, frozen=True, kw_only=True):
    """The flags of `bench latency` besides the settings."""

    input_len: Annotated[int, Option(BENCHMARK, "Tokens of each prompt.", "TOKENS", within=_COUNT)] = 32
    output_len: Annotated[int, Option(BENCHMARK, "Tokens of each answer.", "TOKENS", within=_COUNT)] = 128
    batch_size: Annotated[int, Option(BENCHMARK, "Requests per batch.", "COUNT", within=_COUNT)] = 8
    num_iters_warmup: Annotated[
        int, Option(BENCHMARK, "Batches before the measurement.", "COUNT", within=(0, 10**9))
    ] = 10
    num_iters: Annotated[int, Option(BENCHMARK, "Measured batches.", "COUNT", within=_COUNT)] = 30


def bench_latency_command(listing: str) -> Callable[..., int]:
    """Return the command with its own flags and those of the engine."""
    return offline_command(bench_latency, listing, options_of(LatencyFlags).values())


def bench_latency(given: dict[str, Any]) -> int:
    """Measure the latency of one batch through the engine without HTTP.

    Runs the same batch of random prompts repeatedly, one run after another, and
    reports percentiles of the time of the batch, to the first token and between
    tokens. --help=all lists all flags.
    """
    # lazy: httpx and tokenizers, which other verbs do not need
    from tiercel.cli.offline_output import latency_result, show_latency, write_result
    from tiercel.loadtest.load.mix import DatasetSettings
    from tiercel.loadtest.load.request_list import draw_requests

    own = read_options(LatencyFlags, {name: given.pop(name) for name in options_of(LatencyFlags) if name in given})
    own.check()
    plan = plan_offline(given)
    size, max_num_seqs = own.batch_size, plan.settings.sequences
    if size > max_num_seqs:
        raise ConfigError(
            "bench.flag", f"--batch-size {size} exceeds --max-num-seqs {max_num_seqs}: it would run as several batches"
        )
    dataset = DatasetSettings(input_len=own.input_len, output_len=own.output_len)
    requests = draw_requests(dataset, size, plan.settings.seed, plan.vocab_size, plan.tokenizer)
    engine_batch = engine_requests(requests, own.temperature)
    with open_offline(plan, requests) as engine, OfflineBar() as bar:
        on_ended = bar.stage("warming up", own.num_iters_warmup)
        for number in range(own.num_iters_warmup):
            engine.run(engine_batch)
            on_ended(number + 1)
        on_ended = bar.stage("running", own.num_iters)
        runs = []
        for number in range(own.num_iters):
            runs.append(engine.run(engine_batch))
            on_ended(number + 1)
        facts = engine.facts
    result = latency_result(plan, facts, requests, own.temperature, runs)
    show_latency(result)
    if own.output_json is not None:
        write_result(own.output_json, result)
    return 0
