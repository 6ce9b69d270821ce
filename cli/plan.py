"""`tiercel plan`: what a model on a device can do for long contexts and for a mix of requests, before it is bought."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tiercel.cli.console import print_tables
from tiercel.cli.plan_input import (
    MOST_TOKENS,
    folder_shape,
    given_shape,
    length,
    number,
    read_device,
    read_workload,
    size,
    whole,
)
from tiercel.errors import ConfigError
from tiercel.simulation.sizing import (
    BucketLoad,
    ContextFigures,
    DeviceProfile,
    ModelShape,
    Session,
    WorkloadBucket,
    admissible_rate,
    bucket_requests_per_s,
    context_figures,
    critical_tokens,
    flops_per_s,
    free_kv_bytes,
    workload_loads,
)
from tiercel.units import show_bytes

_BOUNDS = {
    "memory": "the context does not fit",
    "users": "bound by the users",
    "seats": "bound by memory",
    "compute": "bound by computing",
    "link": "bound by the link",
}


def _option(text: str, metavar: str) -> Any:  # Any: typer's own type of an option
    return typer.Option(help=text, metavar=metavar)


def plan(
    device: Annotated[str, _option("H200, A100-80G, cpu, a file.", "NAME|FILE")],
    model: Annotated[str | None, _option("Model folder, else its shape.", "FOLDER")] = None,
    ctx: Annotated[str | None, _option("Tokens of one context.", "TOKENS")] = None,
    turns: Annotated[int, _option("Answers in a session.", "NUMBER")] = 1,
    answer_tokens: Annotated[str, _option("Tokens of one answer.", "TOKENS")] = "250",
    think: Annotated[float, _option("Pause after each answer.", "SECONDS")] = 60.0,
    users: Annotated[int | None, _option("Sessions at once; else all that fit.", "NUMBER")] = None,
    workload: Annotated[Path | None, _option("File of request lengths.", "FILE")] = None,
    max_num_seqs: Annotated[int, _option("Of the workload at once.", "NUMBER")] = 256,
    reserve: Annotated[str, _option("Memory for neither weights nor KV.", "BYTES")] = "0",
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"], typer.Option(help="Of weights and KV.", metavar="TYPE")
    ] = "auto",
    parameters: Annotated[str | None, _option("Weights of the model: 34B.", "NUMBER")] = None,
    active_parameters: Annotated[str | None, _option("Weights that one token meets.", "NUMBER")] = None,
    layers: Annotated[int | None, _option("Layers.", "NUMBER")] = None,
    heads: Annotated[int | None, _option("Query heads.", "NUMBER")] = None,
    kv_heads: Annotated[int | None, _option("Key-value heads.", "NUMBER")] = None,
    head_dim: Annotated[int | None, _option("Size of a head.", "NUMBER")] = None,
    attention_width: Annotated[int | None, _option("Of the prefill; else heads * size.", "NUMBER")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> int:
    """Size a device for long contexts and mixed loads.

    A paper's formulas, our arithmetic, nothing measured: see docs/plan.md.

    --ctx: concurrency, prefill, decode, context switch, session throughput.
    --workload: the request rate that fills the device.
    """
    if ctx is None and workload is None:
        raise ConfigError("plan.nothing", "nothing to plan: give --ctx, --workload or both")
    session = _session(ctx, turns, answer_tokens, think, users)
    sequences = whole("--max-num-seqs", max_num_seqs, 1, 10**6)
    profile = read_device(device)
    buckets = read_workload(workload) if workload else ()
    flags = {
        "parameters": parameters,
        "active_parameters": active_parameters,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "attention_width": attention_width,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    if model is None and not given:
        raise ConfigError("plan.shape", "no model: give --model, or its shape from --parameters to --head-dim")
    shape, limit = (given_shape(given, dtype), MOST_TOKENS) if model is None else folder_shape(model, given, dtype)
    reserve_bytes = size("--reserve", reserve)
    _check_room(shape, profile, reserve_bytes)
    if session and session.context_tokens > limit:
        raise ConfigError("plan.ctx", f"--ctx {session.context_tokens:,}: the model's context is {limit:,} tokens")
    for index, bucket in enumerate(buckets):
        _check_bucket(f"{workload}: buckets[{index}]", bucket, shape, profile, limit, reserve_bytes)
    figures = context_figures(shape, profile, session, reserve_bytes) if session else None
    loads = workload_loads(shape, profile, buckets, sequences, reserve_bytes)
    is_width_given = attention_width is not None
    if as_json:
        print(json.dumps(_document(shape, is_width_given, profile, session, figures, loads, reserve_bytes), indent=2))
    else:
        _print(shape, is_width_given, profile, session, figures, loads)
    return 0


def _session(ctx: str | None, turns: int, answer_tokens: str, think_s: float, users: int | None) -> Session | None:
    checked = {
        "turns": whole("--turns", turns, 1, 10**6),
        "answer_tokens": length("--answer-tokens", answer_tokens),
        "users": None if users is None else whole("--users", users, 1, 10**9),
    }
    pause_s = number("--think", think_s, 0, 10**6)
    return None if ctx is None else Session(length("--ctx", ctx), think_s=pause_s, **checked)


def _check_room(shape: ModelShape, profile: DeviceProfile, reserve_bytes: int) -> None:
    if free_kv_bytes(shape, profile, reserve_bytes) < shape.kv_token_bytes:
        reserve = f" and --reserve {show_bytes(reserve_bytes)}" if reserve_bytes else ""
        raise ConfigError(
            "plan.room",
            f"weights of {show_bytes(shape.weights_bytes)}{reserve} leave no room for KV in "
            f"the {show_bytes(profile.memory_bytes)} of {profile.name}",
        )


def _check_bucket(
    place: str, bucket: WorkloadBucket, shape: ModelShape, profile: DeviceProfile, limit: int, reserve_bytes: int
) -> None:
    tokens = bucket.input_tokens + bucket.output_tokens
    if tokens > limit:
        raise ConfigError("plan.bucket", f"{place}: {tokens:,} tokens: the model's context is {limit:,}")
    if bucket.requests_per_s is None and bucket_requests_per_s(shape, profile, bucket, 1, reserve_bytes) == 0:
        room = free_kv_bytes(shape, profile, reserve_bytes) // shape.kv_token_bytes
        raise ConfigError("plan.bucket", f"{place}: {tokens:,} tokens: {profile.name} has room for {room:,}")


def _document(
    shape: ModelShape,
    is_width_given: bool,
    profile: DeviceProfile,
    session: Session | None,
    figures: ContextFigures | None,
    loads: Sequence[BucketLoad],
    reserve_bytes: int,
) -> dict[str, object]:
    """Return the document of --json: the model, the device and the session as they were given, and every figure."""
    document: dict[str, object] = {
        "model": {
            **asdict(shape),
            "is_attention_width_given": is_width_given,
            "weights_bytes": shape.weights_bytes,
            "kv_token_bytes": shape.kv_token_bytes,
        },
        "device": asdict(profile),
        "reserve_bytes": reserve_bytes,
    }
    if session and figures:
        document["session"] = asdict(session)
        document["context"] = asdict(figures)
    if loads:
        parts = [
            {
                **asdict(part.bucket),
                "requests_per_s": part.requests_per_s,
                "is_measured": part.bucket.requests_per_s is not None,
                "load": part.load,
            }
            for part in loads
        ]
        document["workload"] = {"admissible_requests_per_s": admissible_rate(loads), "buckets": parts}
    return document


def _print(
    shape: ModelShape,
    is_width_given: bool,
    profile: DeviceProfile,
    session: Session | None,
    figures: ContextFigures | None,
    loads: Sequence[BucketLoad],
) -> None:
    width_source = "from --attention-width instead of heads * head size" if is_width_given else "heads * head size"
    tables = {
        "Model": {
            "weights": f"{show_bytes(shape.weights_bytes)}, {_show_count(shape.parameters)} parameters",
            "KV per token": show_bytes(shape.kv_token_bytes),
            "attention width": f"{shape.attention_width:,}, {width_source}",
        },
        "Device": {
            "name": profile.name,
            "memory": f"{show_bytes(profile.memory_bytes)}, read at {profile.memory_bytes_per_s / 1e9:,.0f} GB/s",
            "computing": f"{flops_per_s(shape, profile) / 1e12:,.1f} TFLOP/s: the longer part of steps from "
            f"{critical_tokens(shape, profile):,.0f} tokens on",
            "link": f"{profile.link_bytes_per_s / 1e9:,.1f} GB/s",
        },
    }
    if session and figures:
        tables[f"Context of {session.context_tokens:,} tokens"] = _context_rows(session, figures)
    if loads:
        tables["Workload"] = {
            "admissible rate": f"{admissible_rate(loads):,.3g} requests per second fill the device",
        }
    print_tables(tables)
    if loads:
        _print_loads(loads)


def _context_rows(session: Session, figures: ContextFigures) -> dict[str, str]:
    pause = f", {session.think_s:g} s of thinking each" if session.think_s else ""
    plural = "" if session.turns == 1 else "s"
    hourly = figures.sessions_per_s * 3600
    shown = f"{hourly:,.0f}" if hourly >= 1000 else f"{hourly:.3g}"
    return {
        "concurrency": f"{figures.concurrency:,} at once; the longest has {figures.longest_context_tokens:,} tokens",
        "prefill": _show_s(figures.prefill_s),
        "decode": f"{_show_s(figures.decode_s)} for {session.answer_tokens:,} tokens",
        "context switch": f"{_show_s(figures.switch_s)} out and in",
        "session throughput": f"{shown} an hour at most, {_BOUNDS[figures.bound_by]}",
        "session": f"{_show_s(figures.session_s)}: {session.turns:,} turn{plural}{pause}",
    }


def _print_loads(loads: Sequence[BucketLoad]) -> None:
    # lazy: most verbs print no table
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="dim")
    for column in ("  input", "output", "share", "alone /s", "from", "part of load"):
        table.add_column(column, justify="right", no_wrap=True)
    rate = admissible_rate(loads)
    for part in loads:
        bucket = part.bucket
        table.add_row(
            f"{bucket.input_tokens:,}",
            f"{bucket.output_tokens:,}",
            f"{bucket.share:.1%}",
            f"{part.requests_per_s:,.3g}",
            "formula" if bucket.requests_per_s is None else "measured",
            f"{part.load * rate:.1%}",
        )
    Console(highlight=False).print(table)


def _show_count(count: int) -> str:
    """A number of parameters for people: `2.8 M`, `34 B`."""
    for letter, factor in (("B", 10**9), ("M", 10**6)):
        if count >= factor:
            return f"{count / factor:,.4g} {letter}"
    return f"{count:,}"


def _show_s(seconds: float) -> str:
    """A time for people: `1.2 ms`, `14.8 s`, `12.5 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:,.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
