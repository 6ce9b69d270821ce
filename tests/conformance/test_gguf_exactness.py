"""GGUF files: the logits of the model that they mean, in transformers."""

from pathlib import Path

import pytest
import torch

from tests.conformance.test_quantized_exactness import (
    CPU,
    MOST_ROUNDING,
    difference_of,
    load,
    rounding_over_transformers,
)
from tests.engine.models.paged_run import PagedRun
from tests.modelfile.written import BUILDERS, TOKENS, write_model
from tests.seeds import fresh_seeds
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.models.registry import load_model
from tiercel.engine.native.library import find_library
from tiercel.modelfile.folder import unfold_model
from tiercel.settings.settings import EngineSettings

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
CASES = [
    *((family, kind) for family in BUILDERS for kind in ("F32", "Q6_K")),
    *((family, kind) for family in ("llama", "qwen2") for kind in KINDS if kind not in ("F32", "Q6_K")),
]
SEED = fresh_seeds(1)[0]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(("family", "kind"), CASES)
@pytest.mark.sampled(8)
def test_a_file_gives_the_logits_of_the_model_that_it_means(family: str, kind: str, tmp_path: Path) -> None:
    reference = write_model(tmp_path / "a.gguf", family, kind, SEED)
    folder = unfold_model(tmp_path / "a.gguf", tmp_path / "cache")
    assert difference_of(reference, load(folder), SEED, len(TOKENS)) < 1e-3, f"seed {SEED}"
    rounding = rounding_over_transformers(reference, load(folder, "bfloat16"), torch.bfloat16, SEED, len(TOKENS))
    assert rounding < MOST_ROUNDING, f"seed {SEED}"


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # the head of the second one is its embedding
@pytest.mark.sampled(5)
def test_native_kernels_give_the_same(family: str, kind: str, tmp_path: Path) -> None:
    library = find_library()
    if isinstance(library, str):
        pytest.skip(library)
    reference = write_model(tmp_path / "a.gguf", family, kind, SEED)
    folder = unfold_model(tmp_path / "a.gguf", tmp_path / "cache")
    settings = EngineSettings(model=str(folder), dtype="bfloat16")
    model = load_model(settings, CPU, open_attention("native", CPU), library=library)
    assert model.products == "native"
    rounding = rounding_over_transformers(reference, model, torch.bfloat16, SEED, len(TOKENS))
    assert rounding < MOST_ROUNDING, f"seed {SEED}"


def test_layers_of_one_product_may_have_different_blocks(tmp_path: Path) -> None:
    """As files of the kind Q4_K_M have them: the values of some layers have 6 bits, all else 4."""
    tokens = torch.arange(3, 27)
    write_model(tmp_path / "a.gguf", "qwen3", "Q4_K", 1)
    whole = PagedRun(load(unfold_model(tmp_path / "a.gguf", tmp_path / "cache")), 1, 24).prefill(tokens, 7)
    reference = write_model(tmp_path / "b.gguf", "qwen3", "Q4_K", 1, {"v_proj": "Q6_K", "embed_tokens": "Q6_K"})
    model = load(unfold_model(tmp_path / "b.gguf", tmp_path / "cache"))
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
    mixed = PagedRun(model, 1, 24).prefill(tokens, 7)
    assert (mixed - expected).abs().max() < 1e-3
    assert (mixed - whole).abs().max() > 1e-2  # it is another model
