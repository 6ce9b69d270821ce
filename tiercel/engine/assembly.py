"""Open an engine: load the model, size and open the memory tiers, and connect everything to the loop."""

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from tiercel.device.base import Device, Lane
from tiercel.device.cpu import CpuLane
from tiercel.device.registry import open_device
from tiercel.engine.attention.base import Attention
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.disk_release import DiskRelease
from tiercel.engine.grammars import GrammarCache
from tiercel.engine.loop import UNMEASURED_STALL_S, EngineLoop, Mover
from tiercel.engine.measure.decode_choice import measure_decodes
from tiercel.engine.measure.dense_choice import route_products
from tiercel.engine.measure.footprint import measure_footprint
from tiercel.engine.measure.machine_facts import machine_facts
from tiercel.engine.measure.overlap_search import open_overlap
from tiercel.engine.measure.product_choice import open_product_choice
from tiercel.engine.measure.rate_book import RateBook
from tiercel.engine.measure.rates import measure_rates
from tiercel.engine.measure.split_search import open_splits_file
from tiercel.engine.measure.step_times import open_step_times
from tiercel.engine.memory.capacity import for_device, show_arithmetic, size_pool, step_tokens
from tiercel.engine.memory.tiers import Tiers, open_tiers
from tiercel.engine.models.base import Model, kv_spec
from tiercel.engine.models.decoder import Decoder, PrefersNative
from tiercel.engine.models.generation import read_end_tokens
from tiercel.engine.models.precision import dtype_name
from tiercel.engine.models.registry import load_model
from tiercel.engine.models.tiered_experts import ExpertTier
from tiercel.engine.native.library import NativeLibrary, load_library
from tiercel.engine.news import NEWS_S, NewsTeller
from tiercel.engine.progress import LoadProgress, Outbox
from tiercel.engine.restore_wait import RestoreWait
from tiercel.engine.sampling import open_sampler
from tiercel.engine.steering import Steering, daily_blocks, policy_of, step_limits
from tiercel.engine.step.flight import StepRunner
from tiercel.engine.step.graphs import DecodeGraphs, graph_sizes, record_graphs, wants_graphs
from tiercel.engine.step.halves import Overlap
from tiercel.engine.step.memory_relief import MemoryRelief
from tiercel.engine.step.mixed_graphs import MixedGraphs, mixed_sizes, record_mixed_graphs
from tiercel.engine.step.rows import RowBook
from tiercel.engine.step.runner import Runner
from tiercel.engine.step.staging import open_staging
from tiercel.engine.upkeep import Upkeep
from tiercel.engine.wake import Wake
from tiercel.kvcache.manager import CacheManager
from tiercel.kvcache.store.memory_file import identity_of, kept_memory
from tiercel.kvcache.tiers import TierLimits
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.cost import StepCosts
from tiercel.scheduler.nanobatch import Splitter
from tiercel.scheduler.planner import Planner
from tiercel.scheduler.step_goal import log_goal
from tiercel.scheduler.swap_choice import SwapChooser
from tiercel.settings.settings import EngineSettings
from tiercel.system.process_limits import file_limit_bytes
from tiercel.values.clock import Clock
from tiercel.values.outcome import ExpertGauges
from tiercel.values.rates import EngineSpeed, Rates
from tiercel.values.tier import Capacity, KVSpec, Route
from tiercel.wire.frames import Loading
from tiercel.wire.step_record import StepRecord

log = logging.getLogger(__name__)

_BUSY_S = 0.01  # between two checks of the mail while work is pending whose end does not wake the loop
_MEASURED_STALL_S = 5.0
_IDLE_S = 1.0  # the same while nothing is pending


class Engine:
    """The opened engine: its loop, the parts that the loop drives, and the facts reported to the HTTP process."""

    def __init__(
        self,
        loop: EngineLoop,
        model: Model,
        cache: CacheManager,
        tiers: Tiers,
        upkeep: Upkeep,
        release: DiskRelease,
        lane: Lane,
        device: Device,
        capacity: Capacity,
        clock: Clock,
        grammars: GrammarCache,
        experts: ExpertTier | None,
        book: SequenceBook,
        step_tokens: int,
        num_rows: int,
    ) -> None:
        self.loop = loop
        self.model = model
        self.cache = cache
        self.tiers = tiers
        self.upkeep = upkeep
        self.release = release
        self.device = device
        self.capacity = capacity
        self.grammars = grammars
        self._lane = lane
        self._clock = clock
        self._experts = experts
        self._book = book
        self._step_tokens = step_tokens
        self._num_rows = num_rows
        self._news: NewsTeller | None = None

    @property
    def speed(self) -> EngineSpeed:
        """The predicted speed in full steps, with half of the rows in use."""
        return self._book.policy.costs.speed(self._step_tokens, max(1, self._num_rows // 2))

    def tell_news(self, post: Outbox) -> None:
        """Post what fronts need to choose among engines, from now on."""
        keys = self.cache.tiers.tell_keys()
        gauges, policy = self.loop.gauges, self._book.policy
        self._news = NewsTeller(keys, lambda: policy.fair.served_ms, lambda: gauges.num_steps, post, self._clock)

    def tend(self) -> None:
        """Do what is due beside the steps. Call it between two steps."""
        self.upkeep.tend()
        self.release.tend()
        if self._news is not None:
            self._news.tend()

    def patience_s(self) -> float:
        """Return how long the loop may sleep when a step had nothing to do.

        Deadlines of reads and the ends of time limits are included, because neither of them wakes the loop.
        """
        rest_s = _IDLE_S if self.loop.is_idle else _BUSY_S
        if self._news is not None:
            rest_s = min(rest_s, NEWS_S)
        for due_s in (self.tiers.mover.next_deadline_s(), self.cache.next_limit_s):
            if due_s is not None:
                rest_s = max(0.0, min(rest_s, due_s - self._clock.now_s()))
        return rest_s

    def close(self) -> None:
        """Stop the lanes and wait for writes to the disk."""
        self.grammars.close()
        self._lane.close()
        if self._experts is not None:
            self._experts.close()
        self.tiers.close()


def open_engine(
    settings: EngineSettings,
    mailbox: Outbox,
    wake: Wake,
    clock: Clock,
    arena_fd: int | None = None,
    record: StepRecord | None = None,
    wrap: Callable[[StepRunner], StepRunner] = lambda runner: runner,
    device: Device | None = None,
    wrap_mover: Callable[[Mover], Mover] = lambda mover: mover,
) -> Engine:
    """Load the model and open an engine on it. Errors: ConfigError.

    `arena_fd`: a memfd for the host tier that outlives the process. `wrap` and `wrap_mover` may put something between
    the loop and its runner or its mover, such as a stopwatch. `device`: by default the one of the settings. `record`:
    see `EngineLoop`.
    """
    device = device or open_device(settings.device, settings.threads)
    settings = for_device(settings, device)
    torch_device = torch.device(device.name)
    log.info("defaults sequences=%d step_tokens=%d", settings.sequences, step_tokens(settings, device))
    library = load_library() if device.name == "cpu" else None
    attention = open_attention(settings.attention_backend, torch_device, device.processors, device.capability)
    choice = _open_choice(settings.cache_folder, device.processors, library)
    with LoadProgress(mailbox) as progress:
        model = load_model(settings, torch_device, attention, progress, library, choice)
    if isinstance(model, Decoder):
        route_products(settings, model, device)
    precision, kernels = model.precision, "none" if library is None else library.class_name
    log.info(
        "model impl=%s weights=%s activations=%s kv=%s kernels=%s",
        model.impl,
        *map(dtype_name, (precision.weights, precision.activations, precision.kv)),
        kernels,
    )
    return assemble(settings, model, device, mailbox, clock, wake.set, arena_fd, record, wrap, wrap_mover, attention)


def _open_choice(folder: str | None, threads: int, library: NativeLibrary | None) -> PrefersNative | None:
    """Return the choice between the native products and oneDNN's; None where the native ones always serve.

    Without tile registers (AMX) they are faster up to 64 rows at least, and up to 14 % slower at 1,024. The native
    products with tile registers have never run on a processor that has them, so both are measured there.
    """
    if library is None or not torch.cpu._is_amx_tile_supported():
        return None
    return open_product_choice(folder, threads, library).prefers_native


def assemble(
    settings: EngineSettings,
    model: Model,
    device: Device,
    mailbox: Outbox,
    clock: Clock,
    wake: Callable[[], None] = lambda: None,
    arena_fd: int | None = None,
    record: StepRecord | None = None,
    wrap: Callable[[StepRunner], StepRunner] = lambda runner: runner,
    wrap_mover: Callable[[Mover], Mover] = lambda mover: mover,
    attention: Attention | None = None,
) -> Engine:
    """Open an engine on a loaded model. See `open_engine`. `attention`: the model's, whose kernels may be chosen."""
    settings = for_device(settings, device)
    spec = kv_spec(model, settings.block_size)
    place, lane = torch.device(device.name), device.open_lane()
    staging = open_staging(place, lane, maps_host_memory=device.maps_host_memory)
    experts = model.tier if isinstance(model, Decoder) else None
    lacks_experts = isinstance(model, Decoder) and model.lacks_expert_tier
    max_rows = settings.sequences + 1  # one suspect is admitted beyond the limit
    library = load_library() if device.name == "cpu" else None
    sampler = open_sampler(max_rows, model.vocab_size, place, model.precision.activations, library, staging)
    # An id beyond the logits cannot be sampled, and banning it until min_tokens would be out of range.
    end_tokens = tuple(token for token in read_end_tokens(Path(settings.model)) if token < model.vocab_size)
    grammars = GrammarCache.start(
        *(Path(settings.model), model.vocab_size, end_tokens, clock, wake, record),
        masks=lambda: (sampler.grammars.num_masks, sampler.grammars.mask_s),
    )
    reserved_bytes = measure_footprint(settings, model, sampler, spec, device, lane, place).reserved_bytes
    kept = kept_memory(arena_fd, spec, model.fingerprint)
    capacity = size_pool(
        *(settings, spec, device, model.max_model_len, model.weights_bytes, kept, reserved_bytes),
        max_arena_bytes=None if arena_fd is None else file_limit_bytes(),
    )
    log.info("capacity %s", show_arithmetic(capacity, spec, device))
    mailbox.post(Loading("allocating the KV pool"))
    tiers = open_tiers(settings, spec, capacity, device, clock, arena_fd, model.fingerprint, wake)
    if tiers.volume is None:
        capacity = msgspec.structs.replace(capacity, disk_blocks=0)
    rates = _open_rates(tiers, model, spec, lane, clock, capacity.max_model_len, wake)
    max_blocks = -(-capacity.max_model_len // settings.block_size)
    device.give_back_cached()  # this also waits for the zeroing of the arenas, which was not queued on the lane
    measure_decodes(
        *(attention, model, tiers.device.kv, settings.block_size, device, lane, clock, settings.sequences),
        has_graphs=wants_graphs(settings, model),
    )
    overlap = open_overlap(settings, model, spec, device)
    graphs, mixed = _record_graphs(
        settings, model, tiers.device.kv, max_rows, max_blocks, device, lane, mailbox, clock, overlap
    )
    overlap = None if graphs is None else overlap
    times = open_step_times(
        settings, model, tiers.device.kv, spec, device, lane, clock, capacity, graphs, staging, mixed
    )
    # Not during the recording of graphs, because the driver may refuse one of the two, nor during measurements.
    tiers.start_locking()
    most_tokens = step_tokens(settings, device)
    yields = device.name == "cpu"
    policy = policy_of(settings, StepCosts(times), most_tokens, yields=yields)
    book = SequenceBook(policy, capacity.max_model_len, end_tokens)
    cache = _open_cache(settings, model, spec, capacity, tiers, rates)
    limits = step_limits(settings, most_tokens, spec.block_bytes, yields=yields)
    log_goal(limits, policy.costs)
    splits = open_splits_file(settings.cache_folder, machine_facts(settings, model, spec, device)).read()
    chooser = SwapChooser(settings.preemption_mode, lambda: rates.rates)
    planner = Planner(book, limits, chooser, Splitter(splits))
    rows = RowBook(max_rows, max_blocks)
    runner = Runner(
        *(model, tiers.device.kv, sampler, lane, rows, book, end_tokens),
        staging=staging,
        graphs=graphs,
        grammars=grammars,
        mixed=mixed,
        overlap=overlap,
    )
    device.give_back_cached()
    steering = Steering(book, planner, cache, settings, most_tokens, yields=yields)
    release = DiskRelease(tiers, cache.background, mailbox, wake)
    mover = wrap_mover(tiers.mover)
    if tiers.host is not None and settings.calibration_s and mover is tiers.mover:
        # Only where measurements predict the ends of steps: a plan that is put off too long costs device time.
        mover = RestoreWait(tiers.mover, lambda blocks: rates.rates.load_s(Route.RESTORE, blocks), clock)
    loop = EngineLoop(
        book,
        cache,
        planner,
        wrap(runner),
        mailbox,
        clock,
        settings.async_depth,
        mover,
        steering,
        MemoryRelief(planner, device.give_back_cached),
        lambda: tiers.disk_state,
        lambda: lane.threads if isinstance(lane, CpuLane) else 0,
        release_disk=release.begin,
        record=record,
        stall_s=_MEASURED_STALL_S if settings.calibration_s else UNMEASURED_STALL_S,
        grammars=grammars,
        experts=experts.gauges if experts is not None else lambda: ExpertGauges(off=int(lacks_experts)),
    )
    upkeep = Upkeep(tiers, rates, cache.background, clock, policy.costs if settings.calibration_s else None)
    parts = (loop, model, cache, tiers, upkeep, release, lane, device, capacity, clock, grammars, experts)
    return Engine(*parts, book, most_tokens, settings.sequences)


def _record_graphs(
    settings: EngineSettings,
    model: Model,
    kv: Tensor,
    max_rows: int,
    max_blocks: int,
    device: Device,
    lane: Lane,
    mailbox: Outbox,
    clock: Clock,
    overlap: Overlap | None,
) -> tuple[DecodeGraphs | None, MixedGraphs | None]:
    """Record CUDA graphs of decodes and of small mixed steps.

    Return None for both if the device, the model or the settings exclude them, or if one of the recordings fails.
    """
    if not wants_graphs(settings, model):
        return None, None
    # Each kind has its own recorder, because all graphs of a recorder have results of one kind.
    recorder, other = device.open_recorder(), device.open_recorder()
    if recorder is None or other is None:
        return None, None
    start_s, free_bytes = clock.now_s(), device.free_bytes()
    sizes, tokens = graph_sizes(settings.sequences), mixed_sizes(step_tokens(settings, device))

    def report_progress(done: int) -> None:
        mailbox.post(Loading(f"recording CUDA graphs {done} of {len(sizes) + len(tokens)}"))

    mixed = None
    graphs = record_graphs(
        *(model, kv, max_rows, max_blocks, lane, recorder, sizes), lambda done, _: report_progress(done), overlap
    )
    if graphs is not None:
        mixed = record_mixed_graphs(
            *(model, kv, graphs.last_tokens, max_blocks, lane, other, tokens),
            lambda done, _: report_progress(len(sizes) + done),
        )
    if graphs is None or mixed is None:
        del graphs
        device.give_back_cached()  # the memory of graphs that were dropped
        return None, None
    taken_bytes, taken_s = free_bytes - device.free_bytes(), clock.now_s() - start_s
    log.info("graphs recorded rows=%s tokens=%s bytes=%d s=%.1f", graphs.sizes, mixed.sizes, taken_bytes, taken_s)
    log.info("overlapping halves rows=%s steps=%s", graphs.halved, "by table" if overlap is not None else "none")
    return graphs, mixed


def _open_rates(
    tiers: Tiers, model: Model, spec: KVSpec, lane: Lane, clock: Clock, max_model_len: int, wake: Callable[[], None]
) -> RateBook:
    """Measure the speeds that decide between loading and recomputing, if there is a tier to load from."""
    if tiers.host is None and tiers.volume is None:
        return RateBook(Rates(block_bytes=spec.block_bytes, block_size=spec.block_size))
    rates = measure_rates(tiers, model, spec, lane, clock, max_model_len)
    tiers.start_scan(wake)
    return RateBook(rates)


def _open_cache(
    settings: EngineSettings, model: Model, spec: KVSpec, capacity: Capacity, tiers: Tiers, rates: RateBook
) -> CacheManager:
    limits = TierLimits(
        daily_blocks=daily_blocks(settings, spec.block_bytes),
        always_loads=settings.preemption_mode == "swap",
        has_journal=tiers.host is None and tiers.device.journal is not None,
    )
    cache = CacheManager(
        capacity.blocks,
        settings.block_size,
        identity_of(spec, model.fingerprint),
        has_prefix_caching=settings.enable_prefix_caching,
        host_blocks=capacity.host_blocks,
        disk_blocks=capacity.disk_blocks,
        rates=lambda: rates.rates,
        limits=limits,
    )
    scan = tiers.scan
    cache.attach(
        tiers.host_records(),
        None if scan is None else (lambda most: None if scan.is_done else scan.take(most)),
    )
    return cache
