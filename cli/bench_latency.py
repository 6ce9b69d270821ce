"""`tiercel bench latency`: one batch at a time through the engine without HTTP, again and again."""

from collections.abc import Callable
from typing import Any

from tiercel.cli.bench_offline import (
    OUTPUT_JSON,
    TEMPERATURE,
    OfflineBar,
    asked_of,
    check_output,
    offline_command,
    open_offline,
    own_flag,
    plan_offline,
)
from tiercel.errors import ConfigError

_OWN = (
    own_flag("input_len", int, 32, "Tokens of each prompt.", "TOKENS", least=1),
    own_flag("output_len", int, 128, "Tokens of each answer.", "TOKENS", least=1),
    own_flag("batch_size", int, 8, "Requests of a batch.", "COUNT", least=1),
    own_flag("num_iters_warmup", int, 10, "Batches before the clock starts.", "COUNT", least=0),
    own_flag("num_iters", int, 30, "Batches.", "COUNT", least=1),
    TEMPERATURE,
    OUTPUT_JSON,
)


def bench_latency_command(shown: str) -> Callable[..., int]:
    """The command: flags of its own, and the engine's."""
    return offline_command(bench_latency, shown, _OWN)


def bench_latency(given: dict[str, Any]) -> int:
    """Measure the latency of one batch through the engine without HTTP.

    Runs the same batch of random prompts again and again, each time alone, and
    tells percentiles of the whole batch, of the first token and of those behind
    it. --help=all lists all flags.
    """
    # lazy: httpx and tokenizers, which other verbs need not wait for
    from tiercel.cli.offline_output import latency_result, show_latency, write_result
    from tiercel.loadtest.load.mix import DatasetSettings
    from tiercel.loadtest.load.request_list import draw_requests

    own: dict[str, Any] = {flag.name: given.pop(flag.name, flag.default) for flag in _OWN}
    check_output(own["output_json"], "--output-json")
    plan = plan_offline(given)
    size, most = own["batch_size"], plan.settings.max_num_seqs
    if size > most:
        raise ConfigError("bench.flag", f"--batch-size {size} is over --max-num-seqs {most}: it would be no one batch")
    dataset = DatasetSettings(input_len=own["input_len"], output_len=own["output_len"])
    requests = draw_requests(dataset, size, plan.settings.seed, plan.vocab_size, plan.tokenizer)
    asked = asked_of(requests, own["temperature"])
    with open_offline(plan, requests) as engine, OfflineBar() as bar:
        tell = bar.stage("warming up", own["num_iters_warmup"])
        for number in range(own["num_iters_warmup"]):
            engine.run(asked)
            tell(number + 1)
        tell = bar.stage("running", own["num_iters"])
        runs = []
        for number in range(own["num_iters"]):
            runs.append(engine.run(asked))
            tell(number + 1)
        facts = engine.facts
    result = latency_result(plan, facts, requests, own["temperature"], runs)
    show_latency(result)
    if own["output_json"] is not None:
        write_result(own["output_json"], result)
    return 0
