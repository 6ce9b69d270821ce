"""Models against transformers: logits and greedy tokens, in float32, for any slicing of the tokens."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.conformance.models import (
    FAMILIES,
    MIXTURES,
    NATIVE_FAMILIES,
    TRANSFORMERS_FAMILIES,
    VOCAB_SIZE,
    Family,
    make_checkpoint,
)
from tests.engine.models.paged_run import PagedRun
from tests.seeds import fast_and_slow
from tiercel.engine.attention.base import Attention
from tiercel.engine.attention.grouped import GroupedAttention
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.models.base import Model
from tiercel.engine.models.registry import load_model
from tiercel.engine.native.library import load_library
from tiercel.settings.settings import EngineSettings, ModelImpl

TOLERANCE = 1e-4  # of a logit, float32
MARGIN = 1e-4  # between the two likeliest tokens, below which another token is accepted
PROMPT = 100  # tokens: longer than every window

CPU = torch.device("cpu")
# The last one with the native kernels of this processor for the other operators, too.
BACKENDS: dict[str, Callable[[], Attention]] = {
    "sdpa": SdpaAttention,
    "grouped": GroupedAttention,
    "native": lambda: open_attention("native", CPU),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=FAMILIES)
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """Return a model of transformers and its folder."""
    family: Family = request.param
    folder = tmp_path_factory.mktemp(family)
    return make_checkpoint(family, folder, seed=7), folder


def open_model(folder: Path, impl: ModelImpl = "auto", backend: str = "sdpa", dtype: str = "float32") -> Model:
    settings = EngineSettings(model=str(folder), dtype=dtype, model_impl=impl)
    library = load_library() if backend == "native" else None
    if backend == "native" and library is None:
        pytest.skip("the native library is not compiled")
    return load_model(settings, CPU, BACKENDS[backend](), library=library)


def draw_tokens(length: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))


def expected_logits(twin: PreTrainedModel, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        return twin(input_ids=tokens[None], use_cache=False).logits[0].float()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", fast_and_slow([7, PROMPT], [1, 16]))
@pytest.mark.sampled(6)
def test_logits_do_not_depend_on_how_a_prompt_is_sliced(
    twins: tuple[PreTrainedModel, Path], chunk: int, backend: str
) -> None:
    twin, folder = twins
    model = open_model(folder, backend=backend)
    tokens = draw_tokens(PROMPT)

    logits = PagedRun(model, 1, PROMPT).prefill(tokens, chunk)

    torch.testing.assert_close(logits, expected_logits(twin, tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sampled(9)
def test_ragged_sequences_do_not_see_each_other(twins: tuple[PreTrainedModel, Path], backend: str) -> None:
    twin, folder = twins
    model = open_model(folder, backend=backend)
    prompts = [draw_tokens(length, seed=length) for length in (1, 15, 16, 17, 33, 64, 90)]
    run = PagedRun(model, len(prompts), 96)
    computed = [0] * len(prompts)
    got: list[list[Tensor]] = [[] for _ in prompts]

    for step in range(200):  # slices of 1 to 20 tokens: decodes, chunks and whole prompts
        pieces = [
            (index, computed[index], prompt[computed[index] : computed[index] + (1, 5, 16, 20)[(index + step) % 4]])
            for index, prompt in enumerate(prompts)
            if computed[index] < len(prompt)
        ]
        if not pieces:
            break
        for (index, start, tokens), logits in zip(pieces, run.step(pieces), strict=True):
            computed[index] = start + len(tokens)
            got[index].append(logits)

    for prompt, parts in zip(prompts, got, strict=True):
        torch.testing.assert_close(torch.cat(parts), expected_logits(twin, prompt), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sampled(9)
def test_greedy_tokens_are_those_of_generate(twins: tuple[PreTrainedModel, Path], backend: str) -> None:
    twin, folder = twins
    twin.generation_config.eos_token_id = None
    model = open_model(folder, backend=backend)
    prompts = [draw_tokens(40, seed=seed) for seed in range(4)]
    run = PagedRun(model, len(prompts), 80)

    outputs = [[int(run.prefill(prompt, 16, index)[-1].argmax())] for index, prompt in enumerate(prompts)]
    for step in range(31):
        pieces = [(index, 40 + step, torch.tensor([tokens[-1]])) for index, tokens in enumerate(outputs)]
        for tokens, logits in zip(outputs, run.step(pieces), strict=True):
            tokens.append(int(logits[-1].argmax()))

    excused = 0
    for prompt, tokens in zip(prompts, outputs, strict=True):
        expected = twin.generate(prompt[None], max_new_tokens=32, do_sample=False)[0, 40:].tolist()
        if tokens == expected:
            continue
        first = next(index for index in range(32) if tokens[index] != expected[index])
        logits = expected_logits(twin, torch.cat((prompt, torch.tensor(expected[:first], dtype=torch.int64))))[-1]
        likeliest = logits.topk(2).values
        assert likeliest[0] - likeliest[1] < MARGIN, f"token {first} differs: {tokens[first]}, not {expected[first]}"
        excused += 1
    print(f"ties excused: {excused}")


def test_zeroing_one_block_changes_every_later_token(twins: tuple[PreTrainedModel, Path]) -> None:
    _, folder = twins
    model = open_model(folder)
    tokens = draw_tokens(PROMPT)
    run = PagedRun(model, 1, PROMPT + 1)
    run.prefill(tokens, PROMPT)
    last = (0, PROMPT, torch.tensor([5]))
    before = run.step([last])[0]

    run.kv[run.tables[0, PROMPT // 16 - 1]] = 0  # inside of every window

    assert (run.step([last])[0] - before).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_both_implementations_agree(family: Family, tmp_path: Path) -> None:
    twin = make_checkpoint(family, tmp_path, seed=3)
    tokens = draw_tokens(PROMPT)
    native, other = open_model(tmp_path, "native"), open_model(tmp_path, "transformers")

    assert (native.impl, other.impl) == ("native", "transformers")
    assert (native.layers, native.kv_heads, native.head_dim) == (other.layers, other.kv_heads, other.head_dim)
    assert (native.vocab_size, native.weights_bytes) == (other.vocab_size, other.weights_bytes)
    for model in (native, other):
        logits = PagedRun(model, 1, PROMPT).prefill(tokens, 16)
        torch.testing.assert_close(logits, expected_logits(twin, tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", TRANSFORMERS_FAMILIES)
def test_auto_uses_transformers_for_other_families(family: Family, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)

    assert open_model(tmp_path).impl == "transformers"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama3", "qwen3", "gpt2", *MIXTURES])
def test_half_precision_follows_transformers_in_the_same_dtype(family: Family, dtype: str, tmp_path: Path) -> None:
    twin = make_checkpoint(family, tmp_path, seed=5, dtype=getattr(torch, dtype))
    model = open_model(tmp_path, dtype=dtype)
    tokens = draw_tokens(PROMPT)

    logits, expected = PagedRun(model, 1, PROMPT).prefill(tokens, 16), expected_logits(twin, tokens)

    assert model.precision.weights == getattr(torch, dtype)
    assert (logits - expected).norm() / expected.norm() < (0.03 if dtype == "bfloat16" else 0.004)


@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_weights_stored_in_half_precision_are_computed_in_float32_on_request(family: Family, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path, seed=5, dtype=torch.float16)
    twin = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model = open_model(tmp_path, dtype="float32")
    tokens = draw_tokens(PROMPT)

    logits = PagedRun(model, 1, PROMPT).prefill(tokens, PROMPT)

    torch.testing.assert_close(logits, expected_logits(twin, tokens), atol=TOLERANCE, rtol=0)
