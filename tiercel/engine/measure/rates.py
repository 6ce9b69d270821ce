"""Measure the speeds of copies, of the disk and of a prefill at the start of an engine."""

import logging
import mmap
from collections.abc import Callable, Iterable
from statistics import median

import torch
from torch import Tensor

from tiercel.device.base import Lane
from tiercel.device.volume import Volume
from tiercel.engine.forward.state import ForwardState
from tiercel.engine.memory.tiers import Tiers
from tiercel.engine.models.base import Model
from tiercel.kvcache.store.copy_run import extents_of
from tiercel.kvcache.store.mover import CopyLanes
from tiercel.values.clock import Clock
from tiercel.values.errors import DeviceError
from tiercel.values.rates import Rates
from tiercel.values.tier import KVSpec, Route

log = logging.getLogger(__name__)

_COPY_BYTES = 32 << 20  # of a trial copy
_DISK_BLOCKS = 8  # read at most
_DISK_S = 0.5
_PREFILL_TOKENS = 64
_PREFILL_CONTEXT = 1024  # tokens
_PREFILL_S = 0.5  # if the first trial takes longer, it is the only one
_UNMEASURED = 500e6  # bytes/s of a disk that could not be read, until its first calls are measured
_TRIAL_KEY = b"tiercel: a block to measure with"  # 32 bytes; no SHA-256 of anything


def measure_rates(tiers: Tiers, model: Model, spec: KVSpec, lane: Lane, clock: Clock, max_model_len: int) -> Rates:
    """Return the speeds of every existing route and of a prefill.

    Cost:    less than two seconds, most of them for the prefill of a slow model.
    Effects: writes the null block of the device arena.
    """
    by_route: dict[Route, float] = {}
    if tiers.lanes is not None:
        by_route |= _measure_copies(tiers, tiers.lanes, spec, clock)
    if tiers.volume is not None:
        by_route |= _measure_disk(tiers.volume, spec, clock)
    token_s, context_s = _measure_prefill(model, tiers.device.kv, spec, lane, clock, max_model_len)
    rates = Rates(
        bytes_per_s_by_route=by_route,
        prefill_token_s=token_s,
        prefill_context_s=context_s,
        block_bytes=spec.block_bytes,
        block_size=spec.block_size,
    )
    shown = " ".join(f"{route.value}={rate / 1e6:.0f}MB/s" for route, rate in by_route.items())
    log.info("rates prefill_token_us=%.1f prefill_context_ns=%.2f %s", token_s * 1e6, context_s * 1e9, shown)
    return rates


def _measure_copies(tiers: Tiers, lanes: CopyLanes, spec: KVSpec, clock: Clock) -> dict[Route, float]:
    """Time one copy in each direction between two trial arenas, after one copy that is not counted."""
    blocks = max(1, _COPY_BYTES // spec.block_bytes)
    rates: dict[Route, float] = {}
    with tiers.trial_arenas(blocks) as (above, below):
        above.kv.fill_(1)  # allocates the pages
        for route, lane, source, target in (
            (Route.SPILL, lanes.down, above, below),
            (Route.RESTORE, lanes.up, below, above),
        ):
            extents = extents_of(source, target, [(1, 1, blocks)])
            lane.copy(extents).result()
            start_s = clock.now_s()
            lane.copy(extents).result()
            rates[route] = blocks * spec.block_bytes / max(clock.now_s() - start_s, 1e-9)
    return rates


def _measure_disk(volume: Volume, spec: KVSpec, clock: Clock) -> dict[Route, float]:
    """Read some slots, whatever they hold. Nothing is written, and the scan of the volume need not have ended.

    Writes are assumed to be as fast as reads until the first writes are measured.
    """
    payload = memoryview(mmap.mmap(-1, spec.block_bytes))  # page-aligned, as the arenas are
    slots = range(0, volume.slots, max(1, volume.slots // _DISK_BLOCKS))[:_DISK_BLOCKS]
    try:
        rate = _rate((lambda slot=slot: volume.read(slot, _TRIAL_KEY, payload) for slot in slots), spec, clock)
    except OSError as exc:
        log.warning("kv disk not measured error=%s", exc.strerror)
        rate = _UNMEASURED
    return {Route.PREFETCH: rate, Route.PERSIST: rate}


def _rate(calls: Iterable[Callable[[], object]], spec: KVSpec, clock: Clock) -> float:
    """Return bytes per second from the median time of calls that move one block each."""
    times_s: list[float] = []
    for call in calls:
        start_s = clock.now_s()
        call()
        times_s.append(clock.now_s() - start_s)
        if sum(times_s) > _DISK_S / 2:
            break
    return spec.block_bytes / max(median(times_s), 1e-9)


def _measure_prefill(
    model: Model, kv: Tensor, spec: KVSpec, lane: Lane, clock: Clock, max_model_len: int
) -> tuple[float, float]:
    """Return the seconds of a prompt token at context 0, and the additional seconds for each token of context.

    Every block of the trial prompt is the null block.
    """
    tokens = max(1, min(_PREFILL_TOKENS, max_model_len // 2))
    context = max(0, min(_PREFILL_CONTEXT, max_model_len - tokens))

    def run(start: int) -> float:
        started_s = clock.now_s()
        try:
            lane.run(lambda: _forward(model, kv, spec.block_size, start, tokens)).result()
        except RuntimeError as exc:
            raise DeviceError("device.measure_failed", f"{type(exc).__name__}: {exc}") from exc
        return clock.now_s() - started_s

    first_s = run(0)
    if first_s > _PREFILL_S:
        return first_s / tokens, 0.0
    at_start_s = min(run(0), run(0))
    behind_s = min(run(context), run(context)) if context else at_start_s
    context_s = max(0.0, behind_s - at_start_s) / (tokens * context) if context else 0.0
    return at_start_s / tokens, context_s


@torch.inference_mode()
def _forward(model: Model, kv: Tensor, block_size: int, start: int, tokens: int) -> Tensor:
    """Run a chunk of one prompt on the null block. Return logits, so that the result waits for the device."""
    end = start + tokens
    tables = torch.zeros(1, -(-end // block_size), dtype=torch.int64, device=kv.device)
    state = ForwardState.of_slices(tables, [start], [end], block_size)
    ids = state.positions % model.vocab_size
    return model.logits(model.forward(ids, kv, state)[-1:])
