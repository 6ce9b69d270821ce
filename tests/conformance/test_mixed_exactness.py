"""Weights in 16 bits with float32 activations against transformers in float32 with the same weights.

On the AVX2 and the portable kernels, which every x86 machine runs. With KV in float32 only the order of sums differs.
With KV in 16 bits, as `auto` chooses, keys and values are rounded too; a token may then differ where the margin of the
two likeliest is smaller than that rounding moves a logit.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.conformance.models import NATIVE_FAMILIES, VOCAB_SIZE, Family, make_checkpoint
from tests.engine.models.paged_run import PagedRun
from tests.engine.native.classes import library_of
from tiercel.engine.attention.native import NativeAttention
from tiercel.engine.models.config import parse_decoder, read_config
from tiercel.engine.models.decoder import Decoder
from tiercel.engine.models.precision import Precision
from tiercel.engine.models.registry import load_model, open_ops
from tiercel.engine.models.weights import ContentDigest, load_weights, open_checkpoint
from tiercel.engine.native.library import NativeLibrary
from tiercel.engine.native.table import CpuClass
from tiercel.settings.settings import EngineSettings

CPU = torch.device("cpu")
CLASSES = [pytest.param(CpuClass.PORTABLE, marks=pytest.mark.slow), CpuClass.AVX2]
FEW: tuple[Family, ...] = ("llama3", "qwen2", "qwen3_moe")  # without `make test-slow`
PROMPTS, PROMPT, OUTPUTS = 4, 40, 24  # tokens
TOLERANCE = 1e-4  # of a logit, with KV in float32
MARGIN = {torch.float32: 1e-4, torch.bfloat16: 0.04}  # the logits have a deviation of about 0.8
"""Differences of the two likeliest logits below which another token is accepted, by the type of KV."""


@pytest.fixture(
    scope="module",
    params=[family if family in FEW else pytest.param(family, marks=pytest.mark.slow) for family in NATIVE_FAMILIES],
)
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """Return a model of transformers in float32 with weights rounded to bfloat16, and its folder."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, folder, seed=7, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model, folder


def open_model(folder: Path, library: NativeLibrary, kv: torch.dtype) -> Decoder:
    """Open a model with KV of a type that `auto` does not choose for it."""
    precision = Precision(weights=torch.bfloat16, activations=torch.float32, kv=kv)
    ops = open_ops(CPU, NativeAttention(library), library)
    model = Decoder(parse_decoder(read_config(folder)), ops, precision, CPU)
    load_weights(dict(model.targets()), open_checkpoint(folder), ContentDigest(), None)
    model.pack(library)
    return model


def draw_prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB_SIZE, (PROMPT,), generator=generator) for _ in range(PROMPTS)]


def expected_logits(twin: PreTrainedModel, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        return twin(input_ids=tokens[None], use_cache=False).logits[0].float()


@pytest.mark.parametrize("cpu_class", CLASSES)
def test_logits_are_those_of_float32(twins: tuple[PreTrainedModel, Path], cpu_class: CpuClass) -> None:
    twin, folder = twins
    model = open_model(folder, library_of(cpu_class), torch.float32)
    for tokens in draw_prompts():
        logits = PagedRun(model, 1, PROMPT).prefill(tokens, 13)
        torch.testing.assert_close(logits, expected_logits(twin, tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kv", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cpu_class", CLASSES)
def test_greedy_tokens_are_those_of_float32(
    twins: tuple[PreTrainedModel, Path], cpu_class: CpuClass, kv: torch.dtype
) -> None:
    twin, folder = twins
    library = library_of(cpu_class)
    model = open_model(folder, library, kv)
    prompts = draw_prompts()
    run = PagedRun(model, PROMPTS, PROMPT + OUTPUTS)

    outputs = [[int(run.prefill(prompt, 16, index)[-1].argmax())] for index, prompt in enumerate(prompts)]
    for step in range(OUTPUTS - 1):
        pieces = [(index, PROMPT + step, torch.tensor([tokens[-1]])) for index, tokens in enumerate(outputs)]
        for tokens, logits in zip(outputs, run.step(pieces), strict=True):
            tokens.append(int(logits[-1].argmax()))

    excused = 0
    for prompt, tokens in zip(prompts, outputs, strict=True):
        expected = twin.generate(prompt[None], max_new_tokens=OUTPUTS, do_sample=False)[0, PROMPT:].tolist()
        if tokens == expected:
            continue
        first = next(index for index in range(OUTPUTS) if tokens[index] != expected[index])
        logits = expected_logits(twin, torch.cat((prompt, torch.tensor(expected[:first], dtype=torch.int64))))[-1]
        best, second = logits.topk(2).values.tolist()
        assert best - second < MARGIN[kv], f"token {first} differs: {tokens[first]}, not {expected[first]}"
        excused += 1
    print(f"ties excused: {excused}")


@pytest.mark.parametrize("cpu_class", CLASSES)
def test_auto_keeps_weights_and_kv_in_16_bits_below_avx512(
    twins: tuple[PreTrainedModel, Path], cpu_class: CpuClass
) -> None:
    twin, folder = twins
    library = library_of(cpu_class)
    model = load_model(EngineSettings(model=str(folder)), CPU, NativeAttention(library), library=library)
    (tokens, *_) = draw_prompts()

    got, expected = PagedRun(model, 1, PROMPT).prefill(tokens, 16), expected_logits(twin, tokens)

    assert model.precision == Precision(torch.bfloat16, torch.float32, torch.bfloat16)
    errors = (got - expected).abs().amax(dim=-1)
    print(f"largest difference of a logit {errors.max().item():.2g}")
    # Where two experts are almost equally likely, the rounding of KV may choose the other one.
    is_mixture = twin.config.architectures[0].startswith(("Qwen3Moe", "Mixtral", "Olmoe"))
    assert errors.quantile(0.9 if is_mixture else 1.0) < MARGIN[torch.bfloat16] / 2
