"""The grouped products of a mixture against one product for each pair of a token and an expert."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.engine.attention.scene import KERNEL_DEVICE
from tests.engine.kernels.checking import ROUNDING, draw, relative_error
from tests.seeds import fresh_seeds
from tiercel.engine.kernels.experts import ExpertBlocks, GroupedExperts

pytestmark = pytest.mark.usefixtures("poisoned")


def choose(rng: random.Random, tokens: int, per_token: int, experts: int) -> Tensor:
    """Return distinct experts for each token, most of them from a few experts."""
    few = rng.sample(range(experts), max(per_token, experts // 2))
    return torch.tensor([rng.sample(few, per_token) for _ in range(tokens)], device=KERNEL_DEVICE)


def expected(x: Tensor, chosen: Tensor, gate_ups: list[Tensor], downs: list[Tensor]) -> Tensor:
    """Compute in float64, rounding where the kernels round."""
    out = torch.empty(*chosen.shape, x.shape[1], dtype=torch.float64)
    for token, row in enumerate(chosen.tolist()):
        for place, expert in enumerate(row):
            gate, up = (gate_ups[expert].double() @ x[token].double()).to(x.dtype).chunk(2)
            out[token, place] = downs[expert].double() @ (F.silu(gate) * up).double()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seed", [1, 2, *fresh_seeds(2)])
@pytest.mark.sampled(5)
def test_every_pair_gets_the_product_of_its_expert(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    experts = rng.choice((1, 3, 8, 20))
    per_token = rng.randrange(1, min(experts, 4) + 1)
    tokens, hidden, inner = rng.choice((1, 5, 40)), rng.choice((16, 33, 96)), rng.choice((8, 20, 70))
    gate_ups = [draw(seed + at, 2 * inner, hidden, dtype=dtype) / 8 for at in range(experts)]
    downs = [draw(seed - at, hidden, inner, dtype=dtype) / 8 for at in range(experts)]
    x, chosen = draw(seed, tokens, hidden, dtype=dtype), choose(rng, tokens, per_token, experts)

    got = GroupedExperts(*([one.to(KERNEL_DEVICE) for one in each] for each in (gate_ups, downs))).forward(
        x.to(KERNEL_DEVICE), chosen
    )

    assert got.dtype is dtype
    assert relative_error(got.cpu(), expected(x, chosen, gate_ups, downs)) < 3 * ROUNDING[dtype], f"seed {seed}"


@pytest.mark.parametrize("seed", [1, *fresh_seeds(3)])
def test_blocks_hold_every_pair_once_and_their_number_depends_on_the_tokens_alone(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        experts = rng.randrange(1, 30)
        per_token, tokens = rng.randrange(1, min(experts, 8) + 1), rng.choice((1, 2, 17, 300))
        counts = set()
        for chosen in (
            choose(rng, tokens, per_token, experts),
            torch.arange(per_token, device=KERNEL_DEVICE).expand(tokens, -1),  # all tokens alike
            torch.arange(tokens * per_token, device=KERNEL_DEVICE).view(tokens, -1) % experts,  # spread
        ):
            blocks = ExpertBlocks.of(chosen, experts)
            counts.add(blocks.starts.shape[0])
            seen: list[int] = []
            for expert, start, end in zip(
                blocks.experts.tolist(), blocks.starts.tolist(), blocks.ends.tolist(), strict=True
            ):
                pairs = blocks.order[start:end].tolist() if start < end else []
                assert len(pairs) <= blocks.rows
                assert all(chosen.flatten()[pair] == expert for pair in pairs)
                seen += pairs
            assert sorted(seen) == list(range(tokens * per_token)), f"seed {seed}"
        assert len(counts) == 1, f"seed {seed}"
