"""The rule for the number of threads, in virtual time."""

import itertools
import random

import pytest

from tests.seeds import fresh_seeds
from tiercel.device.team import WINDOW_S, Team, TeamWidth
from tiercel.values.clock import ManualClock


class Machine:
    """Cores under other processes: the times that the kernel would count. Also the source of a `Team`."""

    def __init__(self, cores: int, others: float = 0.0) -> None:
        self.cores = cores
        self.others = others  # cores that other processes would use
        self.width = cores
        self.is_counted = True

    def waiting(self) -> float:
        """Return the waiting time of the team per second: what it lacks when everybody gets an equal share."""
        wanted = self.width + self.others
        return max(0.0, self.width * (1 - self.cores / wanted)) if wanted else 0.0

    def idle(self) -> float:
        return max(0.0, self.cores - self.width - self.others)

    def waited_s(self) -> float | None:
        return self.waiting() * WINDOW_S if self.is_counted else None

    def idle_s(self) -> float | None:
        return self.idle() * WINDOW_S if self.is_counted else None


def settle(rule: TeamWidth, machine: Machine, seconds: float = 2.0) -> int:
    """Let the rule decide for some seconds; return the width."""
    for _ in range(round(seconds / WINDOW_S)):
        machine.width = rule.width
        rule.adjust(WINDOW_S, machine.waiting() * WINDOW_S, machine.idle() * WINDOW_S)
    return rule.width


@pytest.mark.parametrize(
    ("cores", "others", "width"), [(2, 0, 2), (2, 1, 1), (2, 5, 1), (8, 0, 8), (8, 1, 7), (8, 4, 5), (64, 1, 63)]
)
def test_the_team_leaves_to_other_processes_the_cores_that_they_use(cores: int, others: int, width: int) -> None:
    assert abs(settle(TeamWidth(cores), Machine(cores, others)) - width) <= (1 if others > 1 else 0)


def test_a_team_is_wide_again_as_soon_as_cores_are_idle() -> None:
    rule, machine = TeamWidth(8), Machine(8, others=3)
    assert settle(rule, machine) < 8
    machine.others = 0
    assert settle(rule, machine, seconds=2 * WINDOW_S) == 8


def test_short_work_of_other_processes_does_not_change_the_width() -> None:
    rule = TeamWidth(2)
    for others in (0.1, 0.2, 0.3):
        assert settle(rule, Machine(2, others)) == 2


def test_the_full_width_is_tried_less_and_less_often_if_it_does_not_help() -> None:
    rule = TeamWidth(2)
    tried: list[int] = []
    for window in range(400):
        waited_s = WINDOW_S / 2 if rule.width == 2 else 0.0
        if rule.adjust(WINDOW_S, waited_s, 0.0) == 2:
            tried.append(window)
    pauses = [after - before for before, after in itertools.pairwise(tried)]
    assert 4 <= tried[0] <= 8
    assert pauses == sorted(pauses) and 60 <= pauses[-1] <= 90


def test_a_team_is_wide_again_soon_if_others_give_way_to_it() -> None:
    """Processes of a lower priority use the cores as far as the team does not, so that no core is idle."""
    rule = TeamWidth(4)
    assert rule.adjust(WINDOW_S, 2 * WINDOW_S, None) == 2
    widths = [rule.adjust(WINDOW_S, 0.0, idle_s) for idle_s in (0.0, None) * 10]
    assert widths.index(4) <= 8 and widths[-1] == 4


def test_two_engines_share_the_cores() -> None:
    """Both teams compute whichever of them began first, and together they want no more threads than there are cores."""
    rules = [TeamWidth(8), TeamWidth(8)]
    for _ in range(200):
        widths = [rule.width for rule in rules]
        for rule, own, other in zip(rules, widths, reversed(widths), strict=True):
            machine = Machine(8, others=other)
            machine.width = own
            rule.adjust(WINDOW_S, machine.waiting() * WINDOW_S, machine.idle() * WINDOW_S)
    assert min(rule.width for rule in rules) >= 3
    assert sum(rule.width for rule in rules) <= 9


@pytest.mark.parametrize("seed", [1, 2, *fresh_seeds(2)])
def test_the_width_stays_between_one_and_the_number_of_threads(seed: int) -> None:
    draw = random.Random(seed)
    rule = TeamWidth(threads := draw.randint(1, 64))
    for _ in range(500):
        window_s = draw.uniform(WINDOW_S, 5)
        idle_s = draw.choice([None, draw.uniform(0, threads) * window_s])
        assert 1 <= rule.adjust(window_s, draw.uniform(0, threads) * window_s, idle_s) <= threads


def run_jobs(team: Team, clock: ManualClock, jobs: int, job_s: float, pause_s: float = 0.0) -> list[int]:
    """Run jobs one after the other; return the widths after those that changed it."""
    changed: list[int] = []
    for _ in range(jobs):
        team.begin()
        clock.advance(job_s)
        if team.end():
            changed.append(team.width)
        clock.advance(pause_s)
    return changed


def test_the_width_changes_between_jobs() -> None:
    machine, clock = Machine(2, others=1), ManualClock()
    team = Team(2, machine, clock)
    assert run_jobs(team, clock, jobs=20, job_s=0.02) == [1]
    machine.others, machine.width = 0, 1
    assert run_jobs(team, clock, jobs=20, job_s=0.02) == [2]


def test_single_jobs_with_pauses_between_them_decide_nothing() -> None:
    clock = ManualClock()
    assert run_jobs(Team(2, Machine(2, others=1), clock), clock, jobs=20, job_s=0.02, pause_s=1.0) == []


def test_the_width_is_fixed_if_the_kernel_does_not_count_waiting() -> None:
    machine, clock = Machine(2, others=1), ManualClock()
    machine.is_counted = False
    assert run_jobs(Team(2, machine, clock), clock, jobs=50, job_s=0.1) == []
