"""Errors of every kernel relative to float32 arithmetic in plain torch, on random ragged shapes.

Outputs and unused rows of the cache are filled with NaN. A kernel that writes elsewhere or cannot run counts as an
error of 1.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.cases import (
    CASES,
    LAYER,
    Case,
    Inputs,
    changed_elsewhere,
    draw_slices,
    make_inputs,
    poisoned,
    relative_error,
)
from benchmarks.gpu.quantized_cases import SCHEMES, product_error
from tiercel.engine.attention.base import Attention, PagedReader
from tiercel.engine.attention.fa3 import Fa3Attention, has_fa3, load_fa3
from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.attention.triton import TritonAttention
from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.kernels.sampling import draw_no_sync, search_no_sync
from tiercel.engine.kernels.tiles import DecodeForm, choose_form
from tiercel.engine.models.config import RopeConfig
from tiercel.engine.models.layers import RMSNorm
from tiercel.engine.models.ops import Ops
from tiercel.engine.models.rope import Rotary
from tiercel.engine.models.torch_ops import TorchOps
from tiercel.engine.models.triton_ops import TritonOps
from tiercel.engine.sampling.filter import least_no_sync
from tiercel.engine.sampling.noise import gumbel_no_sync, noise_keys

MAX_ERROR = 2e-2  # bfloat16
KINDS = ("decode", "mixed", "prefill")
_FAILED = 1.0
_VOCAB = 128_256
_TIE = 1e-3  # two perturbed logits that are closer than this are a tie
_EPS = 1e-5
_FEW_PROCESSORS = 8


def run(bench: Bench) -> None:
    """Record the errors of `attention.BACKEND.CASE.KIND`, `ops.CASE`, `add_norm`, `silu_mul`, `sampling`, `top_p` and
    `quantized.SCHEME`, and the `worst_error`."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    worst = 0.0

    def check(name: str, job: Callable[[], float]) -> None:
        nonlocal worst
        error = _FAILED
        with bench.part(name):
            error = job()
            bench.record(name, error, "relative error")
            if MAX_ERROR < error < math.inf:
                bench.fail(name, f"relative error {error:.3g}, at most {MAX_ERROR}")
        worst = max(worst, min(error, 1e9))  # an infinite error, of a NaN, cannot be written as JSON

    # With few processors, a decode has parts of many tiles, and contexts that are not cut.
    backends: dict[str, Attention] = {
        "triton": TritonAttention(processors(device)),
        "triton_few": TritonAttention(_FEW_PROCESSORS),
    }
    folded = DecodeForm(folds_merge=True)
    backends["triton_folded"] = TritonAttention(processors(device), form=folded)
    early = DecodeForm(folds_merge=True, starts_early=True)
    if choose_form(torch.cuda.get_device_capability(device), early) == early:
        backends["triton_early"] = TritonAttention(processors(device), form=early)
    with bench.part("fa3"):
        backends |= open_fa3()
    check("add_norm", lambda: add_norm_error(dtype, device))
    check("silu_mul", lambda: silu_mul_error(dtype, device))
    check("sampling", lambda: sampling_error(_VOCAB, 64, device))
    check("top_p", lambda: search_error(_VOCAB, 64, device))
    for scheme in SCHEMES:
        check(f"quantized.{scheme}", lambda scheme=scheme: product_error(scheme, dtype, device))
    for case in CASES[:3] if bench.is_quick else CASES:
        for name, backend in backends.items():
            if not bench.has_time(f"{name} {case.name}", 3.0) or (name == "fa3" and not fits_fa3(case)):
                continue
            for kind in KINDS:
                check(
                    f"attention.{name}.{case.name}.{kind}",
                    lambda backend=backend, case=case, kind=kind: attention_error(backend, case, kind, dtype, device),
                )
        if bench.has_time(f"ops {case.name}", 2.0):
            check(f"ops.{case.name}", lambda case=case: ops_error(case, dtype, device))
    bench.record("worst_error", worst, "relative error", bound=MAX_ERROR)


def processors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors; 1 without a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def attention_error(backend: Attention, case: Case, kind: str, dtype: torch.dtype, device: torch.device) -> float:
    """Check one step of one layer with a backend: its result, and the cache."""
    inputs = make_inputs(case, draw_slices(case.longest, case.heads, kind), dtype, device, seed=case.head_dim)
    wanted, params = inputs.widened(), case.params(device, dtype)
    before = inputs.arena.clone()
    with poisoned():
        out = backend.attend(inputs.query, inputs.key, inputs.value, inputs.arena[:, LAYER], inputs.state, params)
    check_cache(inputs, before)
    with sdpa_kernel(SDPBackend.MATH):
        expected = SdpaAttention().attend(
            wanted.query, wanted.key, wanted.value, wanted.arena[:, LAYER], wanted.state, params
        )
    return relative_error(out, expected)


def check_cache(inputs: Inputs, before: Tensor) -> None:
    """Errors: AssertionError if rows of other tokens changed, or the written values are wrong."""
    changed = changed_elsewhere(inputs.arena, before, inputs.state)
    assert changed == 0, f"{changed} elements of the cache changed that belong to no token of the step"
    state, width = inputs.state, inputs.arena.shape[-1] // 2
    written = inputs.arena[state.slot_ids, LAYER, state.slot_offsets]
    assert torch.equal(written[..., width:], inputs.value), "values in the cache are not those of the step"


def ops_error(case: Case, dtype: torch.dtype, device: torch.device) -> float:
    """Check head norms, rotation, cache and attention together, as in a layer of Qwen3.

    The reference is plain torch that rounds queries and keys to the dtype as the model does, and attends in float32:
    with bfloat16 these roundings alone are an error of 0.02 in the worst row.
    """
    inputs = make_inputs(case, draw_slices(case.longest, case.heads, "mixed"), dtype, device, seed=3)
    params, rope = case.params(device, dtype), RopeConfig("default", 10_000.0)
    wanted, before = inputs.widened(), inputs.arena.clone()
    ours: Ops = TritonOps(reader(device))
    with poisoned():
        angles = ours.angles(Rotary(rope, case.head_dim, dtype, device), inputs.state.positions)
        norms = head_norms(case, dtype, device)
        out = ours.attend(inputs.qkv, norms, angles, inputs.arena[:, LAYER], inputs.state, params)
    check_cache(inputs, before)
    plain = TorchOps(_WideAttention())
    with sdpa_kernel(SDPBackend.MATH):
        angles = plain.angles(Rotary(rope, case.head_dim, dtype, device), wanted.state.positions)
        expected = plain.attend(inputs.qkv, norms, angles, wanted.arena[:, LAYER], wanted.state, params)
    return relative_error(out, expected)


class _WideAttention:
    """Attention in plain torch, computed in float32."""

    is_capturable = False

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams
    ) -> Tensor:
        return SdpaAttention().attend(query.float(), key.float(), value.float(), kv, state, params)


def reader(device: torch.device) -> PagedReader:
    """Return the Triton backend."""
    return TritonAttention(processors(device))


def head_norms(case: Case, dtype: torch.dtype, device: torch.device) -> tuple[RMSNorm, RMSNorm]:
    """Return norms of queries and keys with weights other than 1; the same values in every dtype."""
    found: list[RMSNorm] = []
    for seed in range(2):
        norm = RMSNorm(case.head_dim, _EPS, dtype, device)
        weight = 1 + 0.25 * torch.randn(case.head_dim, generator=torch.Generator().manual_seed(seed))
        norm.weight[:] = weight.to(torch.bfloat16).to(device)
        found.append(norm)
    return found[0], found[1]


def add_norm_error(dtype: torch.dtype, device: torch.device, rows: int = 777) -> float:
    """Check the norm with and without a residual, at widths of models and an unusual one."""
    worst = 0.0
    for width in (4096, 1024, 896, 5120):
        x, residual = (torch.randn(rows, width, device=device, dtype=dtype) for _ in range(2))
        weight = torch.randn(width, device=device, dtype=dtype)
        for other in (None, residual):
            wide = x.float() if other is None else x.float() + other.float()
            expected = weight.float() * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPS)
            with poisoned():
                kept = None if other is None else other.clone()
                normed, total = TritonOps(reader(device)).add_norm(x.clone(), kept, weight, _EPS)
            worst = max(worst, relative_error(normed, expected), relative_error(total, wide))
    return worst


def silu_mul_error(dtype: torch.dtype, device: torch.device, rows: int = 777) -> float:
    """Check the activation at widths of models and an unusual one."""
    worst = 0.0
    for inner in (14336, 3072, 4864, 1000):
        gate_up = 2 * torch.randn(rows, 2 * inner, device=device, dtype=dtype)
        gate, up = gate_up.float().chunk(2, dim=-1)
        with poisoned():
            out = TritonOps(reader(device)).silu_mul(gate_up)
        worst = max(worst, relative_error(out, torch.nn.functional.silu(gate) * up))
    return worst


def sampling_error(vocab: int, rows: int, device: torch.device) -> float:
    """Return how far a chosen token's perturbed logit is below the largest one, relative to it; check bad rows.

    Half of the rows draw, the others take the largest logit.
    """
    generator = torch.Generator(device).manual_seed(5)
    logits = 4 * torch.randn(rows, vocab, generator=generator, device=device)
    logits[1, vocab // 3] = torch.nan
    logits[2, vocab - 1] = torch.inf
    seeds = torch.arange(rows).numpy() * 7919
    keys = torch.from_numpy(noise_keys(seeds, seeds[::-1].copy())).to(device)
    temperatures = torch.where(torch.arange(rows) % 2 == 0, 0.0, 0.7).to(device)
    draws = torch.cat((keys, temperatures.view(torch.int32)[:, None]), dim=1)
    with poisoned():
        tokens, bad = draw_no_sync(logits, draws)
    assert bad.nonzero().flatten().tolist() == [1, 2], f"bad rows: {bad.nonzero().flatten().tolist()}"
    scores = logits.clone()
    drawing = (temperatures > 0).nonzero().flatten()
    scores[drawing] = scores[drawing] / temperatures[drawing, None] + gumbel_no_sync(keys[drawing], vocab)
    good = (~bad).nonzero().flatten()
    best = scores[good].amax(dim=-1)
    behind = (best - scores[good].gather(1, tokens[good, None]).squeeze(1)) / best.abs().clamp_min(1.0)
    error = float(behind.max())
    return 0.0 if 0.0 <= error <= _TIE else (math.inf if error != error else error)


def search_error(vocab: int, rows: int, device: torch.device) -> float:
    """Return the relative error of the smallest kept probability against plain torch; a mass beyond 1 keeps all."""
    generator = torch.Generator(device).manual_seed(6)
    spreads = torch.linspace(0.1, 6.0, rows, device=device)[:, None]
    probabilities = (spreads * torch.randn(rows, vocab, generator=generator, device=device)).softmax(dim=-1)
    mass = torch.tensor([0.05, 0.5, 0.9, 0.99, 1.5], device=device).repeat(rows)[:rows]
    with poisoned():
        found = search_no_sync(probabilities, mass).view(torch.float32)
    expected = least_no_sync(probabilities, mass).view(torch.float32)
    return float(((found - expected).abs() / expected.clamp_min(1e-30)).max())


def open_fa3() -> dict[str, Attention]:
    """Return FlashAttention-3 if its package is installed, else None. Errors: ConfigError if it does not load."""
    if not has_fa3():
        print("  fa3: not installed", flush=True)
        return {}
    return {"fa3": Fa3Attention(load_fa3(), processors(torch.device("cuda")))}


def fits_fa3(case: Case) -> bool:
    """Return the cases that FlashAttention-3 supports."""
    return not case.has_sinks and case.head_dim % 8 == 0 and case.block_size < 64
