"""The output of the offline verbs: text, and JSON for comparisons with other engines."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from tiercel.cli.bench_offline import OfflinePlan
from tiercel.cli.bench_serve import command_line
from tiercel.cli.console import print_tables
from tiercel.loadtest.load.request_list import ListedRequest, digest
from tiercel.loadtest.machine import machine_facts, versions
from tiercel.loadtest.report.wording import show_ms, show_percent
from tiercel.loadtest.results.distribution import percentile
from tiercel.values.errors import TiercelError
from tiercel.values.units import show_bytes

if TYPE_CHECKING:
    from tiercel.engine.offline import EngineFacts, OfflineRun

SCHEMA_VERSION = 1
"""Increases when a key of the JSON changes its meaning or is removed."""
RANKS = (10, 25, 50, 75, 90, 99)
_PACKAGES = ("torch", "triton", "transformers")
_SETTINGS = (
    *("load_format", "enable_prefix_caching", "max_num_seqs", "max_num_batched_tokens", "async_depth"),
    *("scheduling_policy", "preemption_mode", "tbt_goal_s", "threads", "seed"),
)
_COUNTERS = ("steps", "nano_batches", "preemptions", "swapped_tokens", "recomputed_tokens", "prefix_hits")

Result = dict[str, Any]  # Any: JSON


def throughput_result(
    plan: OfflinePlan, facts: "EngineFacts", requests: Sequence[ListedRequest], temperature: float, run: "OfflineRun"
) -> Result:
    """Return the JSON of `bench throughput`; the keys up to `tokens_per_second` are those of vLLM."""
    prompt = sum(len(request.prompt_token_ids) for request in requests)
    output = sum(len(answer.tokens) for answer in run.answers)
    return {
        "model_id": plan.model_id,
        "elapsed_time": run.elapsed_s,
        "num_requests": len(requests),
        "total_num_tokens": prompt + output,
        "requests_per_second": len(requests) / run.elapsed_s,
        "tokens_per_second": (prompt + output) / run.elapsed_s,
        "total_prompt_tokens": prompt,
        "total_output_tokens": output,
        "output_tokens_per_second": output / run.elapsed_s,
        **_shared("throughput", plan, facts, requests, temperature, [run]),
    }


def latency_result(
    plan: OfflinePlan,
    facts: "EngineFacts",
    requests: Sequence[ListedRequest],
    temperature: float,
    runs: Sequence["OfflineRun"],
) -> Result:
    """Return the JSON of `bench latency`; the keys up to `percentiles` are those of vLLM.

    `ttft_ms` and `tpot_ms` are over all requests of all iterations.
    """
    latencies = [run.elapsed_s for run in runs]
    answers = [answer for run in runs for answer in run.answers]
    return {
        "model_id": plan.model_id,
        "avg_latency": sum(latencies) / len(latencies),
        "latencies": latencies,
        "percentiles": _percentiles(latencies),
        "ttft_ms": _percentiles([1e3 * answer.first_s for answer in answers]),
        "tpot_ms": _percentiles(
            [
                1e3 * (answer.last_s - answer.first_s) / (len(answer.tokens) - 1)
                for answer in answers
                if len(answer.tokens) > 1
            ]
        ),
        "batch_size": len(requests),
        "input_len": len(requests[0].prompt_token_ids),
        "output_len": requests[0].output_len,
        **_shared("latency", plan, facts, requests, temperature, runs),
    }


def show_throughput(result: Result) -> None:
    """Print the lines that vLLM prints, then the facts about the engine and the loop."""
    rates = {
        "requests/s": "requests_per_second",
        "total tokens/s": "tokens_per_second",
        "output tokens/s": "output_tokens_per_second",
    }
    print("Throughput: " + ", ".join(f"{result[key]:.2f} {unit}" for unit, key in rates.items()))
    print(f"Total num prompt tokens:  {result['total_prompt_tokens']}")
    print(f"Total num output tokens:  {result['total_output_tokens']}")
    print(f"Elapsed:  {result['elapsed_time']:.3f} seconds")
    _show_shared(result)


def show_latency(result: Result) -> None:
    """Print the lines that vLLM prints, then the facts about the engine and the loop."""
    print(f"Avg latency: {result['avg_latency']} seconds")
    for rank, value in result["percentiles"].items():
        print(f"{rank}% percentile latency: {value} seconds")
    rows = {
        name: ", ".join(f"p{rank} {show_ms(value)}" for rank, value in result[key].items())
        or "n/a (answers of one token)"
        for name, key in (("first token", "ttft_ms"), ("each other token", "tpot_ms"))
    }
    print_tables({"Latency": rows})
    _show_shared(result)


def write_result(path: Path, result: Result) -> None:
    """Write a result file. Errors: TiercelError if the file cannot be written."""
    try:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as exc:
        raise TiercelError("bench.output", f"--output-json {path}: {exc.strerror}") from exc


def _shared(
    kind: str,
    plan: OfflinePlan,
    facts: "EngineFacts",
    requests: Sequence[ListedRequest],
    temperature: float,
    runs: Sequence["OfflineRun"],
) -> Result:
    settings = structs.asdict(plan.settings) | {"async_depth": plan.settings.async_depth}
    counters = [(structs.asdict(run.before), structs.asdict(run.after)) for run in runs]
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "engine": "tiercel",
        "requests_sha256": digest(requests),
        "temperature": temperature,
        "facts": asdict(facts),
        "settings": {name: settings[name] for name in _SETTINGS},
        "steps": _steps(runs),
        "counters": {name: sum(after[name] - before[name] for before, after in counters) for name in _COUNTERS},
        "versions": versions(_PACKAGES),
        "machine": {**machine_facts(), **_accelerator(facts.device)},
        "command": command_line(),
    }


def _steps(runs: Sequence["OfflineRun"]) -> Result:
    """Return the shares of the elapsed time that the thread of the loop spent per activity; `idle`: without a step.

    `host_share` is the time in which the thread computed, `device_share` the time in which the device did. The two may
    overlap.
    """
    elapsed_s = sum(run.elapsed_s for run in runs)
    parts = {
        "planning": sum(sum(run.laps.plan_s) for run in runs),
        "launching": sum(sum(run.laps.launch_s) for run in runs),
        "waiting": sum(sum(run.laps.wait_s) for run in runs),
        "committing": sum(sum(run.laps.commit_s) for run in runs),
    }
    host_ms = sorted(1e3 * seconds for run in runs for seconds in run.laps.host_s())
    on_device_s = [seconds for run in runs for seconds in run.laps.nano_batch_s]
    return {
        "count": len(host_ms),
        "host_ms": {
            "mean": sum(host_ms) / len(host_ms),
            "median": percentile(host_ms, 50),
            "p99": percentile(host_ms, 99),
        },
        "shares": {
            **{name: seconds / elapsed_s for name, seconds in parts.items()},
            "idle": max(0.0, elapsed_s - sum(parts.values())) / elapsed_s,
        },
        "host_share": (sum(parts.values()) - parts["waiting"]) / elapsed_s,
        "device_share": sum(on_device_s) / elapsed_s,
    }


def _show_shared(result: Result) -> None:
    facts, steps, settings = result["facts"], result["steps"], result["settings"]
    blocks = f"{facts['blocks']:,} blocks of {facts['block_size']} tokens"
    host, shares = steps["host_ms"], steps["shares"]
    print_tables(
        {
            "Engine": {
                "model": f"{result['model_id']}, {facts['model_impl']}, {facts['dtype']}, "
                f"weights {show_bytes(facts['weights_bytes'])}",
                "device": f"{facts['device']}, {facts['attention']}",
                "KV pool": f"{show_bytes(facts['kv_bytes'])}, {blocks}",
                "prefix cache": "on" if settings["enable_prefix_caching"] else "off",
                "preempted": f"{result['counters']['preemptions']:,} times",
                "versions": ", ".join(f"{name} {number}" for name, number in result["versions"].items()),
            },
            f"Loop, {steps['count']:,} steps": {
                "host per step": f"median {show_ms(host['median'])}, P99 {show_ms(host['p99'])}",
                "host not waiting": f"{show_percent(steps['host_share'])} of the time",
                **{name: show_percent(share) for name, share in shares.items()},
                "device busy": show_percent(steps["device_share"]),
            },
            "Requests": {"sha256": result["requests_sha256"]},
        }
    )


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {str(rank): percentile(ordered, rank) for rank in RANKS} if ordered else {}


def _accelerator(device: str) -> dict[str, str]:
    if device != "cuda":
        return {}
    # lazy: already imported here, but not in other verbs that import this file
    import torch

    found = torch.cuda.get_device_properties(0)
    return {"gpu": f"{found.name}, {show_bytes(found.total_memory)}", "cuda": torch.version.cuda or "none"}
