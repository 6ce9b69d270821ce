"""`tiercel check`: check a model folder and flags without loading the weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tiercel.cli.console import print_tables, warn
from tiercel.cli.decode_prediction import DecodeWork, predict_decode
from tiercel.modelfile.folder import LINKED_NAME
from tiercel.settings.config import resolve
from tiercel.settings.settings import Settings
from tiercel.system.process_limits import file_limit_bytes
from tiercel.values.tier import Capacity
from tiercel.values.units import show_bytes

if TYPE_CHECKING:
    from tiercel.cli.model_facts import ModelFacts
    from tiercel.engine.measure.machine_rates import MachineRates

_CONTEXT_TOKENS = 512  # of each stream whose speed is predicted


def check(given: dict[str, object]) -> int:
    """Check a model folder and flags without serving.

    Computes the size of the KV memory from the memory that is free now, and on
    a CPU predicts the speed of decoding. Exit code 2 and the engine's own line
    if it would refuse the model. --help=all lists all flags.
    """
    resolved = resolve(given)
    for line in resolved.warnings:
        warn(line)
    print_tables(dict(_tables(resolved.settings)))
    return 0


def _tables(settings: Settings) -> Iterator[tuple[str, dict[str, str]]]:
    # lazy: they import torch, which takes seconds
    from tiercel.cli.model_facts import LoadedDevice, check_attention, compare_small_model, facts_of
    from tiercel.device.registry import open_device
    from tiercel.engine.measure.machine_rates import measure_machine
    from tiercel.engine.memory.capacity import for_device, size_pool, step_tokens
    from tiercel.engine.models.precision import CpuProducts
    from tiercel.engine.models.registry import examine_model
    from tiercel.engine.native.library import find_library

    device = open_device(settings.engine.device, settings.engine.threads)
    engine = for_device(settings.engine, device)
    library = find_library() if device.name == "cpu" else "not for a GPU"
    products = CpuProducts.of(None if isinstance(library, str) else library) if device.name == "cpu" else None
    check_attention(engine, device)
    found = examine_model(engine, products)
    facts = facts_of(engine, found)
    compared = compare_small_model(engine, found, device.host_free_bytes())
    memory = facts.expert_bytes if engine.expert_memory_bytes is None else engine.expert_memory_bytes
    in_memory = facts.weights_bytes - max(0, facts.expert_bytes - memory)
    is_tiered = in_memory < facts.weights_bytes
    other = (
        {"in memory": f"{show_bytes(in_memory)}; other experts are fetched when they are needed"} if is_tiered else {}
    )
    loaded = LoadedDevice(device, in_memory)
    capacity = size_pool(engine, facts.kv, loaded, facts.max_model_len, in_memory, max_arena_bytes=file_limit_bytes())
    yield (
        "Model",
        {
            **_place(Path(engine.model)),
            "served as": ", ".join(settings.server.served_model_names),
            "architecture": facts.architecture,
            "implementation": facts.impl,
            **({"paged attention": compared} if compared else {}),
            "type": str(facts.precision) if facts.warning is None else facts.warning,
            "CPU kernels": f"none: {library}" if isinstance(library, str) else library.class_name,
            "quantization": "none" if facts.precision.scheme is None else str(facts.precision.scheme),
            "weights": f"{show_bytes(facts.weights_bytes)}, {facts.weights_bytes / facts.weights:.2f} bytes per weight",
            **other,
            "context": f"{facts.max_model_len:,} tokens, {capacity.max_model_len:,} served",
        },
    )
    yield "Tokenizer", dict(_tokenizer(settings, facts.vocab_size))
    tokens = capacity.blocks * capacity.block_size
    yield (
        "KV memory",
        {
            "device": f"{device.name}, {show_bytes(device.free_bytes())} free",
            "per token": show_bytes(facts.kv.token_bytes),
            "pool": f"{show_bytes(capacity.kv_bytes)} = {capacity.blocks:,} blocks of {capacity.block_size} tokens"
            + ("" if device.name == "cpu" else ", minus the memory of steps, measured at start"),
            "room for": f"{tokens:,} tokens, {tokens / capacity.max_model_len:.1f} sequences of the full context",
            "step": f"{step_tokens(engine, device):,} tokens, {engine.sequences:,} sequences",
        },
    )
    if device.name == "cpu":
        rates = measure_machine(facts.precision.activations, device.processors)
        speeds = dict(_speeds(facts, capacity, rates, device.processors, engine.sequences))
        yield "Predicted speed of decoding", speeds


def _place(folder: Path) -> dict[str, str]:
    linked = folder / LINKED_NAME
    return {"file": str(linked.readlink())} if linked.is_symlink() else {"folder": str(folder)}


def _speeds(
    facts: "ModelFacts", capacity: Capacity, rates: "MachineRates", threads: int, max_streams: int
) -> Iterator[tuple[str, str]]:
    work = DecodeWork(
        *(facts.step_weights_bytes, 2 * facts.step_weights, facts.kv.token_bytes),
        *(facts.expert_bytes, facts.skipped_share),
    )
    context = min(_CONTEXT_TOKENS, capacity.max_model_len)
    most = min(max_streams, capacity.blocks * capacity.block_size // context)
    for streams in sorted({1, min(16, most), most} - {0}):
        speed = predict_decode(work, streams, context, rates.read_bytes_per_s, rates.flops_per_s)
        name = f"{streams:,} stream{'s' if streams > 1 else ''}"
        rate = f"{speed.tokens_per_s:,.{1 if speed.tokens_per_s < 100 else 0}f} tokens/s"
        yield name, f"about {rate}, bound by {speed.bound_by}"
    some = "" if not facts.expert_bytes else f"{show_bytes(int(work.read_bytes(1)))} with one stream to "
    read = f"{some}{show_bytes(work.weights_bytes)} of weights"
    yield "computed for", f"{context:,} tokens of context, {read} in {'a' if some else 'every'} step"
    yield (
        "measured now",
        f"{show_bytes(int(rates.read_bytes_per_s))}/s read, {rates.flops_per_s / 1e9:,.0f} GFLOP/s with {threads} "
        f"thread{'s' if threads > 1 else ''}; a prediction from these rates alone",
    )


def _tokenizer(settings: Settings, vocab_size: int) -> Iterator[tuple[str, str]]:
    # lazy: it imports the HTTP stack
    from tiercel.engine.models.generation import read_end_tokens
    from tiercel.server.composition import build_context

    context = build_context(settings.server)
    context.close()
    codec, defaults = context.codec, context.defaults
    ends = read_end_tokens(Path(settings.server.model))
    size = codec.vocabulary.size
    if size > vocab_size:
        warn(f"the tokenizer has {size:,} tokens, the model {vocab_size:,}: requests with other tokens are refused")
    yield "tokens", f"{size:,} of the model's {vocab_size:,}" if size else f"unknown; the model has {vocab_size:,}"
    yield "special tokens", " ".join(codec.special_texts) or "none"
    yield "end of sequence", " ".join(codec.token_name(token) or f"{token}" for token in ends) or "none"
    yield "chat template", "yes" if context.template else "none: /v1/chat/completions is not available"
    style = context.answer_style
    if context.template is not None:
        for note in style.notes:
            warn(note)
        described = "" if context.template.knows_tools else ", described in the prompt: the template shows no tools"
        yield "tool calls", "none" if style.form is None else f"{style.form.name}{described}"
        yield "thoughts", style.thoughts
    yield "sampling", f"temperature {defaults.temperature:g}, top_p {defaults.top_p:g}, top_k {defaults.top_k}"
