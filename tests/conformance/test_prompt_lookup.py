"""Prompt lookup on real models: the tokens are those without it, greedy and sampled, alone and in a batch."""

import random
from pathlib import Path

import pytest
import torch

from tests.conformance.bench import EngineBench
from tests.conformance.models import VOCAB_SIZE, Family, make_checkpoint
from tests.seeds import fresh_seeds
from tiercel.values.request import SamplingParams

OUTPUTS = 60


@pytest.fixture(params=["llama3", "qwen2"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family: Family = request.param
    torch.set_num_threads(1)
    make_checkpoint(family, tmp_path, seed=11)
    return tmp_path


@pytest.mark.parametrize("seed", (3, *fresh_seeds(1)))
@pytest.mark.sampled(1)
def test_tokens_are_those_without_prompt_lookup(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 40) for _ in range(rng.randrange(5, 60))] for _ in range(6)]
    # Few likely tokens, so that texts repeat and proposals are right now and then.
    few = tuple((token, 30.0) for token in rng.sample(range(3, VOCAB_SIZE), 3))
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.0]), seed=rng.randrange(1 << 30), top_k=rng.choice([0, 2]),
            max_tokens=OUTPUTS, min_tokens=rng.choice([0, 9]), logit_bias=few if rng.random() < 0.7 else (),
        )
        for _ in prompts
    ]  # fmt: skip
    texts: list[list[list[int]]] = []
    accepted: list[int] = []
    for lookup_tokens, max_num_seqs in ((0, 16), (4, 16), (7, 2), (16, 1)):
        bench = EngineBench(folder, max_num_seqs=max_num_seqs)
        try:
            asked = [SamplingParams(**{**_fields(one), "prompt_lookup_num_tokens": lookup_tokens}) for one in params]
            seqs = [bench.submit(prompt, one) for prompt, one in zip(prompts, asked, strict=True)]
            bench.run()
            texts.append([bench.inbox.tokens[seq] for seq in seqs])
            accepted.append(bench.gauges.accepted_tokens)
        finally:
            bench.close()
    assert texts[1:] == texts[:1] * 3
    assert accepted[0] == 0
    assert min(accepted[1:]) > 0


def _fields(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in params.__struct_fields__}
