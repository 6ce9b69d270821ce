"""Ids without a token (padded rows and holes of the embedding) are never drawn nor listed, on any path."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conformance.bench import EngineBench
from tests.conformance.models import VOCAB_SIZE, make_checkpoint
from tests.engine.models.paged_run import PagedRun
from tests.seeds import fresh_seeds
from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.models.logit_mask import LogitMask, read_logit_mask
from tiercel.engine.models.registry import load_model
from tiercel.settings.settings import EngineSettings
from tiercel.values.request import SamplingParams

CPU = torch.device("cpu")
SEED = fresh_seeds(1)[0]
TOKENLESS = frozenset({17, 50, 51, 52, *range(200, VOCAB_SIZE)})
PROMPT = [3, 4, 201, 5, 6, 7, 3, 4, 201, 5, 6, 7, 3, 4]  # a prompt may have them: what follows 4 is proposed


def write_tokenizer(folder: Path, ids: list[int]) -> None:
    vocab = {f"t{token}": token for token in ids[:-1]}
    added = [{"id": ids[-1], "content": "<end>", "special": True}]
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": added})
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that likes ids without a token best."""
    path = tmp_path_factory.mktemp("padded")
    make_checkpoint("qwen3", path, seed=SEED)
    weights = load_file(path / "model.safetensors")
    name = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
    weights[name][sorted(TOKENLESS)] *= 8
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    write_tokenizer(path, [token for token in range(VOCAB_SIZE) if token not in TOKENLESS])
    return path


def logits_of(folder: Path, impl: str, **settings: object) -> Tensor:
    chosen = {"model": str(folder), "dtype": "float32", "model_impl": impl, **settings}
    model = load_model(EngineSettings(**chosen), CPU, SdpaAttention())  # type: ignore[arg-type]
    return PagedRun(model, 1, 32).prefill(torch.tensor(PROMPT), 5)


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_other_logits_are_what_they_are_without_a_tokenizer(folder: Path, impl: str, tmp_path: Path) -> None:
    masked, whole = logits_of(folder, impl), logits_of(folder, impl, tokenizer_folder=str(tmp_path))
    ids = sorted(TOKENLESS)
    assert set(whole.argmax(dim=-1).flatten().tolist()) & TOKENLESS, "the model does not try them"
    assert (masked[..., ids] == -torch.inf).all()
    masked[..., ids] = whole[..., ids]
    assert torch.equal(masked, whole)


PLANS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.5},
    "top_k": {"temperature": 1.5, "top_k": 40},
    "top_p": {"temperature": 1.5, "top_p": 0.9},
    "min_p": {"temperature": 1.5, "min_p": 0.01},
    "penalties": {"temperature": 1.0, "repetition_penalty": 0.5, "presence_penalty": -2.0, "frequency_penalty": 1.0},
    "bias": {"temperature": 0.7, "logit_bias": ((201, 100.0), (17, 100.0))},
    "lookup": {"temperature": 0.0, "prompt_lookup_num_tokens": 4},
    "drawn lookup": {"temperature": 0.7, "prompt_lookup_num_tokens": 4, "repetition_penalty": 0.6},
    "allowed": {"temperature": 1.0, "allowed_token_ids": (17, 201, 9, 10)},
    "bad words": {"temperature": 1.0, "bad_words": ((9,),)},
    "min_tokens": {"temperature": 1.0, "min_tokens": 10},
}


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_no_path_draws_or_lists_an_id_without_a_token(folder: Path, impl: str) -> None:
    bench = EngineBench(folder, model_impl=impl)
    asked = {"max_tokens": 24, "ignore_eos": True, "logprobs": 20}
    seqs = {name: bench.submit(PROMPT, SamplingParams(**asked, **plan)) for name, plan in PLANS.items()}  # type: ignore[arg-type]
    scored = bench.submit(PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=VOCAB_SIZE, logprobs=VOCAB_SIZE))
    bench.run()
    for name, seq in seqs.items():
        tokens = bench.inbox.tokens[seq]
        assert len(tokens) == 24 and not TOKENLESS & set(tokens), name
        for entry in bench.inbox.logprobs[seq]:
            assert len(entry.top_tokens) == 20 and not TOKENLESS & set(entry.top_tokens), name
            assert entry.logprob > -1000
    assert set(bench.inbox.tokens[seqs["allowed"]]) <= {9, 10}
    (drawn,) = bench.inbox.logprobs[scored]
    assert set(drawn.top_tokens) == set(range(VOCAB_SIZE)) - TOKENLESS
    assert sum(2.718281828**logprob for logprob in drawn.top_logprobs) == pytest.approx(1, abs=1e-4)
    for part in bench.inbox.prompts[scored]:
        assert part.num_top == VOCAB_SIZE - len(TOKENLESS)
        assert not TOKENLESS & set(memoryview(part.top_tokens).cast("I"))
        logprobs = memoryview(part.logprobs).cast("f").tolist()
        expected = [token in TOKENLESS for token in PROMPT[part.start + 1 : part.end + 1]]
        assert [logprob == -9999.0 for logprob in logprobs] == expected[: len(logprobs)]
    bench.engine.close()


def test_an_end_token_is_drawn_even_if_the_tokenizer_lacks_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, [0, 1, 2, 3])
    mask = read_logit_mask(tmp_path, 8, (6,), CPU)
    assert isinstance(mask, LogitMask)
    assert mask.apply_no_sync(torch.zeros(2, 8)).tolist() == [[0, 0, 0, 0, -torch.inf, -torch.inf, 0, -torch.inf]] * 2


def test_tokenizers_of_every_form_are_read(tmp_path: Path) -> None:
    assert read_logit_mask(tmp_path, 4, (), CPU) is None  # no file
    path = tmp_path / "tokenizer.json"
    for text in ("", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": {"vocab": {"a": "b"}}}'):
        path.write_text(text)
        assert read_logit_mask(tmp_path, 4, (), CPU) is None
    path.write_text(json.dumps({"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.0]]}}))
    unigram = read_logit_mask(tmp_path, 4, (), CPU)
    assert unigram is not None
    assert unigram.apply_no_sync(torch.zeros(1, 4)).isinf().tolist() == [[False, False, True, True]]
    write_tokenizer(tmp_path, [*range(9)])
    assert read_logit_mask(tmp_path, 9, (), CPU) is read_logit_mask(tmp_path, 5, (), CPU) is None
