"""Places in the queue."""

import time

from gateway.turns import ROUND_TOKENS, Turns


def served(places: dict[str, int]) -> list[str]:
    return sorted(places, key=places.__getitem__)


def test_one_client_is_served_in_the_order_of_asking() -> None:
    turns = Turns()
    places = {str(i): turns.place("", 500) for i in range(50)}
    assert served(places) == [str(i) for i in range(50)]


def test_a_client_that_floods_the_queue_does_not_make_another_wait_behind_it() -> None:
    turns = Turns()
    flood = {f"a{i}": turns.place("a", 1000) for i in range(500)}
    places = {**flood, "b": turns.place("b", 1000)}
    before = served(places).index("b")
    assert before <= ROUND_TOKENS // 1000 + 1


def test_shares_are_equal_in_tokens_not_in_requests() -> None:
    turns = Turns()
    large = {f"l{i}": turns.place("large", 8000) for i in range(100)}
    small = {f"s{i}": turns.place("small", 1000) for i in range(800)}
    first = served({**large, **small})[: len(large) // 2 + len(small) // 2]
    tokens = [8000 * sum(n[0] == "l" for n in first), 1000 * sum(n[0] == "s" for n in first)]
    assert abs(tokens[0] - tokens[1]) <= 2 * ROUND_TOKENS


def test_a_client_that_was_away_saves_nothing_up() -> None:
    turns = Turns()
    for _ in range(100):
        turns.served(turns.place("busy", 5000))
    back = [turns.place("back", 5000) for _ in range(20)]
    busy = [turns.place("busy", 5000) for _ in range(20)]
    assert abs(sorted(back + busy).index(busy[0]) - sorted(back + busy).index(back[0])) <= 4


def test_the_earliest_deadline_goes_first_and_none_means_much_later() -> None:
    turns, now = Turns(), time.monotonic()
    places = {
        "none": turns.place("", 10),
        "late": turns.place("", 10, now + 60),
        "soon": turns.place("", 10, now + 1),
    }
    assert served(places) == ["soon", "late", "none"]
