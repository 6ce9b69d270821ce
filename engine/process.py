"""The engine process: `python -m engine.process --fd N`, started by the HTTP process over an inherited socket."""

import argparse
import gc
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import torch

from device.base import Device, Lane
from device.registry import open_device
from engine.attention.registry import open_attention
from engine.calibrate import show_arithmetic, size_pool, step_tokens
from engine.loop import EngineLoop
from engine.mailbox import Mailbox, receive_start
from engine.models.base import Model
from engine.models.generation import read_end_tokens
from engine.models.registry import load_model
from engine.progress import LoadProgress, Outbox
from engine.rows import RowBook
from engine.runner import Runner
from engine.sampling import Sampler
from kvcache.manager import CacheManager
from kvcache.store.arena import Arena, open_arena
from scheduler.book import SequenceBook
from scheduler.planner import Planner, StepLimits
from scheduler.policy import open_policy
from tiercel.clock import Clock, MonotonicClock
from tiercel.errors import ConfigError
from tiercel.log import configure_log
from tiercel.settings import EngineSettings
from tiercel.tier import Capacity, KVSpec
from tiercel.wire import Failed, Loading, Ready, Start

log = logging.getLogger("engine.process")

EXIT_CONFIG = 2
EXIT_CRASH = 3
_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Engine:
    """The opened engine: its loop, what the loop drives, and the facts that the HTTP process is told."""

    def __init__(
        self,
        loop: EngineLoop,
        model: Model,
        cache: CacheManager,
        arena: Arena,
        lane: Lane,
        device: Device,
        capacity: Capacity,
    ) -> None:
        self.loop = loop
        self.model = model
        self.cache = cache
        self.arena = arena
        self.device = device
        self.capacity = capacity
        self._lane = lane

    def close(self) -> None:
        """Stop the lane."""
        self._lane.close()


def kv_spec(model: Model, block_size: int) -> KVSpec:
    """The block layout of a model."""
    return KVSpec(
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        block_size=block_size,
        dtype=_DTYPE_NAMES[model.dtype],
    )


def open_engine(settings: EngineSettings, mailbox: Outbox, clock: Clock) -> Engine:
    """Load the model, size the pool and put the rooms together. Errors: ConfigError."""
    device = open_device(settings.device, settings.threads)
    torch_device = torch.device(device.name)
    attention = open_attention(settings.attention_backend, torch_device)
    with LoadProgress(mailbox) as progress:
        model = load_model(settings, torch_device, attention, progress)
    return assemble(settings, model, device, mailbox, clock)


def assemble(settings: EngineSettings, model: Model, device: Device, mailbox: Outbox, clock: Clock) -> Engine:
    """Books and machines round a loaded model."""
    spec = kv_spec(model, settings.block_size)
    capacity = size_pool(settings, spec, device, model.max_model_len, model.weights_bytes)
    log.info("capacity %s", show_arithmetic(capacity, spec, device))
    mailbox.post(Loading("allocating the KV pool"))
    arena = open_arena(spec, capacity.blocks, torch.device(device.name))
    # An id beyond the logits can never be sampled, and must not be banned until min_tokens either.
    end_tokens = tuple(token for token in read_end_tokens(Path(settings.model)) if token < model.vocab_size)
    book = SequenceBook(open_policy(settings.scheduling_policy), capacity.max_model_len, end_tokens)
    cache = CacheManager(
        capacity.blocks, settings.block_size, model.fingerprint, has_prefix_caching=settings.enable_prefix_caching
    )
    limits = StepLimits(settings.max_num_seqs, step_tokens(settings, device), settings.long_prefill_token_threshold)
    max_rows = settings.max_num_seqs + 1  # a suspect is admitted past the limit
    rows = RowBook(max_rows, -(-capacity.max_model_len // settings.block_size))
    sampler = Sampler(max_rows, model.vocab_size, torch.device(device.name))
    lane = device.open_lane()
    runner = Runner(model, arena.kv, sampler, lane, rows, book, end_tokens)
    loop = EngineLoop(book, cache, Planner(book, limits), runner, mailbox, clock, settings.async_depth)
    return Engine(loop, model, cache, arena, lane, device, capacity)


def run(engine: Engine, mailbox: Mailbox) -> None:
    """Serve until the HTTP process says so or is gone."""
    loop = engine.loop
    while not (loop.has_quit or mailbox.is_closed):
        loop.take(mailbox.take())
        if not loop.step():
            mailbox.wait(1.0 if loop.is_idle else 0.01)
        else:
            mailbox.flush()


def serve(mailbox: Mailbox, clock: Clock) -> int:
    """The life of the process, from the first frame on. Returns the exit code."""
    first, *rest = receive_start(mailbox)
    if not isinstance(first, Start):
        log.error("first frame is not start frame=%s", type(first).__name__)
        return EXIT_CRASH
    configure_log(first.settings.log_level, first.settings.log_format)
    started_s = clock.now_s()
    try:
        engine = open_engine(first.settings, mailbox, clock)
    except ConfigError as error:
        mailbox.post(Failed(error.code, str(error)))
        _drain(mailbox, clock)
        return EXIT_CONFIG
    # What is loaded stays: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    mailbox.post(
        Ready(
            max_model_len=engine.capacity.max_model_len,
            vocab_size=engine.model.vocab_size,
            block_size=engine.capacity.block_size,
            blocks_total=engine.capacity.blocks,
            dtype=_DTYPE_NAMES[engine.model.dtype],
            device=engine.device.name,
            model_impl=engine.model.impl,
            weights_bytes=engine.capacity.weights_bytes,
            kv_bytes=engine.capacity.kv_bytes,
            load_s=clock.now_s() - started_s,
        )
    )
    engine.loop.take(rest)
    run(engine, mailbox)
    return 0


def _drain(mailbox: Mailbox, clock: Clock, patience_s: float = 2.0) -> None:
    end_s = clock.now_s() + patience_s
    while mailbox.has_unsent and clock.now_s() < end_s:
        mailbox.wait(0.1)


def main() -> int:
    """Own the process: signals, logging, exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited stream socket")
    fd = parser.parse_args().fd
    # Ctrl-C reaches the whole process group; the HTTP process drains and then tells us to quit.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return serve(Mailbox(socket.socket(fileno=fd)), MonotonicClock())
    except Exception:
        log.exception("engine died pid=%d", os.getpid())
        return EXIT_CRASH


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Worker threads may still compute for a client that is gone: do not wait for them.
    os._exit(code)
