"""Decoding with a fixed batch, compared with the serial bound: read all weights, then all KV, at full speed."""

from statistics import median

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.bounds import LLAMA_3_8B, serial_step_s
from benchmarks.gpu.engine import asked, draw, engine_settings, full_steps, open_engine
from tiercel.engine.offline import OfflineEngine

BATCHES = (1, 32, 256)
PROMPT, OUTPUT = 944, 160  # the middle of the answer has a context of 1,024
_CACHES = 2  # times the second-level cache: fewer bytes of KV may stay in it from one step to the next


def prompt_over(cache_bytes: int, batch: int, token_bytes: int = LLAMA_3_8B.token_bytes) -> int:
    """Return the prompt of the benchmark, or a longer one whose KV in the whole batch exceeds twice the cache."""
    return max(PROMPT, -(-_CACHES * cache_bytes // (batch * token_bytes)))


def run(bench: Bench) -> None:
    """Record `batch_N.share` of the bound at 790 TFLOP/s and 4.3 TB/s, `batch_N.tokens_per_s`, `batch_N.step_ms`."""
    flags = {"max_num_seqs": max(BATCHES), "max_num_batched_tokens": 8192, "max_model_len": 4096}
    cache_bytes = torch.cuda.get_device_properties().L2_cache_size
    with open_engine(engine_settings(bench.folder, **flags, kv_host_size="0")) as engine:
        engine.run(asked(draw(engine, max(BATCHES), 64, 16, seed=99)))
        for batch in BATCHES:
            if bench.has_time(f"batch {batch}", 2.0):
                with bench.part(f"batch {batch}"):
                    measure(bench, engine, batch, prompt_over(cache_bytes, batch), cache_bytes=cache_bytes)


def measure(
    bench: Bench,
    engine: OfflineEngine,
    batch: int,
    prompt: int = PROMPT,
    output: int = OUTPUT,
    cache_bytes: int | None = None,
) -> None:
    """Measure the steps in which the whole batch decodes, each compared with the bound for its own context.

    `cache_bytes`: the second-level cache of the device, if it is known.
    """
    ran = engine.run(asked(draw(engine, batch, prompt, output, seed=batch)))
    steps = full_steps(ran)
    shares = [serial_step_s(LLAMA_3_8B, batch, prompt + said) / seconds for seconds, said in steps]
    seconds = median(step_s for step_s, _ in steps)
    context = prompt + sum(said for _, said in steps) / len(steps)
    kv_bytes = batch * context * LLAMA_3_8B.token_bytes
    over = {} if cache_bytes is None else {"kv_over_cache": kv_bytes / cache_bytes}
    bench.record(f"batch_{batch}.share", median(shares), "", mean_context=context, steps=len(steps), **over)
    bench.record(f"batch_{batch}.tokens_per_s", batch / seconds, "tokens/s")
    host_ms = sorted(1e3 * one for one in ran.laps.host_s())
    bench.record(
        f"batch_{batch}.step_ms",
        1e3 * seconds,
        "ms",
        bound_ms=1e3 * serial_step_s(LLAMA_3_8B, batch, context),
        host_ms=median(host_ms),
        device_ms=1e3 * median(ran.laps.nano_batch_s or [0.0]),
    )
    gemm, copy = bench.earlier("limits.gemm.4096"), bench.earlier("limits.copy")
    if gemm is not None and copy is not None:
        bound_s = serial_step_s(LLAMA_3_8B, batch, context, gemm * 1e12, copy * 1e12)
        bench.record(f"batch_{batch}.share_of_measured", bound_s / seconds, "", tflop_per_s=gemm, tb_per_s=copy)
