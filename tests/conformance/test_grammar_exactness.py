"""Outputs with grammars are the same alone, in batches, chunked, preempted, held, and after the death of an engine."""

import json
from pathlib import Path

import jsonschema
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer

from tests.conformance.bench import EngineBench
from tiercel.embedded import MODEL_DIR
from tiercel.values.outcome import FinishReason
from tiercel.values.request import SamplingParams

SCHEMAS = (
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 12},
            "home": {"type": "object", "properties": {"street": {"type": "string", "maxLength": 40}},
                     "required": ["street"], "additionalProperties": False},
        },
        "required": ["name", "ages", "home"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 12, "maxItems": 18},
)  # fmt: skip
GRAMMARS = [LLMatcher.grammar_from_json_schema(json.dumps(one), overrides={"whitespace_flexible": False})
            for one in SCHEMAS]  # fmt: skip
OUTPUTS = 160  # more than any of these objects needs
COUNT = 14


def prompt(number: int) -> list[int]:
    """Return a prompt of a block and more; half of them share their beginning."""
    shared = [100 + at * 7919 % 1000 for at in range(40)] if number % 2 else []
    return [*shared, *(100 + (number * 31 + at * 104_729) % 1500 for at in range(10 + 7 * number))]


def params(number: int) -> SamplingParams:
    """Return the parameters of a request: with either grammar or without one, greedy or drawn."""
    grammar = (*GRAMMARS, "")[number % 3]
    return SamplingParams(
        temperature=float(number % 2),
        seed=number,
        max_tokens=OUTPUTS if grammar else 60,
        grammar=grammar,
        ignore_eos=not grammar,
    )


def open_bench(**settings: object) -> EngineBench:
    return EngineBench(MODEL_DIR, **{"num_gpu_blocks_override": 400, **settings})


def run_all(one: EngineBench) -> dict[int, list[int]]:
    """Submit all requests at once and return their tokens."""
    seqs = {number: one.submit(prompt(number), params(number)) for number in range(COUNT)}
    one.run()
    return {number: one.inbox.tokens[seq] for number, seq in seqs.items()}


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    """The tokens of each request, computed alone and without steps ahead. They match their grammars."""
    torch.set_num_threads(1)
    one = open_bench(async_scheduling=False, enable_prefix_caching=False)
    tokens: dict[int, list[int]] = {}
    for number in range(COUNT):
        seq = one.submit(prompt(number), params(number))
        one.run()
        tokens[number] = one.inbox.tokens[seq]
        check_end(number, tokens[number], one.inbox.finished[seq].reason)
    one.close()
    return tokens


def check_end(number: int, tokens: list[int], reason: FinishReason) -> None:
    if number % 3 == 2:
        return
    assert reason is FinishReason.STOP
    output = LLTokenizer(str(MODEL_DIR / "tokenizer.json")).decode_str(tokens[:-1])
    jsonschema.validate(json.loads(output), SCHEMAS[number % 3])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 32, "max_num_seqs": 5},
        {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
    ],
)
@pytest.mark.sampled(1)
def test_in_batches_and_chunks(alone: dict[int, list[int]], settings: dict[str, object]) -> None:
    one = open_bench(**settings)
    assert run_all(one) == alone
    assert run_all(one) == alone  # from cached grammars and prefixes
    gauges = one.gauges.grammars
    assert (gauges.compiled, gauges.failed) == (2, 0)
    assert gauges.masks > 0 < gauges.mask_s
    one.close()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.sampled(1)
def test_preempted(alone: dict[int, list[int]], mode: str) -> None:
    one = open_bench(num_gpu_blocks_override=30, cpu_device_pool=True, kv_host_bytes=8 << 20, preemption_mode=mode,
                     max_model_len=256)  # fmt: skip
    assert run_all(one) == alone
    gauges = one.gauges
    assert gauges.preemptions_swap if mode == "swap" else gauges.preemptions_recompute
    one.close()


def test_resumed_from_any_token(alone: dict[int, list[int]]) -> None:
    """As after the death of an engine: the next one gets the outputs so far."""
    one = open_bench()
    seqs: dict[int, tuple[int, int]] = {}
    for number in range(COUNT):
        heard = (number * 13) % (len(alone[number]) - 1)
        seqs[number] = heard, one.submit(prompt(number), params(number), outputs=alone[number][:heard])
    one.run()
    for number, (heard, seq) in seqs.items():
        assert alone[number][:heard] + one.inbox.tokens[seq] == alone[number]
    one.close()


def test_a_model_without_a_tokenizer_serves_and_refuses_grammars(tmp_path: Path) -> None:
    for path in MODEL_DIR.iterdir():
        if path.name != "tokenizer.json":
            (tmp_path / path.name).symlink_to(path)
    one = EngineBench(tmp_path, num_gpu_blocks_override=50)
    assert not one.engine.grammars.wait()
    refused, served = one.submit(prompt(1), params(1)), one.submit(prompt(2), params(2))
    one.run()
    assert one.inbox.finished[refused].reason is FinishReason.ERROR
    assert "tokenizer.json" in (one.inbox.finished[refused].error or "")
    assert one.inbox.finished[served].reason is FinishReason.LENGTH
    one.close()
