"""The block pool: nothing lost, nothing owned twice, runs kept together."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.blocks import BlockPool, IntegrityError, contiguity
from planner.errors import InvalidInputError
from planner.request import BlockId


@settings(max_examples=500, deadline=None)
@given(
    total_blocks=st.integers(1, 60),
    operations=st.lists(
        st.tuples(st.sampled_from(["allocate", "grow", "free"]), st.integers(0, 20)), max_size=60
    ),
    room=st.integers(0, 40),
)
def test_any_history_keeps_free_plus_owned_equal_to_total(total_blocks, operations, room):
    pool = BlockPool(total_blocks)
    owners: list[list[BlockId]] = []
    for operation, number in operations:
        free_before = pool.free_blocks
        if operation == "allocate" and number:
            blocks = pool.allocate(number, room)
            assert (blocks is None) == (number > free_before)
            if blocks is not None:
                assert len(blocks) == number
                owners.append(blocks)
        elif operation == "grow" and owners:
            owner = owners[number % len(owners)]
            block = pool.grow(owner[-1], room)
            assert (block is None) == (free_before == 0)
            owner += [] if block is None else [block]
        elif operation == "free" and owners:
            pool.free(owners.pop(number % len(owners)))
        pool.check_integrity(owners)
    for owner in owners:
        pool.free(owner)
    assert pool.free_blocks == total_blocks
    assert pool.allocate(total_blocks) is not None


def test_a_run_is_found_wherever_it_lies():
    pool = BlockPool(12)
    pieces = [pool.allocate(3) for _ in range(4)]
    pool.free(pieces[1])
    pool.free(pieces[2])
    run = pool.allocate(6)
    assert contiguity(run) == 1.0


def test_scattered_blocks_are_gathered_in_the_longest_runs():
    pool = BlockPool(12)
    singles = [pool.allocate(1)[0] for _ in range(12)]
    pool.free([singles[i] for i in (1, 2, 3, 4, 7, 9)])
    blocks = pool.allocate(6)
    assert sorted(blocks) == [1, 2, 3, 4, 7, 9]
    assert blocks[:3] == [1, 2, 3] or blocks[:2] == [1, 2]


def test_owners_that_take_turns_growing_stay_contiguous_while_there_is_room():
    pool = BlockPool(100)
    owners = [pool.allocate(2, room=8) for _ in range(10)]
    for _ in range(8):
        for owner in owners:
            owner.append(pool.grow(owner[-1], room=8))
    assert all(contiguity(owner) == 1.0 for owner in owners)
    assert pool.free_blocks == 0


def test_reserved_room_is_used_by_others_when_the_pool_is_full():
    pool = BlockPool(10)
    pool.allocate(2, room=8)
    assert pool.allocate(8) is not None


def test_too_many_blocks_is_none_and_takes_nothing():
    pool = BlockPool(4)
    assert pool.allocate(5) is None
    assert pool.free_blocks == 4


def test_double_free_is_an_error():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(IntegrityError, match="freed twice"):
        pool.free(blocks)


@pytest.mark.parametrize(
    "owners", [[[0, 1], [1]], [[0]], [[0, 1, 3]]], ids=["owned twice", "lost", "not in use"]
)
def test_integrity_check_notices(owners):
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(IntegrityError):
        pool.check_integrity(owners)


@pytest.mark.parametrize(("field", "arguments"), [("total_blocks", (0,)), ("block_tokens", (1, 0))])
def test_a_pool_of_nothing_names_its_field(field, arguments):
    with pytest.raises(InvalidInputError, match=field):
        BlockPool(*arguments)


def test_contiguity_counts_neighbouring_pairs():
    assert contiguity([4, 5, 6, 7]) == 1.0
    assert contiguity([4, 5, 9, 10, 2]) == 0.5
    assert contiguity([4]) == 1.0
