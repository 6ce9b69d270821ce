"""`tiercel plan`: the capacity of a device for long contexts and for a mix of requests, by formula."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from tiercel.cli.console import print_table, print_tables
from tiercel.cli.flags import flags_of, make_command
from tiercel.cli.plan_flags import MAX_TOKENS, PlanFlags
from tiercel.cli.plan_input import folder_shape, given_shape, read_device, read_workload
from tiercel.settings.option import options_of, read_options
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
from tiercel.values.errors import ConfigError
from tiercel.values.units import show_bytes

_BOUNDS = {
    "memory": "the context does not fit",
    "users": "limited by the users",
    "seats": "limited by memory",
    "compute": "limited by computing",
    "link": "limited by the link",
}


def plan_command() -> Callable[..., int]:
    """Return the command with all its flags."""
    return make_command(plan, flags_of(options_of(PlanFlags).values(), has_headings=False))


def plan(given: dict[str, Any]) -> int:
    """Compute the capacity of a device for long contexts and mixed loads.

    All figures are computed from published formulas (docs/plan.md); none is
    measured.

    --ctx: concurrency, prefill, decode, context switch, session throughput.
    --workload: the highest request rate that the device can serve.
    """
    flags = read_options(PlanFlags, given)
    if flags.ctx is None and flags.workload is None:
        raise ConfigError("plan.nothing", "nothing to plan: give --ctx, --workload or both")
    profile = read_device(flags.device)
    buckets = read_workload(flags.workload) if flags.workload else ()
    if flags.model is None and not flags.shape:
        raise ConfigError("plan.shape", "no model: give --model, or its shape from --parameters to --head-dim")
    if flags.model is None:
        shape, limit = given_shape(flags.shape, flags.dtype, flags.kv_cache_dtype), MAX_TOKENS
    else:
        shape, limit = folder_shape(flags.model, flags.shape, flags.dtype, flags.kv_cache_dtype)
    _check_memory(shape, profile, flags.reserve)
    session = None if flags.ctx is None else _session(flags.ctx, flags)
    if session and session.context_tokens > limit:
        raise ConfigError("plan.ctx", f"--ctx {session.context_tokens:,}: the model's context is {limit:,} tokens")
    for index, bucket in enumerate(buckets):
        _check_bucket(f"{flags.workload}: buckets[{index}]", bucket, shape, profile, limit, flags.reserve)
    figures = context_figures(shape, profile, session, flags.reserve) if session else None
    loads = workload_loads(shape, profile, buckets, flags.max_num_seqs, flags.reserve)
    is_width_given = flags.attention_width is not None
    if flags.json:
        print(json.dumps(_document(shape, is_width_given, profile, session, figures, loads, flags.reserve), indent=2))
    else:
        _print(shape, is_width_given, profile, session, figures, loads)
    return 0


def _session(context_tokens: int, flags: PlanFlags) -> Session:
    return Session(
        context_tokens,
        think_s=flags.think,
        turns=flags.turns,
        answer_tokens=flags.answer_tokens,
        users=flags.users,
    )


def _check_memory(shape: ModelShape, profile: DeviceProfile, reserve_bytes: int) -> None:
    if free_kv_bytes(shape, profile, reserve_bytes) < shape.kv_token_bytes:
        reserve = f" and --reserve {show_bytes(reserve_bytes)}" if reserve_bytes else ""
        raise ConfigError(
            "plan.room",
            f"weights of {show_bytes(shape.weights_bytes)}{reserve} leave no memory for KV in "
            f"the {show_bytes(profile.memory_bytes)} of {profile.name}",
        )


def _check_bucket(
    place: str, bucket: WorkloadBucket, shape: ModelShape, profile: DeviceProfile, limit: int, reserve_bytes: int
) -> None:
    tokens = bucket.input_tokens + bucket.output_tokens
    if tokens > limit:
        raise ConfigError("plan.bucket", f"{place}: {tokens:,} tokens: the model's context is {limit:,}")
    if bucket.requests_per_s is None and bucket_requests_per_s(shape, profile, bucket, 1, reserve_bytes) == 0:
        free_tokens = free_kv_bytes(shape, profile, reserve_bytes) // shape.kv_token_bytes
        raise ConfigError("plan.bucket", f"{place}: {tokens:,} tokens: {profile.name} has memory for {free_tokens:,}")


def _document(
    shape: ModelShape,
    is_width_given: bool,
    profile: DeviceProfile,
    session: Session | None,
    figures: ContextFigures | None,
    loads: Sequence[BucketLoad],
    reserve_bytes: int,
) -> dict[str, object]:
    """Return the document of --json: the given model, device and session, and every figure."""
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
            "computing": f"{flops_per_s(shape, profile) / 1e12:,.1f} TFLOP/s, compute-bound above "
            f"{critical_tokens(shape, profile):,.0f} tokens per step",
            "link": f"{profile.link_bytes_per_s / 1e9:,.1f} GB/s",
        },
    }
    if session and figures:
        tables[f"Context of {session.context_tokens:,} tokens"] = _context_rows(session, figures)
    if loads:
        tables["Workload"] = {
            "admissible rate": f"{admissible_rate(loads):,.3g} requests per second",
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
        "concurrency": f"{figures.concurrency:,} contexts; the longest has {figures.longest_context_tokens:,} tokens",
        "prefill": _show_s(figures.prefill_s),
        "decode": f"{_show_s(figures.decode_s)} for {session.answer_tokens:,} tokens",
        "context switch": f"{_show_s(figures.switch_s)} out and in",
        "session throughput": f"at most {shown} per hour, {_BOUNDS[figures.bound_by]}",
        "session": f"{_show_s(figures.session_s)}: {session.turns:,} turn{plural}{pause}",
    }


def _print_loads(loads: Sequence[BucketLoad]) -> None:
    columns = ("  input", "output", "share", "alone /s", "source", "part of load")
    rate = admissible_rate(loads)
    rows = [
        (
            f"{part.bucket.input_tokens:,}",
            f"{part.bucket.output_tokens:,}",
            f"{part.bucket.share:.1%}",
            f"{part.requests_per_s:,.3g}",
            "formula" if part.bucket.requests_per_s is None else "measured",
            f"{part.load * rate:.1%}",
        )
        for part in loads
    ]
    print_table(columns, rows, right=columns)


def _show_count(count: int) -> str:
    """Return a number of parameters as text: `2.8 M`, `34 B`."""
    for letter, factor in (("B", 10**9), ("M", 10**6)):
        if count >= factor:
            return f"{count / factor:,.4g} {letter}"
    return f"{count:,}"


def _show_s(seconds: float) -> str:
    """Return a duration as text: `1.2 ms`, `14.8 s`, `12.5 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:,.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
