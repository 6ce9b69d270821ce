"""Apply settings that change while the engine runs. Imports no torch."""

import logging
from dataclasses import replace
from typing import NamedTuple

from msgspec import structs

from tiercel.kvcache.manager import CacheManager
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.cost import StepCosts
from tiercel.scheduler.planner import Planner
from tiercel.scheduler.policy import Policy, open_policy
from tiercel.scheduler.step_goal import log_goal, step_beside
from tiercel.scheduler.step_limits import DEFAULT_GOAL_S, YIELD_LOSS, StepLimits
from tiercel.settings.settings import EngineSettings
from tiercel.system.log import set_log_level

log = logging.getLogger(__name__)

_PATIENCE_STEPS = 16


class Pace(NamedTuple):
    """The scale of fairness: quanta and debt limits are multiples of it."""

    step_ms: float  # of the longest step
    patience_s: float  # waiting time after which a sequence counts as starved


def pace_of(settings: EngineSettings, costs: StepCosts, most_tokens: int, *, yields: bool = False) -> Pace:
    """Return the time of the longest step that prompts may fill beside one decode, and the patience that follows.

    `yields`: steps without decodes keep the goal, too, or hold the fewest tokens that do not waste time.
    """
    step_ms = costs.predict_ms(most_tokens, settings.sequences, 0)
    limits = step_limits(settings, most_tokens, 0)
    if limits.tbt_goal_ms:
        least = costs.predict_ms(settings.block_size, 1, 0)
        if yields:
            least = max(least, costs.predict_ms(costs.min_prefill(most_tokens, 0, YIELD_LOSS), 0, 0))
        beside_one = step_beside(1, 0, limits, costs)
        step_ms = min(step_ms, max(beside_one.goal_ms, beside_one.longest_ms, least))
    return Pace(step_ms, min(2.0, max(0.1, _PATIENCE_STEPS * step_ms / 1e3)))


def policy_of(settings: EngineSettings, costs: StepCosts, most_tokens: int, *, yields: bool = False) -> Policy:
    """Open the scheduling policy of the settings."""
    pace = pace_of(settings, costs, most_tokens, yields=yields)
    return open_policy(settings.scheduling_policy, costs, step_ms=pace.step_ms, patience_s=pace.patience_s)


def step_limits(settings: EngineSettings, most_tokens: int, block_bytes: int, *, yields: bool = False) -> StepLimits:
    """Return the limits of one step. `yields`: a step without decodes keeps the goal, too."""
    is_default = settings.tbt_goal_s is None
    goal_ms = 1e3 * (DEFAULT_GOAL_S if settings.tbt_goal_s is None else settings.tbt_goal_s)
    return StepLimits(
        settings.sequences,
        most_tokens,
        settings.long_prefill_token_threshold,
        settings.max_long_partial_prefills,
        tbt_goal_ms=goal_ms,
        is_goal_elastic=is_default,
        min_prefill_share=settings.min_prefill_share,
        yield_ms=goal_ms if yields else 0.0,
        block_bytes=block_bytes,
    )


def daily_blocks(settings: EngineSettings, block_bytes: int) -> int:
    """Return how many blocks may be written to the SSD per day; 0 means no limit."""
    return max(1, settings.kv_disk_daily_bytes // block_bytes) if settings.kv_disk_daily_bytes else 0


def _goal_keys(settings: EngineSettings) -> tuple[float | None, float]:
    return settings.tbt_goal_s, settings.min_prefill_share


def _pace_keys(settings: EngineSettings) -> tuple[float | None, float, int]:
    return *_goal_keys(settings), settings.sequences


class Steering:
    """Applies changed settings to the books.

    Running sequences go on; waiting sequences are ordered by the new policy. `max_num_seqs` cannot exceed its value at
    the start, for which rows and memory were reserved.
    """

    def __init__(
        self, book: SequenceBook, planner: Planner, cache: CacheManager, settings: EngineSettings, most_tokens: int,
        *, yields: bool = False,
    ) -> None:  # fmt: skip
        self._book = book
        self._planner = planner
        self._cache = cache
        self._settings = settings
        self._most_seqs = settings.sequences
        self._most_tokens = most_tokens
        self._yields = yields

    def steer(self, settings: EngineSettings, now_s: float) -> None:
        """Use these settings from the next step on. Call between two steps."""
        if settings.max_num_seqs is None:  # the default was chosen by device at the start
            settings = structs.replace(settings, max_num_seqs=self._most_seqs)
        before, self._settings = self._settings, settings
        limits = self._planner.limits
        self._planner.set_limits(
            replace(
                step_limits(settings, self._most_tokens, limits.block_bytes, yields=self._yields),
                max_num_seqs=min(settings.sequences, self._most_seqs),
            )
        )
        step_ms, patience_s = pace_of(settings, self._book.policy.costs, self._most_tokens, yields=self._yields)
        if settings.scheduling_policy != before.scheduling_policy:
            self._book.switch_policy(settings.scheduling_policy, now_s, step_ms=step_ms, patience_s=patience_s)
        elif _pace_keys(settings) != _pace_keys(before):
            self._book.policy.set_pace(step_ms, patience_s, now_s)
        if _goal_keys(settings) != _goal_keys(before):
            log_goal(self._planner.limits, self._book.policy.costs)
        if settings.kv_disk_daily_bytes != before.kv_disk_daily_bytes:
            self._cache.set_daily_writes(daily_blocks(settings, max(1, limits.block_bytes)))
        if settings.log_level != before.log_level:
            set_log_level(settings.log_level)
