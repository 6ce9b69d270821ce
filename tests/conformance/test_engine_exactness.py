"""The whole engine against transformers' `generate`: greedy, float32, token by token, in every mode.

Where the margin of the two likeliest tokens is under 1e-4 a differing token is no failure (what follows it is not
compared); every test prints how often that rule was used.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.conformance.bench import EngineBench
from tests.conformance.models import MAX_LENGTH, MIXTURES, VOCAB_SIZE, Family, make_checkpoint
from tiercel.values.ids import SeqId
from tiercel.values.request import SamplingParams

FAMILIES: tuple[Family, ...] = ("llama3", "mistral", "qwen2", "qwen3", *MIXTURES, "gpt2", "gemma3", "phi3")
FEW: tuple[Family, ...] = ("llama3", "qwen2", "gemma3", "qwen3_moe")  # without `make test-slow`
# Wide enough that one wrong block changes every sequence (see the control below); other families use the default.
STD_BY_FAMILY = {"llama3": 0.15, "qwen2": 0.2, "gpt2": 0.2, "olmoe": 0.2}
OUTPUTS = 20  # tokens
PROMPTS = 16
LONG = 530  # tokens of one more prompt: longer than the longest chunk
MARGIN = 1e-4
BLOCK = 16


Compare = Callable[[list[list[int]]], None]


@dataclass(frozen=True)
class Scale:
    """The lengths of prompts, and the steps and pools that fit to them. The default is what a CPU is given."""

    short: int = PROMPTS - 4  # prompts
    sharing: int = 4  # prompts that begin alike
    shared: int = 40  # tokens with which they begin
    long: int = LONG  # tokens of one more prompt
    step_tokens: int | None = None
    sequences: int = 17
    max_len: int = 600  # tokens
    small: int = 40  # blocks of a device pool that is too small for all prompts
    large: int = 200  # blocks of one that is not
    tier_bytes: int = 4 << 20  # of DDR and of SSD: small, because the books are checked slot by slot after every step


@dataclass(frozen=True)
class Reference:
    """Prompts and the tokens of transformers."""

    scale: Scale
    folder: Path
    prompts: list[list[int]]
    tokens: list[list[int]]
    margins: list[list[float]]  # of each token over the next likeliest
    logits: list[torch.Tensor]  # [OUTPUTS, vocab] a prompt


@pytest.fixture(
    scope="module",
    params=[family if family in FEW else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES],
)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(request.param, tmp_path_factory.mktemp(request.param))


def make_reference(family: Family, folder: Path, scale: Scale = Scale()) -> Reference:
    """Write a random model of a family, and generate with transformers."""
    torch.set_num_threads(1)
    most = max(MAX_LENGTH, scale.max_len)
    model = make_checkpoint(family, folder, seed=11, std=STD_BY_FAMILY.get(family), max_length=most)
    rng = random.Random(5)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(scale.shared)]
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(2, 90))] for _ in range(scale.short)]
    tails = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 20))] for _ in range(scale.sharing)]
    prompts += [shared + tail for tail in tails]
    prompts.append([rng.randrange(3, VOCAB_SIZE) for _ in range(scale.long)])
    tokens, margins, logits = [], [], []
    for prompt in prompts:
        with torch.inference_mode():
            printed = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=OUTPUTS,
                min_new_tokens=OUTPUTS,
                do_sample=False,
                eos_token_id=None,
                return_dict_in_generate=True,
                output_logits=True,
            )
        rows = torch.cat(printed.logits).float()
        top = rows.topk(2).values
        tokens.append(printed.sequences[0, len(prompt) :].tolist())
        margins.append((top[:, 0] - top[:, 1]).tolist())
        logits.append(rows)
    return Reference(scale, folder, prompts, tokens, margins, logits)


@pytest.fixture
def exact(reference: Reference, record_property: Callable[[str, object], None]) -> Compare:
    """Return a function that compares tokens with the reference, and records how often the margin rule was used."""

    def compare(got: list[list[int]]) -> None:
        record_property("excused_tokens", assert_exact(got, reference))

    return compare


def assert_exact(got: list[list[int]], reference: Reference) -> int:
    """Return the number of prompts that differ after a tie."""
    excused = 0
    for prompt, (ours, theirs, margins) in enumerate(zip(got, reference.tokens, reference.margins, strict=True)):
        for position, (mine, expected) in enumerate(zip(ours, theirs, strict=True)):
            if mine != expected:
                assert margins[position] < MARGIN, f"prompt {prompt}, output {position}: {mine}, expected {expected}"
                excused += 1
                break
    return excused


def bench(reference: Reference, arena_fd: int | None = None, **settings: object) -> EngineBench:
    scale = reference.scale
    if scale.step_tokens is not None:
        steps = {"max_num_batched_tokens": scale.step_tokens, "tbt_goal_s": 0.0}
        settings = {**steps, "num_gpu_blocks_override": scale.large, **settings}
    chosen = {"max_num_seqs": scale.sequences, **settings}
    return EngineBench(reference.folder, arena_fd, max_model_len=scale.max_len, **chosen)


def test_alone(reference: Reference, exact: Compare) -> None:
    one = bench(reference)
    exact([one.greedy([prompt], OUTPUTS)[0] for prompt in reference.prompts])
    assert one.inbox.most_running == 1
    one.close()


@pytest.mark.parametrize("attention", ["sdpa", "grouped", "auto"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.sampled(4)
def test_sixteen_at_once(reference: Reference, exact: Compare, depth: int, attention: str) -> None:
    many = bench(reference, async_scheduling=bool(depth), attention_backend=attention, enable_prefix_caching=False)
    exact(many.greedy(reference.prompts, OUTPUTS))
    assert many.inbox.most_running >= len(reference.prompts) - 1
    assert many.gauges.prefix_hits == 0
    many.close()


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 7, 16, 512])
@pytest.mark.sampled(3)
def test_chunked_prefill(reference: Reference, exact: Compare, chunk: int) -> None:
    chunked = bench(reference, long_prefill_token_threshold=chunk, max_num_batched_tokens=2048)
    exact(chunked.greedy(reference.prompts, OUTPUTS))
    longest = max(len(prompt) for prompt in reference.prompts)
    chunks = -(-longest // chunk)
    assert chunked.gauges.steps >= chunks + OUTPUTS - 1
    assert chunks > 1
    chunked.close()


def test_prefix_hits(reference: Reference, exact: Compare) -> None:
    warm = bench(reference)
    exact(warm.greedy(reference.prompts, OUTPUTS))
    cold_hits = warm.gauges.prefix_hits
    exact(warm.greedy(reference.prompts, OUTPUTS))
    hits = warm.gauges.prefix_hits - cold_hits
    assert hits == sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in reference.prompts) > 0
    warm.close()


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.sampled(4)
def test_preempted_by_a_cache_that_is_too_small(reference: Reference, exact: Compare, prefix_caching: bool) -> None:
    small = bench(reference, num_gpu_blocks_override=reference.scale.small, enable_prefix_caching=prefix_caching)
    exact(small.greedy(reference.prompts, OUTPUTS))
    assert small.gauges.preemptions > 0
    small.close()


def test_log_probabilities_are_those_of_transformers(reference: Reference) -> None:
    one = bench(reference)
    one.greedy(reference.prompts, OUTPUTS, logprobs=5)
    for prompt, rows in enumerate(reference.logits):
        expected = rows.log_softmax(-1)
        for position, found in enumerate(one.inbox.logprobs[prompt + 1]):
            if found.token != reference.tokens[prompt][position]:
                break  # a tie: checked by the other tests
            assert found.logprob == pytest.approx(expected[position, found.token].item(), abs=1e-3)
            assert list(found.top_logprobs) == pytest.approx(expected[position].topk(5).values.tolist(), abs=1e-3)
    one.close()


def test_the_tests_detect_a_wrong_block(reference: Reference) -> None:
    """The control: zeroing one block of each sequence after two tokens changes the tokens of the sequences.

    Of all but one, because a sequence may have most of its tokens before the others have two.
    """
    broken = bench(reference, enable_prefix_caching=False)
    asked = SamplingParams(temperature=0.0, max_tokens=OUTPUTS, ignore_eos=True)
    expected = {
        broken.submit(prompt, asked): tokens
        for prompt, tokens in zip(reference.prompts, reference.tokens, strict=True)
        if BLOCK < len(prompt) < LONG  # one of many blocks need not change a long sequence
    }
    while any(len(broken.inbox.tokens.get(seq, [])) < 2 for seq in expected):
        broken.engine.loop.step()
    for seq in expected:
        broken.engine.tiers.device.kv[broken.engine.cache.slots(SeqId(seq))[-2]] = 0
    broken.run()
    unmoved = [seq for seq, tokens in expected.items() if broken.inbox.tokens[seq] == tokens]
    assert len(expected) >= 12
    assert len(unmoved) <= 1
    broken.close()
