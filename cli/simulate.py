"""`tiercel simulate`: traffic through the real scheduler and cache books, in virtual time."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tiercel.cli.console import warn
from tiercel.errors import ConfigError
from tiercel.settings import PolicyName, PreemptionMode

if TYPE_CHECKING:
    from tiercel.simulation.simulator import SimSettings
    from tiercel.simulation.workload import Workload


def _option(text: str, metavar: str = "NUMBER") -> Any:  # Any: typer's own type of an option
    return typer.Option(help=text, metavar=metavar)


def simulate(
    workload: Annotated[Path | None, _option("Tenants and what they ask (YAML).", "FILE")] = None,
    trace: Annotated[Path | None, _option("A recorded trace instead.", "FILE")] = None,
    trace_format: Annotated[
        Literal["mooncake", "burstgpt"], typer.Option(help="mooncake (JSON lines), burstgpt (CSV).", metavar="NAME")
    ] = "mooncake",
    speed: Annotated[float, _option("Play the trace so many times as fast.")] = 1.0,
    tenants: Annotated[int, _option("Without a workload file: so many alike.")] = 4,
    skew: Annotated[float, _option("Part of the n-th tenant: n ** -skew.")] = 0.0,
    rate: Annotated[float, _option("Requests a second, all tenants together.")] = 8.0,
    arrivals: Annotated[
        Literal["poisson", "gamma", "constant", "on_off", "markov"],
        typer.Option(help="poisson, gamma, constant, on_off, markov.", metavar="NAME"),
    ] = "poisson",
    burstiness: Annotated[float, _option("Of gamma: below 1 in bursts.")] = 1.0,
    input_len: Annotated[int, _option("Mean tokens of a prompt.")] = 512,
    output_len: Annotated[int, _option("Mean tokens of an answer.")] = 128,
    sigma: Annotated[float, _option("Log-normal spread of lengths.")] = 0.5,
    prefix_len: Annotated[int, _option("Tokens that a tenant's prompts share.")] = 0,
    num_prefixes: Annotated[int, _option("So many different ones.")] = 1,
    duration: Annotated[float, _option("Virtual time.", "SECONDS")] = 600.0,
    most_requests: Annotated[int, _option("Of a trace.")] = 100_000,
    seed: Annotated[int, _option("Everything is drawn from it.")] = 0,
    policy: Annotated[PolicyName, typer.Option(help="fair, priority, fcfs.", metavar="NAME")] = "fair",
    machine: Annotated[Literal["default", "h200"], typer.Option(help="default, h200.", metavar="NAME")] = "default",
    step_times: Annotated[Path | None, _option("Measured step times (the engine's file).", "FILE")] = None,
    calibration: Annotated[
        Path | None, _option("Corrections of step times, and HTTP times, of a real server (JSON).", "FILE")
    ] = None,
    max_concurrency: Annotated[
        int | None, _option("Closed loop of so many requests at once; their times give the order only.")
    ] = None,
    noise: Annotated[float, _option("Of step times, to both sides: 0.1.")] = 0.0,
    blocks: Annotated[int, _option("Blocks of the device tier.")] = 8192,
    host_blocks: Annotated[int, _option("Blocks of DDR.")] = 0,
    disk_blocks: Annotated[int, _option("Blocks of the SSD.")] = 0,
    block_size: Annotated[int, _option("Tokens of a block.")] = 16,
    block_bytes: Annotated[int, _option("Bytes of a block, for copies.")] = 2 * 1024 * 1024,
    max_num_seqs: Annotated[int, _option("Sequences at once.")] = 64,
    max_num_batched_tokens: Annotated[int, _option("Tokens of a step.")] = 2048,
    max_model_len: Annotated[int, _option("Tokens of a sequence.")] = 131_072,
    tbt_goal_ms: Annotated[float, _option("Between two tokens; 0 = none.")] = 0.0,
    patience: Annotated[float, _option("Before others give way.", "SECONDS")] = 2.0,
    preemption_mode: Annotated[PreemptionMode, typer.Option(help="auto, swap, recompute.", metavar="NAME")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures.", metavar="FILE")] = None,
    plots: Annotated[Path | None, _option("Draw PNG files there.", "FOLDER")] = None,
    most_rows: Annotated[int, _option("Tenants shown; all are in --json.")] = 20,
) -> int:
    """Replay traffic through the engine's own loop, planner, policy and cache books in virtual time.

    Nothing is computed: steps and copies take the time that a table says. The same seed gives the same figures.
    """
    # lazy: no other verb simulates
    import msgspec

    # lazy: as above
    from tiercel.cli.simulate_input import Flags, read_step_times, read_workload_file, trace_workload, uniform_workload
    from tiercel.device.sim_mover import SimRates
    from tiercel.loadtest.report.drawing import check_drawing
    from tiercel.simulation.profile import profile
    from tiercel.simulation.replay import Replay
    from tiercel.simulation.result import figures
    from tiercel.simulation.simulator import SimSettings

    if plots is not None:
        check_drawing()  # before the work, not behind it
    flags = Flags(
        tenants=tenants, skew=skew, rate=rate, arrivals=arrivals, burstiness=burstiness, input_len=input_len,
        output_len=output_len, sigma=sigma, prefix_len=prefix_len, num_prefixes=num_prefixes, duration_s=duration,
        seed=seed, speed=speed, most_requests=most_requests, block_size=block_size,
    )  # fmt: skip
    if workload is not None and trace is not None:
        raise ConfigError("simulate.flags", "give --workload or --trace, not both")
    if trace is not None:
        asked = trace_workload(trace, trace_format, flags)
    else:
        asked = read_workload_file(workload, flags) if workload is not None else uniform_workload(flags)
    times = read_step_times(step_times) if step_times is not None else profile(machine)
    settings = SimSettings(
        times=times, policy=policy, blocks=blocks, host_blocks=host_blocks, disk_blocks=disk_blocks,
        block_size=block_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len, tbt_goal_ms=tbt_goal_ms, patience_s=patience, preemption_mode=preemption_mode,
        rates=SimRates(block_bytes=block_bytes), noise=noise, seed=seed, concurrency=max_concurrency,
    )  # fmt: skip
    if calibration is not None:
        # lazy: as above
        from tiercel.cli.simulate_input import read_corrections

        settings = read_corrections(calibration).applied(settings)
    _check(settings, asked)
    began_s = time.monotonic()
    if max_concurrency is None:
        replay = Replay(settings, asked, duration_s=duration)
    else:
        replay = Replay(settings, asked, closes_s=duration)
    replay.run()
    found = figures(replay)
    # lazy: as above
    from tiercel.cli.simulate_output import draw, show

    show(found, most_rows)
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    if plots is not None:
        for path in draw(replay, found, plots):
            print(path)
    warn_s = time.monotonic() - began_s
    print(f"{found.virtual_s:,.0f} virtual seconds in {warn_s:.1f} s")
    return 0


def _check(settings: "SimSettings", asked: "Workload") -> None:
    """Errors: ConfigError for what no engine would start with."""
    positive = ("blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "patience_s")
    for name in positive:
        if getattr(settings, name) <= 0:
            raise ConfigError("simulate.flags", f"--{name.replace('_', '-').removesuffix('-s')}: must be more than 0")
    if min(settings.host_blocks, settings.disk_blocks) < 0 or not 0 <= settings.noise < 1:
        raise ConfigError("simulate.flags", "--host-blocks, --disk-blocks and --noise: at least 0; noise below 1")
    if settings.concurrency is not None and settings.concurrency < 1:
        raise ConfigError("simulate.flags", "--max-concurrency: at least 1")
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        raise ConfigError("simulate.flags", "--max-num-batched-tokens: at least --max-num-seqs")
    if not asked.requests:
        raise ConfigError("simulate.flags", "nothing is asked in that time")
    longest = max(request.num_prompt for request in asked.requests)
    if longest >= min(settings.max_model_len, settings.blocks * settings.block_size):
        warn(f"prompts of up to {longest:,} tokens: those that do not fit are refused and counted so")
