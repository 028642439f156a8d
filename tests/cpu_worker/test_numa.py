"""Which cores attention processes get, on machines described by a made-up /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpu_worker.numa import Node, default_processes, parse_cpu_list, place, read_nodes


def make_system(root: Path, nodes: dict[int, str], siblings: dict[int, str]) -> Path:
    for number, cpus in nodes.items():
        (root / f"node/node{number}").mkdir(parents=True)
        (root / f"node/node{number}/cpulist").write_text(cpus + "\n")
    for cpu, threads in siblings.items():
        (root / f"cpu/cpu{cpu}/topology").mkdir(parents=True)
        (root / f"cpu/cpu{cpu}/topology/thread_siblings_list").write_text(threads + "\n")
    return root


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Two nodes of four cores with two threads each, numbered as servers do."""
    siblings = {cpu: f"{cpu % 8},{cpu % 8 + 8}" for cpu in range(16)}
    return make_system(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"}, siblings)


ALL = frozenset(range(16))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0-3,8,10-11\n", [0, 1, 2, 3, 8, 10, 11]), ("5", [5]), ("\n", [])],
)
def test_cpu_lists_are_the_kernels(text: str, numbers: list[int]) -> None:
    assert parse_cpu_list(text) == numbers


def test_a_core_comes_before_its_second_thread(two_sockets: Path) -> None:
    assert read_nodes(two_sockets, ALL) == (
        Node(0, (0, 1, 2, 3, 8, 9, 10, 11)),
        Node(1, (4, 5, 6, 7, 12, 13, 14, 15)),
    )


def test_only_allowed_cores_are_used(two_sockets: Path) -> None:
    assert read_nodes(two_sockets, frozenset({2, 10, 9})) == (Node(0, (2, 9, 10)),)


def test_nodes_are_in_numeric_order(tmp_path: Path) -> None:
    system = make_system(tmp_path, {n: str(n) for n in range(11)}, {})
    nodes = read_nodes(system, frozenset(range(11)))
    assert [node.number for node in nodes] == list(range(11))


@pytest.mark.parametrize("nodes", [{}, {0: "0"}], ids=["no node information", "it omits cores"])
def test_without_numa_information_all_cores_are_one_node(
    tmp_path: Path, nodes: dict[int, str]
) -> None:
    assert read_nodes(make_system(tmp_path, nodes, {}), frozenset({0, 1})) == (Node(0, (0, 1)),)


def test_this_machine_can_be_read() -> None:
    nodes = read_nodes()
    assert default_processes(nodes) >= 1


def test_default_is_one_process_a_core(two_sockets: Path, tmp_path: Path) -> None:
    nodes = read_nodes(two_sockets, ALL)
    assert default_processes(nodes, two_sockets, tmp_path / "none") == 8


@pytest.mark.parametrize(
    ("limit", "expected"), [("max 100000", 8), ("250000 100000", 3), ("50000 100000", 1)]
)
def test_default_respects_the_cgroups_cpu_limit(
    two_sockets: Path, tmp_path: Path, limit: str, expected: int
) -> None:
    (tmp_path / "cpu.max").write_text(limit + "\n")
    nodes = read_nodes(two_sockets, ALL)
    assert default_processes(nodes, two_sockets, tmp_path) == expected


def test_processes_spread_over_nodes_and_get_cores_of_their_own(two_sockets: Path) -> None:
    placement = place(read_nodes(two_sockets, ALL), 4, pin=True, max_nodes=8)
    assert [(p.node_index, p.cpu) for p in placement.places] == [(0, 0), (0, 1), (1, 4), (1, 5)]
    assert [node.number for node in placement.nodes] == [0, 1]


@pytest.mark.parametrize("n_processes", range(1, 17))
def test_every_number_of_processes_is_placed_on_distinct_cores(
    two_sockets: Path, n_processes: int
) -> None:
    placement = place(read_nodes(two_sockets, ALL), n_processes, pin=True, max_nodes=8)
    cpus = [p.cpu for p in placement.places]
    assert len(set(cpus)) == n_processes
    for p in placement.places:
        assert p.cpu in placement.nodes[p.node_index].cpus


def test_more_processes_than_cores_are_not_pinned() -> None:
    placement = place([Node(3, (0, 1))], 5, pin=True, max_nodes=8)
    assert [(p.node_index, p.cpu) for p in placement.places] == [(0, -1)] * 5
    assert placement.nodes == (Node(3, (0, 1)),)


def test_unpinned_processes_still_belong_to_nodes(two_sockets: Path) -> None:
    placement = place(read_nodes(two_sockets, ALL), 4, pin=False, max_nodes=8)
    assert [(p.node_index, p.cpu) for p in placement.places] == [(0, -1), (0, -1), (1, -1), (1, -1)]


def test_a_process_is_bound_to_its_core_or_else_to_its_node(two_sockets: Path) -> None:
    nodes = read_nodes(two_sockets, ALL)
    assert place(nodes, 2, pin=True, max_nodes=8).cpus(1) == (4,)
    assert place(nodes, 2, pin=False, max_nodes=8).cpus(1) == (4, 5, 6, 7, 12, 13, 14, 15)
    assert place(nodes[:1], 2, pin=False, max_nodes=8).cpus(1) == ()


def test_a_node_without_a_process_gets_no_memory(two_sockets: Path) -> None:
    placement = place(read_nodes(two_sockets, ALL), 1, pin=True, max_nodes=8)
    assert len(placement.nodes) == 1
    assert placement.places[0].node_index == 0


def test_more_nodes_than_the_segment_knows_count_as_one() -> None:
    nodes = [Node(number, (number,)) for number in range(9)]
    placement = place(nodes, 9, pin=True, max_nodes=8)
    assert len(placement.nodes) == 1
    assert [p.cpu for p in placement.places] == list(range(9))
