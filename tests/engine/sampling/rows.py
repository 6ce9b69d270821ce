"""Rows with random parameters, for tests of the sampler."""

import torch

from tiercel.values.request import SamplingParams

END_TOKENS = (0, 1)


def random_logits(seed, rows, vocab_size, spread=3.0):
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def random_params(rng, vocab_size, greedy=False):
    """Return random parameters, with every feature on or off."""

    def maybe(value, off):
        return value if rng.random() < 0.4 else off

    return SamplingParams(
        temperature=0.0 if greedy else float(rng.choice([0.3, 0.8, 1.0, 1.7])),
        top_p=maybe(float(rng.uniform(0.3, 0.99)), 1.0),
        top_k=maybe(int(rng.integers(1, vocab_size + 5)), 0),
        min_p=maybe(float(rng.uniform(0.01, 0.5)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2.0)), 1.0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        logit_bias=maybe(tuple((int(t), float(rng.uniform(-9, 9))) for t in {*rng.integers(0, vocab_size, 3)}), ()),
        min_tokens=maybe(3, 0),
        stop_token_ids=maybe((5, 7), ()),
        logprobs=maybe(int(rng.integers(0, 6)), None),
        seed=int(rng.integers(-(2**63), 2**63 - 1)),
        allowed_token_ids=maybe(tuple(rng.permutation(vocab_size)[: int(rng.integers(9, 16))].tolist()), ()),
        bad_words=maybe(
            tuple(
                tuple(rng.integers(0, vocab_size, int(rng.choice([1, 2, 2, 2, 3, 32]))).tolist())
                for _ in range(rng.integers(1, 2 * vocab_size))
            ),
            (),
        ),
    )
