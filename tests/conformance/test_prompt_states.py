"""Log-probabilities of prompts and outputs, and pooled states, against transformers in float32.

The engine computes them chunk by chunk, beside other requests, with cached prefixes around, after preemptions, and
resumed as after the death of an engine.
"""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.conformance.bench import EngineBench
from tests.conformance.models import VOCAB_SIZE, Family, make_checkpoint
from tests.seeds import fast_and_slow, fresh_seeds
from tiercel.values.outcome import PromptReading
from tiercel.values.request import SamplingParams

FAMILIES: tuple[Family, ...] = ("llama3", "qwen3", "gpt2", "gemma3")
LOGPROB_ERROR = 1e-4
STATE_ERROR = 1e-5
BLOCK = 16
# What the engine does to the sequences; `bench` has the other settings.
WAYS: dict[str, dict[str, object]] = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 48},
    "synchronous": {"async_scheduling": False, "max_num_batched_tokens": 64},
    "preempted": {"num_gpu_blocks_override": 36, "max_num_seqs": 24, "max_num_batched_tokens": 64},
    "uncached": {"enable_prefix_caching": False},
    "reference kernels": {"attention_backend": "sdpa", "max_num_batched_tokens": 64},
}


@dataclass(frozen=True)
class Reference:
    folder: Path
    model: PreTrainedModel

    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """Shapes: tokens [T] -> [T, vocab]."""
        with torch.inference_mode():
            return self.model(torch.tensor([list(tokens)])).logits[0].float().log_softmax(dim=-1)

    def states(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return transformers' last_hidden_state. Shapes: tokens [T] -> [T, hidden]."""
        with torch.inference_mode():
            return self.model.base_model(torch.tensor([list(tokens)])).last_hidden_state[0]


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    return Reference(folder, make_checkpoint(request.param, folder, seed=11).eval())


def bench(reference: Reference, **settings: object) -> EngineBench:
    return EngineBench(reference.folder, max_model_len=400, **{"max_num_seqs": 8, **settings})


def ragged_prompts(rng: random.Random, count: int = 10) -> list[list[int]]:
    """Return prompts of 1 to 230 tokens, half of them with a common beginning."""
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(3 * BLOCK)]
    lengths = [1, 2, BLOCK, BLOCK + 1, *(rng.randrange(2, 180) for _ in range(count - 4))]
    return [
        [*(shared if number % 2 else ()), *(rng.randrange(3, VOCAB_SIZE) for _ in range(length))]
        for number, length in enumerate(lengths)
    ]


def check_prompt(parts: Sequence[PromptReading], prompt: Sequence[int], logprobs: torch.Tensor, count: int) -> None:
    """Check that the parts have every position once, in order, and the values of transformers [T, vocab]."""
    place = parts[0].start if parts else len(prompt) - 1
    for part in parts:
        assert part.start == place
        place, top = part.end, min(count, VOCAB_SIZE)
        assert part.num_top == top
        expected = logprobs[part.start : part.end]
        targets = torch.tensor(list(prompt[part.start + 1 : part.end + 1]))
        chosen = expected.gather(1, targets[:, None])
        torch.testing.assert_close(as_tensor("f", part.logprobs), chosen[:, 0], atol=LOGPROB_ERROR, rtol=0)
        ranks = as_tensor("I", part.ranks)
        assert (ranks >= 1 + (expected > chosen + 2 * LOGPROB_ERROR).sum(dim=-1)).all()
        assert (ranks <= 1 + (expected > chosen - 2 * LOGPROB_ERROR).sum(dim=-1)).all()
        tops = as_tensor("f", part.top_logprobs).view(part.end - part.start, top)
        torch.testing.assert_close(tops, expected.topk(top).values, atol=LOGPROB_ERROR, rtol=0)
        ids = as_tensor("I", part.top_tokens).view(part.end - part.start, top)
        torch.testing.assert_close(expected.gather(1, ids), tops, atol=LOGPROB_ERROR, rtol=0)
    assert place == len(prompt) - 1


def as_tensor(kind: str, raw: bytes) -> torch.Tensor:
    return torch.tensor(array(kind, raw).tolist(), dtype=torch.float32 if kind == "f" else torch.int64)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", fast_and_slow([1], fresh_seeds(1)))
@pytest.mark.sampled(4)
def test_log_probabilities_of_prompts_and_outputs(reference: Reference, way: str, seed: int) -> None:
    rng = random.Random(seed)
    one = bench(reference, **WAYS[way])
    prompts = ragged_prompts(rng)
    for prompt in rng.sample(prompts, 4):  # their blocks are cached before they are asked for again
        one.submit(prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    one.run()
    asked: list[tuple[int, list[int], int]] = []
    for prompt in prompts:
        count = rng.choice([0, 1, 5, VOCAB_SIZE, 2 * VOCAB_SIZE])
        outputs = rng.choice([0, 1, 64])
        params = SamplingParams(
            temperature=0, max_tokens=outputs, ignore_eos=True, prompt_logprobs=count, logprobs=min(count, 5)
        )
        asked.append((one.submit(prompt, params), prompt, count))
        one.submit(prompt, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    one.run()
    for seq, prompt, count in asked:
        finished, drawn = one.inbox.finished[seq], one.inbox.tokens.get(seq, [])
        assert finished.error is None
        assert finished.num_outputs == len(drawn)
        logprobs = reference.logprobs([*prompt, *drawn])
        check_prompt(one.inbox.prompts.get(seq, []), prompt, logprobs, count)
        for index, (token, found) in enumerate(zip(drawn, one.inbox.logprobs.get(seq, []), strict=True)):
            assert found.logprob == pytest.approx(float(logprobs[len(prompt) + index - 1, token]), abs=LOGPROB_ERROR)
    if way == "preempted":
        assert sum(finished.preemptions for finished in one.inbox.finished.values()) > 0
    one.close()


def test_a_prompt_is_computed_again_for_its_log_probabilities_and_its_blocks_serve_others(
    reference: Reference,
) -> None:
    one = bench(reference)
    prompt = ragged_prompts(random.Random(3))[-1]
    plain = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    first = one.submit(prompt, SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1))
    one.run()
    second = one.submit(prompt, plain)
    one.run()
    third = one.submit(prompt, SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1))
    one.run()
    hits = (len(prompt) - 1) // BLOCK * BLOCK
    assert [one.inbox.finished[seq].num_cached for seq in (first, second, third)] == [0, hits, 0]
    check_prompt(one.inbox.prompts[third], prompt, reference.logprobs(prompt), 1)
    one.close()


@pytest.mark.parametrize("num_read", [1, 2 * BLOCK - 1, 2 * BLOCK + 5, 79, 80])
def test_a_resumed_prompt_goes_on_behind_the_positions_that_the_client_has(reference: Reference, num_read: int) -> None:
    one = bench(reference, max_num_batched_tokens=32)
    rng = random.Random(num_read)
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(81)]
    one.submit(prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    one.run()
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, prompt_logprobs=2)
    outputs = [7, 8, 9] if num_read == 80 else []
    seq = one.submit(prompt, params, outputs=outputs, num_read=num_read)
    one.run()
    parts = one.inbox.prompts.get(seq, [])
    assert [part.start for part in parts[:1]] == [num_read][: len(prompt) - 1 - num_read]
    check_prompt(parts, prompt, reference.logprobs(prompt), 2)
    assert one.inbox.finished[seq].num_cached == num_read // BLOCK * BLOCK
    assert len(one.inbox.tokens[seq]) == 5 - len(outputs)
    one.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", fast_and_slow([2], fresh_seeds(1)))
@pytest.mark.sampled(4)
def test_pooled_states(reference: Reference, way: str, seed: int) -> None:
    rng = random.Random(seed)
    one = bench(reference, **WAYS[way])
    prompts = ragged_prompts(rng)
    asked: list[tuple[int, list[int], str]] = []
    for prompt in [*prompts, *prompts]:
        pooling = rng.choice(["last", "mean"])
        params = SamplingParams(max_tokens=0, pooling=pooling)  # type: ignore[arg-type]
        asked.append((one.submit(prompt, params), prompt, pooling))
        one.submit(prompt, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    one.run()
    for seq, prompt, pooling in asked:
        states = reference.states(prompt)
        expected = states[-1] if pooling == "last" else states.mean(dim=0)
        torch.testing.assert_close(torch.tensor(one.inbox.pooled[seq]), expected, atol=STATE_ERROR, rtol=STATE_ERROR)
        assert one.inbox.finished[seq].num_outputs == 0
        assert seq not in one.inbox.tokens
    if way == "preempted":
        assert sum(finished.preemptions for finished in one.inbox.finished.values()) > 0
    one.close()
