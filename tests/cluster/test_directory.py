"""The directory of a cluster: an engine or a report counts until its lease expires."""

from tiercel.cluster.directory import LEASE_S, EngineDirectory


def test_engines_count_as_long_as_they_announce_themselves() -> None:
    directory = EngineDirectory()
    directory.announce("10.0.0.2:8100", 0)
    directory.announce("10.0.0.1:8100", 1)
    assert directory.addresses(LEASE_S) == ("10.0.0.1:8100", "10.0.0.2:8100")
    directory.announce("10.0.0.2:8100", 5)
    assert directory.addresses(LEASE_S + 2) == ("10.0.0.2:8100",)
    directory.withdraw("10.0.0.2:8100")
    directory.withdraw("10.0.0.3:8100")
    assert directory.addresses(LEASE_S + 2) == ()


def test_the_work_is_that_of_all_fronts_that_report() -> None:
    directory = EngineDirectory()
    assert directory.work_s(0) is None
    directory.report("a", 1.5, 0)
    directory.report("b", 2.0, 0)
    assert directory.work_s(1) == 3.5
    directory.report("a", 0.5, 5)
    assert directory.work_s(LEASE_S + 1) == 0.5
    assert directory.work_s(2 * LEASE_S + 1) is None  # not known: the number of engines stays
