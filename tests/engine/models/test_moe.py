"""Mixtures of experts against those of transformers: routing, experts that are hit by no token, by all, and by some."""

import random
from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from tests.engine.kernels.checking import relative_error
from tests.engine.native.classes import CLASSES, library_of
from tests.seeds import fresh_seeds
from tiercel.engine.attention.native import NativeAttention
from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.attention.triton import TritonAttention
from tiercel.engine.measure.step_times import spread_tokens
from tiercel.engine.models.config import NATIVE_FAMILIES, ConfigFields
from tiercel.engine.models.mixture_config import MixtureConfig, parse_mixture
from tiercel.engine.models.moe import MixtureMLP, choose_experts
from tiercel.engine.models.native_ops import NativeOps
from tiercel.engine.models.ops import Ops
from tiercel.engine.models.precision import Precision
from tiercel.engine.models.torch_ops import TorchOps
from tiercel.engine.models.triton_ops import TritonOps
from tiercel.engine.native.table import CpuClass

CPU = torch.device("cpu")
HIDDEN, INNER = 32, 24
FLOAT32 = Precision.of(torch.float32)


def make_qwen3(experts: int, per_token: int, normalizes: bool) -> tuple[nn.Module, transformers.PretrainedConfig]:
    config = transformers.Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=experts, num_experts_per_tok=per_token,
        norm_topk_prob=normalizes,
    )  # fmt: skip
    return Qwen3MoeSparseMoeBlock(config), config


def make_mixtral(experts: int, per_token: int, _: bool) -> tuple[nn.Module, transformers.PretrainedConfig]:
    config = transformers.MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=experts, num_experts_per_tok=per_token
    )
    return MixtralSparseMoeBlock(config), config


def make_olmoe(experts: int, per_token: int, normalizes: bool) -> tuple[nn.Module, transformers.PretrainedConfig]:
    config = transformers.OlmoeConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_experts=experts, num_experts_per_tok=per_token,
        norm_topk_prob=normalizes,
    )  # fmt: skip
    return OlmoeSparseMoeBlock(config), config


MAKERS = {"Qwen3Moe": make_qwen3, "Mixtral": make_mixtral, "Olmoe": make_olmoe}


class Twins:
    """A mixture of transformers, and ours with the same weights."""

    def __init__(
        self,
        family: str = "Qwen3Moe",
        experts: int = 6,
        per_token: int = 2,
        normalizes: bool = True,
        seed: int = 1,
        ops: Ops | None = None,
        precision: Precision = FLOAT32,
        piece_bytes: int = 64 << 20,
    ) -> None:
        self.theirs, config = MAKERS[family](experts, per_token, normalizes)
        config._experts_implementation = "grouped_mm"  # the default of a whole model
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            for parameter in self.theirs.parameters():
                parameter.normal_(0.0, 0.3)
        self.theirs.to(precision.weights).to(precision.activations).requires_grad_(False)
        native = NATIVE_FAMILIES[f"{family}ForCausalLM"].mixture
        assert native is not None
        self.config: MixtureConfig = parse_mixture(ConfigFields(config.to_dict(), ""), native, 1)
        chosen_ops = ops or TorchOps(SdpaAttention())
        self.ours = MixtureMLP(HIDDEN, self.config, chosen_ops, precision, CPU, piece_bytes)
        self.targets = dict(self.ours.targets(""))
        names, experts_module = self.config.names, self.theirs.get_submodule("experts")
        self.targets[f"{names.block}gate.weight"].copy_(self.theirs.get_submodule("gate").weight)  # type: ignore[arg-type]
        for expert in range(experts):
            place = f"{names.block}experts.{expert}."
            gate, up = experts_module.gate_up_proj[expert].chunk(2)  # type: ignore[index]
            self.targets[f"{place}{names.gate}.weight"].copy_(gate)
            self.targets[f"{place}{names.up}.weight"].copy_(up)
            self.targets[f"{place}{names.down}.weight"].copy_(experts_module.down_proj[expert])  # type: ignore[index]

    def expected(self, x: Tensor) -> Tensor:
        return self.theirs(x[None])[0]

    def poison(self, expert: int) -> None:
        """Make an expert that must not be read."""
        for name, target in self.targets.items():
            if f"experts.{expert}." in name:
                target.fill_(torch.nan)

    def steer(self, expert: int, weight: float) -> None:
        """Make the router like or avoid an expert for inputs above 0."""
        self.targets[f"{self.config.names.block}gate.weight"][expert] = weight


def draw(tokens: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize("family", MAKERS)
def test_tokens_are_routed_as_transformers_rounds(family: str, normalizes: bool, dtype: torch.dtype) -> None:
    twins = Twins(family, experts=10, per_token=4, normalizes=normalizes, precision=Precision.of(dtype))

    logits, shares, chosen = twins.theirs.get_submodule("gate")(draw(50, dtype=dtype))
    our_chosen, our_shares = choose_experts(logits, twins.config)

    assert torch.equal(our_chosen, chosen)
    assert our_shares.dtype is shares.dtype
    assert torch.equal(our_shares, shares)


@pytest.mark.parametrize("seed", [1, 2, *fresh_seeds(3)])
@pytest.mark.parametrize("family", MAKERS)
def test_outputs_are_those_of_transformers(family: str, seed: int) -> None:
    rng = random.Random(seed)
    experts = rng.randrange(1, 12)
    twins = Twins(family, experts, rng.randrange(1, experts + 1), rng.random() < 0.5, seed, piece_bytes=2000)
    for tokens in (1, rng.randrange(2, 8), rng.randrange(8, 90)):
        x = draw(tokens, seed)
        torch.testing.assert_close(twins.ours.forward(x), twins.expected(x), atol=1e-5, rtol=1e-5, msg=f"seed {seed}")


@pytest.mark.parametrize("family", MAKERS)
def test_outputs_in_16_bits_are_those_of_transformers(family: str) -> None:
    twins = Twins(family, precision=Precision.of(torch.bfloat16))
    x = draw(40, dtype=torch.bfloat16)

    assert relative_error(twins.ours.forward(x), twins.expected(x)) < 5e-3


@pytest.mark.parametrize(("experts", "per_token"), [(1, 1), (5, 5), (5, 1)])
def test_one_expert_and_all_experts(experts: int, per_token: int) -> None:
    twins = Twins(experts=experts, per_token=per_token)
    x = draw(9)

    torch.testing.assert_close(twins.ours.forward(x), twins.expected(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 20])
def test_an_expert_that_no_token_chose_is_not_read(tokens: int) -> None:
    twins = Twins()
    x = draw(tokens).abs()
    twins.steer(3, -50.0)
    twins.theirs.get_submodule("gate").weight[3] = -50.0  # type: ignore[index]
    expected = twins.expected(x)
    twins.poison(3)

    torch.testing.assert_close(twins.ours.forward(x), expected, atol=1e-5, rtol=1e-5)


def test_an_expert_that_all_tokens_chose_counts_for_all() -> None:
    twins = Twins()
    x = draw(20).abs()
    twins.steer(3, 50.0)
    twins.theirs.get_submodule("gate").weight[3] = 50.0  # type: ignore[index]
    torch.testing.assert_close(twins.ours.forward(x), twins.expected(x), atol=1e-5, rtol=1e-5)

    twins.poison(3)
    assert twins.ours.forward(x).isnan().all()


@pytest.mark.parametrize("cpu_class", CLASSES)
@pytest.mark.parametrize("activations", [torch.float32, torch.bfloat16])
def test_native_experts_give_a_token_the_same_bits_in_any_batch(cpu_class: CpuClass, activations: torch.dtype) -> None:
    library = library_of(cpu_class)
    precision = Precision(torch.bfloat16, activations, activations)
    ops = NativeOps(library, NativeAttention(library))
    twins = Twins(experts=7, per_token=3, ops=ops, precision=precision)
    x = draw(30, dtype=activations)
    expected = twins.expected(x)
    twins.ours.pack(lambda _: library)

    together = twins.ours.forward(x)

    assert relative_error(together, expected) < (1e-5 if activations is torch.float32 else 1e-2)
    for start, end in ((0, 1), (3, 11), (29, 30)):
        assert torch.equal(twins.ours.forward(x[start:end]), together[start:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grouped_products_give_what_single_ones_give(dtype: torch.dtype) -> None:
    grouped = Twins(experts=9, per_token=3, ops=TritonOps(TritonAttention(4)), precision=Precision.of(dtype))
    single = Twins(experts=9, per_token=3, precision=Precision.of(dtype))
    assert grouped.ours.join()
    assert not single.ours.join()

    for tokens in (1, 40):
        x = draw(tokens, dtype=dtype)
        assert relative_error(grouped.ours.forward(x), single.ours.forward(x)) < (1e-5 if dtype.itemsize == 4 else 2e-3)


def test_rounded_shares_matter_in_16_bits() -> None:
    """The control of the test of routing: a family's rounding of shares shows in their bits."""
    twins = Twins("Mixtral", precision=Precision.of(torch.bfloat16))
    logits, shares, _ = twins.theirs.get_submodule("gate")(draw(50, dtype=torch.bfloat16))

    rounded = choose_experts(logits, replace(twins.config, rounds_shares=True))[1]

    assert not torch.equal(rounded.float(), shares)


def test_tokens_of_measured_steps_hit_as_many_experts_as_independent_tokens_would() -> None:
    """The step times of a mixture depend on its distinct experts; equal tokens would hit those of one."""
    experts, per_token, tokens, vocab_size = 32, 2, 16, 50_000
    twins = Twins(experts=experts, per_token=per_token)
    embedding = torch.randn(vocab_size, HIDDEN, generator=torch.Generator().manual_seed(5))

    def hit(ids: Tensor) -> int:
        logits = twins.theirs.get_submodule("gate")(embedding[ids])[0]
        return len(choose_experts(logits, twins.config)[0].unique())

    expected = experts * (1 - (1 - per_token / experts) ** tokens)
    assert hit(spread_tokens(tokens, vocab_size)) == pytest.approx(expected, rel=0.25)
    assert hit(torch.zeros(tokens, dtype=torch.int64)) == per_token
