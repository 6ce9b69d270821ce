"""Step times of machines without a measured table."""

from itertools import product
from typing import Literal

from tiercel.scheduler.cost import StepTimes, linear_times
from tiercel.simulation.sizing import DEVICES

MachineName = Literal["default", "h200"]

_WEIGHTS = 8e9  # an 8B model in bfloat16, 32 layers of 8 KV heads of 128
_KV_BYTES = 131_072  # per token
_ATTENTION_FLOPS = 4 * 32 * 4096  # for each pair of a query token and a token of context
_HOST_MS = 1.0  # of each step, on the host
_COMPUTE, _MEMORY = 0.5, 0.7  # part of the peaks that kernels reach


def profile(name: MachineName) -> StepTimes:
    """Return step times: `default` is linear in tokens, `h200` an 8B model by its roofline at a part of the peaks."""
    return linear_times() if name == "default" else _h200()


def _h200() -> StepTimes:
    device = DEVICES["H200"]
    axes = ((0, 64, 256, 1024, 4096, 16_384), (0, 1, 8, 32, 128, 512), (0, 8192, 65_536, 524_288))

    def step_ms(prefill: int, decodes: int, context: int) -> float:
        tokens = prefill + decodes
        read_s = (2 * _WEIGHTS + _KV_BYTES * context) / (_MEMORY * device.memory_bytes_per_s)
        # The table does not say whether context belongs to prompts or decodes: assume prompts if there are any.
        attention = _ATTENTION_FLOPS * prefill * context if prefill else 0
        compute_s = (2 * _WEIGHTS * tokens + attention) / (_COMPUTE * device.flops_per_s)
        return _HOST_MS + 1e3 * max(read_s, compute_s)

    return StepTimes(
        prefill_tokens=axes[0],
        decodes=axes[1],
        context_tokens=axes[2],
        ms=tuple(step_ms(*point) for point in product(*axes)),
    )
