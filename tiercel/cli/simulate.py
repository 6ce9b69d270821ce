"""`tiercel simulate`: run traffic through the real scheduler and KV cache in virtual time."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tiercel.cli.console import warn
from tiercel.cli.flags import flags_of, make_command
from tiercel.cli.simulate_flags import SimulateFlags
from tiercel.settings.option import options_of, read_options
from tiercel.values.errors import ConfigError
from tiercel.wire.encoding import plain_value

if TYPE_CHECKING:
    from tiercel.simulation.replay import Replayed
    from tiercel.simulation.simulator import SimSettings
    from tiercel.simulation.workload import Workload


def simulate_command() -> Callable[..., int]:
    """Return the command with all its flags."""
    return make_command(simulate, flags_of(options_of(SimulateFlags).values()))


def simulate(given: dict[str, Any]) -> int:
    """Run traffic through the engine's loop, planner, policy and KV cache in virtual time, on one engine or several.

    No model is computed: the duration of steps and copies comes from a table. The
    same seed gives the same figures.
    """
    # lazy: no other verb simulates
    import msgspec

    # lazy: as above
    from tiercel.cli.simulate_output import draw, show
    from tiercel.loadtest.report.drawing import check_drawing
    from tiercel.simulation.result import figures

    flags = read_options(SimulateFlags, given)
    if flags.plots is not None:
        check_drawing()  # fails before the run if pictures cannot be drawn
    workload = _workload(flags)
    settings = _settings(flags)
    _check(settings, workload)
    began_s = time.monotonic()
    replay = _open(flags, settings, workload)
    replay.run()
    found = figures(replay)
    show(found, flags.most_rows)
    if flags.json is not None:
        flags.json.write_bytes(msgspec.json.format(msgspec.json.encode(found, enc_hook=plain_value)) + b"\n")
    if flags.plots is not None:
        for path in draw(replay, found, flags.plots):
            print(path)
    elapsed_s = time.monotonic() - began_s
    print(f"{found.virtual_s:,.0f} virtual seconds in {elapsed_s:.1f} s")
    return 0


def _workload(flags: SimulateFlags) -> "Workload":
    # lazy: no other verb simulates
    from tiercel.cli.simulate_input import read_workload_file, trace_workload, uniform_workload

    if flags.workload is not None and flags.trace is not None:
        raise ConfigError("simulate.flags", "give --workload or --trace, not both")
    if flags.trace is not None:
        return trace_workload(flags.trace, flags)
    return uniform_workload(flags) if flags.workload is None else read_workload_file(flags.workload, flags)


def _settings(flags: SimulateFlags) -> "SimSettings":
    # lazy: no other verb simulates
    from tiercel.cli.simulate_input import read_corrections, read_step_times
    from tiercel.device.sim_mover import SimRates
    from tiercel.simulation.profile import profile
    from tiercel.simulation.simulator import SimSettings

    settings = SimSettings(
        times=profile(flags.machine) if flags.step_times is None else read_step_times(flags.step_times),
        policy=flags.policy,
        blocks=flags.blocks,
        host_blocks=flags.host_blocks,
        disk_blocks=flags.disk_blocks,
        block_size=flags.block_size,
        max_num_seqs=flags.max_num_seqs,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        max_model_len=flags.max_model_len,
        tbt_goal_ms=flags.tbt_goal_ms,
        min_prefill_share=flags.min_prefill_share,
        patience_s=flags.patience,
        preemption_mode=flags.preemption_mode,
        rates=SimRates(block_bytes=flags.block_bytes),
        noise=flags.noise,
        seed=flags.seed,
        concurrency=flags.max_concurrency,
    )
    return settings if flags.calibration is None else read_corrections(flags.calibration).applied(settings)


def _open(flags: SimulateFlags, settings: "SimSettings", workload: "Workload") -> "Replayed":
    # lazy: no other verb simulates
    from tiercel.simulation.fleet import FleetSimSettings
    from tiercel.simulation.replay import FleetReplay, Replay

    duration_s, closes_s = flags.duration, float("inf")
    if flags.max_concurrency is not None:
        duration_s, closes_s = None, flags.duration
    if flags.replicas == 1:
        return Replay(settings, workload, duration_s=duration_s, closes_s=closes_s)
    fleet = FleetSimSettings(replicas=flags.replicas, engine=settings, placement=flags.placement)
    return FleetReplay(fleet, workload, duration_s=duration_s, closes_s=closes_s)


def _check(settings: "SimSettings", workload: "Workload") -> None:
    """Check the settings and the workload together. Errors: ConfigError if an engine with them would not start."""
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        raise ConfigError(
            "simulate.flags",
            f"--max-num-batched-tokens {settings.max_num_batched_tokens}: "
            f"expected at least --max-num-seqs {settings.max_num_seqs}",
        )
    if not workload.requests:
        raise ConfigError("simulate.flags", "the workload has no request within --duration")
    longest = max(request.num_prompt for request in workload.requests)
    if longest >= min(settings.max_model_len, settings.blocks * settings.block_size):
        warn(f"the longest prompt has {longest:,} tokens: requests that do not fit are counted as refused")
