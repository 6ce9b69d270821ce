"""The flags of `tiercel simulate`."""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Struct

from tiercel.settings.option import Group, Option
from tiercel.settings.settings import PreemptionMode
from tiercel.values.tenant import PolicyName

_TRAFFIC, _MACHINE, _OUTPUT = Group("Traffic"), Group("Machine"), Group("Output")
_COUNT = (1, 10**9)
_POSITIVE = (1e-9, 1e9)


class SimulateFlags(Struct, frozen=True, kw_only=True):
    """The flags with their defaults."""

    workload: Annotated[Path | None, Option(_TRAFFIC, "YAML file of tenants and their requests.", "FILE")] = None
    trace: Annotated[Path | None, Option(_TRAFFIC, "Recorded trace in place of a workload.", "FILE")] = None
    trace_format: Annotated[
        Literal["mooncake", "burstgpt"], Option(_TRAFFIC, "mooncake (JSON lines) or burstgpt (CSV).", "NAME")
    ] = "mooncake"
    speed: Annotated[float, Option(_TRAFFIC, "Playback speed of the trace.", "FACTOR", within=_POSITIVE)] = 1.0
    tenants: Annotated[
        int, Option(_TRAFFIC, "Number of equal tenants, without a workload file.", "NUMBER", within=(1, 10**6))
    ] = 4
    skew: Annotated[
        float, Option(_TRAFFIC, "Zipf exponent of the tenants' shares of the load.", "NUMBER", within=(0, 100))
    ] = 0.0
    rate: Annotated[float, Option(_TRAFFIC, "Requests per second, all tenants together.", "RATE", within=_POSITIVE)] = (
        8.0
    )
    arrivals: Annotated[
        Literal["poisson", "gamma", "constant", "on_off", "markov"],
        Option(_TRAFFIC, "poisson, gamma, constant, on_off or markov.", "NAME"),
    ] = "poisson"
    burstiness: Annotated[
        float, Option(_TRAFFIC, "Shape of gamma arrivals; below 1: bursts.", "SHAPE", within=_POSITIVE)
    ] = 1.0
    input_len: Annotated[int, Option(_TRAFFIC, "Mean prompt length.", "TOKENS", within=_COUNT)] = 512
    output_len: Annotated[int, Option(_TRAFFIC, "Mean answer length.", "TOKENS", within=_COUNT)] = 128
    sigma: Annotated[float, Option(_TRAFFIC, "Sigma of the log-normal lengths.", "NUMBER", within=(0, 100))] = 0.5
    prefix_len: Annotated[
        int, Option(_TRAFFIC, "Length of the prefix that a tenant's prompts share.", "TOKENS", within=(0, 10**9))
    ] = 0
    num_prefixes: Annotated[int, Option(_TRAFFIC, "Number of distinct shared prefixes.", "NUMBER", within=_COUNT)] = 1
    duration: Annotated[float, Option(_TRAFFIC, "Virtual time.", "SECONDS", within=_POSITIVE)] = 600.0
    most_requests: Annotated[int, Option(_TRAFFIC, "Maximum requests read from a trace.", "NUMBER", within=_COUNT)] = (
        100_000
    )
    max_concurrency: Annotated[
        int | None,
        Option(
            _TRAFFIC,
            "Number of concurrent requests (closed loop); arrival times then give only the order.",
            "NUMBER",
            within=_COUNT,
        ),
    ] = None
    seed: Annotated[int, Option(_TRAFFIC, "Seed of all random draws.", "NUMBER", within=(0, 2**63 - 1))] = 0

    replicas: Annotated[
        int, Option(_MACHINE, "Number of equal engines behind one front.", "NUMBER", within=(1, 4096))
    ] = 1
    placement: Annotated[
        Literal["router", "in_turn", "at_random"],
        Option(_MACHINE, "Who chooses the engine: router, in_turn or at_random.", "NAME"),
    ] = "router"
    policy: Annotated[
        PolicyName,
        Option(_MACHINE, "fair, priority (band, then arrival) or fcfs (arrival alone, without bands).", "NAME"),
    ] = "fair"
    machine: Annotated[Literal["default", "h200"], Option(_MACHINE, "Step times: default or h200.", "NAME")] = "default"
    step_times: Annotated[Path | None, Option(_MACHINE, "File of step times that the engine measured.", "FILE")] = None
    calibration: Annotated[
        Path | None, Option(_MACHINE, "Corrections of step and HTTP times of a real server (JSON).", "FILE")
    ] = None
    noise: Annotated[
        float, Option(_MACHINE, "Random relative variation of step times, such as 0.1.", "SHARE", within=(0, 0.999))
    ] = 0.0
    blocks: Annotated[int, Option(_MACHINE, "Blocks of the device tier.", "NUMBER", within=_COUNT)] = 8192
    host_blocks: Annotated[int, Option(_MACHINE, "Blocks of the DDR tier.", "NUMBER", within=(0, 10**9))] = 0
    disk_blocks: Annotated[int, Option(_MACHINE, "Blocks of the SSD tier.", "NUMBER", within=(0, 10**9))] = 0
    block_size: Annotated[int, Option(_MACHINE, "Tokens per block.", "TOKENS", within=_COUNT)] = 16
    block_bytes: Annotated[int, Option(_MACHINE, "Bytes per block, for copies.", "BYTES", within=(1, 10**12))] = (
        2 * 1024 * 1024
    )
    max_num_seqs: Annotated[int, Option(_MACHINE, "Maximum running sequences.", "NUMBER", within=_COUNT)] = 64
    max_num_batched_tokens: Annotated[int, Option(_MACHINE, "Maximum tokens per step.", "TOKENS", within=_COUNT)] = 2048
    max_model_len: Annotated[int, Option(_MACHINE, "Maximum tokens per sequence.", "TOKENS", within=_COUNT)] = 131_072
    tbt_goal_ms: Annotated[
        float, Option(_MACHINE, "Goal for the time between tokens; 0: none.", "MS", within=(0, 1e9))
    ] = 0.0
    min_prefill_share: Annotated[
        float,
        Option(_MACHINE, "Minimum share of device time for prompts beside decodes.", "SHARE", within=(0, 0.9)),
    ] = 0.3
    patience: Annotated[
        float, Option(_MACHINE, "Waiting time after which other accounts are preempted.", "SECONDS", within=_POSITIVE)
    ] = 2.0
    preemption_mode: Annotated[PreemptionMode, Option(_MACHINE, "auto, swap or recompute.", "NAME")] = "auto"

    json: Annotated[Path | None, Option(_OUTPUT, "File for all figures (JSON).", "FILE")] = None
    plots: Annotated[Path | None, Option(_OUTPUT, "Folder for the PNG pictures.", "FOLDER")] = None
    most_rows: Annotated[
        int, Option(_OUTPUT, "Maximum tenants in the table; --json has all.", "NUMBER", within=_COUNT)
    ] = 20
