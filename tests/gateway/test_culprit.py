"""The search by halving, against worlds in which it is known who is to blame."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.culprit import Search
from planner.request import SequenceId

MOST_TRIALS = 64


def searched(search: Search, guilty: set[int], always: bool = False) -> int:
    """Run trials until the search is over; returns how many there were."""
    for trial in range(MOST_TRIALS):
        if not search.on_trial:
            return trial
        if always or guilty & set(search.on_trial):
            search.convict()
        else:
            for sequence_id in list(search.on_trial):
                search.acquit(sequence_id)
    raise AssertionError("the search does not end")


def ids(count: int) -> list[SequenceId]:
    return [SequenceId(i) for i in range(count)]


@given(st.integers(1, 64), st.data(), st.booleans())
def test_the_one_that_makes_steps_fail_is_found_and_nobody_else(
    count: int, data: st.DataObject, doubtful: bool
) -> None:
    guilty = data.draw(st.integers(0, count - 1))
    newest = data.draw(st.sets(st.integers(0, count - 1)))
    search = Search(ids(count), {SequenceId(i) for i in newest}, doubtful)
    trials = searched(search, {guilty})
    alone = doubtful and count == 1  # then nothing can be compared with
    assert search.culprit == (None if alone else guilty)
    assert trials <= count.bit_length() + 4


@given(st.integers(2, 64), st.sets(st.integers(0, 63), min_size=2))
def test_of_several_culprits_one_is_found_at_a_time(count: int, guilty: set[int]) -> None:
    guilty = {g % count for g in guilty}
    search = Search(ids(count), set())
    searched(search, guilty)
    assert search.culprit in guilty


@given(st.integers(1, 64), st.booleans())
def test_a_failure_that_does_not_repeat_condemns_nobody(count: int, doubtful: bool) -> None:
    search = Search(ids(count), set(), doubtful)
    searched(search, set())
    assert search.culprit is None


@given(st.integers(1, 64))
def test_a_worker_that_dies_whoever_runs_condemns_nobody(count: int) -> None:
    search = Search(ids(count), set(), doubtful=True)
    searched(search, set(), always=True)
    assert search.culprit is None


def test_the_first_trial_is_without_the_newest() -> None:
    search = Search(ids(8), {SequenceId(6), SequenceId(7)})
    assert search.on_trial == ids(6)


@given(st.integers(2, 32), st.lists(st.integers(0, 31), max_size=40), st.data())
def test_sequences_that_leave_meanwhile_change_nothing_for_the_others(
    count: int, leavers: list[int], data: st.DataObject
) -> None:
    guilty = data.draw(st.integers(0, count - 1))
    search = Search(ids(count), set())
    for leaver in leavers:
        if leaver != guilty and leaver < count and search.on_trial:
            search.leave(SequenceId(leaver))
            if search.on_trial and guilty in search.on_trial:
                search.convict()
    searched(search, {guilty})
    assert search.culprit == guilty
