"""The length of steps in which sequences decode: the goals between tokens, and the share that prompts get anyway."""

import logging
from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass, replace

from tiercel.scheduler.cost import StepCosts
from tiercel.scheduler.sequence import SequenceProgress
from tiercel.scheduler.step_limits import DECODE_STEPS, StepLimits

log = logging.getLogger(__name__)

_SHOWN_DECODES = (1, 8, 32, 128)  # for which the trade is logged
_UNLIMITED = 1 << 30  # tokens
_SHOWN_CONTEXT = 1024  # tokens of each of these decodes


@dataclass(frozen=True, slots=True)
class StepBesideDecodes:
    """The time that a step leaves to prompts beside its decodes.

    A step ends within `goal_ms`. If the decodes take so much of the goal that prompts would get less than `share` of
    the step, it ends later: after decode_ms / (1 - share), and the tokens that complete a block.
    """

    costs: StepCosts
    decodes: int
    context: int  # KV tokens of the decodes, all together
    decode_ms: float  # predicted time of a step of the decodes alone
    goal_ms: float  # 0 = no goal
    share: float  # of the step's predicted time

    @property
    def longest_ms(self) -> float:
        """The longest predicted time of the step, without the tokens that complete a block."""
        return max(self.costs.safe_ms(self.goal_ms), self.decode_ms / (1 - self.share))

    def max_prompt(self, block_size: int, tokens: int, reads: int, start: int) -> int:
        """Return the tokens that a prompt behind `start` tokens of context may add to the step: see `MaxPrompt`.

        Without a goal it may add any number. An unfinished chunk is cut back to the end of a block. A block is
        therefore added to the tokens of the share, so that prompts keep the share.
        """
        if not self.goal_ms:
            return _UNLIMITED
        in_goal = self._max_added(self.costs.safe_ms(self.goal_ms), tokens, reads, start)
        if not self.share:
            return in_goal
        return max(in_goal, self._max_added(self.decode_ms / (1 - self.share), tokens, reads, start) + block_size)

    def _max_added(self, step_ms: float, tokens: int, reads: int, start: int) -> int:
        return self.costs.max_added(step_ms, tokens, reads, start, self.decodes, self.context)


def beside_decodes(decoding: Collection[SequenceProgress], limits: StepLimits, costs: StepCosts) -> StepBesideDecodes:
    """Return the step beside these decodes. Its goal is the tightest of theirs."""
    beside = step_beside(len(decoding), sum(one.scheduled for one in decoding), limits, costs)
    goals_ms = {1e3 * one.tbt_goal_s if one.tbt_goal_s else beside.goal_ms for one in decoding}
    goal_ms = min(filter(None, goals_ms), default=0.0)
    if goal_ms == beside.goal_ms:
        return beside
    return replace(beside, goal_ms=goal_ms, share=limits.min_prefill_share)


def step_beside(decodes: int, context: int, limits: StepLimits, costs: StepCosts) -> StepBesideDecodes:
    """Return the step beside decodes of tenants without a goal of their own."""
    decode_ms, goal_ms = costs.step_ms(0, 0, decodes, context), limits.tbt_goal_ms
    share = limits.min_prefill_share
    if goal_ms and limits.is_goal_elastic:
        goal_ms = max(goal_ms, DECODE_STEPS * decode_ms)
        share = max(share, 1 - 1 / DECODE_STEPS)
    return StepBesideDecodes(costs, decodes, context, decode_ms, goal_ms, share)


def log_goal(limits: StepLimits, costs: StepCosts) -> None:
    """Log what the goal between tokens leaves to prompts: their share of the device time by the number of decodes.

    A goal of the operator that is missed even beside one decode is logged as a warning.
    """
    goal_ms = limits.tbt_goal_ms
    if not goal_ms:
        log.info("tbt goal goal_s=0")
        return

    def beside(decodes: int) -> StepBesideDecodes:
        return step_beside(decodes, decodes * _SHOWN_CONTEXT, limits, costs)

    counts = sorted({count for count in _SHOWN_DECODES if count < limits.max_num_seqs} | {limits.max_num_seqs})
    shares = {count: 1 - beside(count).decode_ms / beside(count).longest_ms for count in counts}
    kept = bisect_right(range(1, limits.max_num_seqs + 1), goal_ms, key=lambda count: beside(count).longest_ms)
    log.info(
        "tbt goal goal_s=%g source=%s min_prefill_share=%g prefill_share_by_decodes=%s kept_up_to_decodes=%d",
        goal_ms / 1e3,
        "default" if limits.is_goal_elastic else "given",
        limits.min_prefill_share,
        ",".join(f"{count}:{share:.2f}" for count, share in shares.items()),
        kept,
    )
    if not kept and not limits.is_goal_elastic:
        log.warning(
            "tbt goal is missed while prompts wait goal_s=%g decode_s=%.3f step_s=%.3f: one decode and "
            "--min-prefill-share take longer",
            goal_ms / 1e3,
            beside(1).decode_ms / 1e3,
            beside(1).longest_ms / 1e3,
        )
