"""Jobs through the channel against float64, and what the device's port refuses."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native._channel import lib
from numpy.typing import NDArray

from native import attention, isa
from native.arena import Arena
from native.attention_loop import instruction_set
from native.channel import (
    ATTEND_EARLIER_ONLY,
    BLOCK_TOKENS,
    ITEM_DTYPE,
    SPLIT_TOKENS,
    STORE_ONLY,
    Cancelled,
    ChannelError,
    ChannelGeometry,
    DevicePort,
    JobFailed,
    WaitTimeout,
)
from native.errors import InvalidArgumentError
from native.segment import Segment, arena_path, process_participant
from tests.native.channel_rig import GEOMETRY, Cache, Chunk, Control, LoopThread, running
from tests.native.reference import ERROR_LIMITS, LSE_LIMITS, relative_error

# Steps of one history: chunks that cross blocks, tiles, store pieces and splits.
HISTORY = (
    [Chunk(0, 700), Chunk(1, 3), Chunk(2, 1)],
    [Chunk(0, 1), Chunk(1, 1), Chunk(2, 600)],
    [Chunk(1, 17), Chunk(3, 1), Chunk(0, 1), Chunk(2, 130)],
    [Chunk(row, 1) for row in range(4)],
    [Chunk(0, 410), Chunk(2, 1)],
    [Chunk(0, 1), Chunk(1, 1), Chunk(2, 1)],
)


Layers = Sequence[tuple[NDArray[Any], NDArray[Any]]]  # out and lse of each layer


@pytest.fixture
def port(tmp_path: Path) -> Iterator[DevicePort]:
    with running(tmp_path, GEOMETRY) as opened:
        yield opened


def items(*rows: tuple[int, ...]) -> NDArray[Any]:
    """Items of (row, start_position, n_tokens, slot_offset, flags)."""
    return np.array(list(rows), dtype=ITEM_DTYPE)


def check(
    found: Sequence[tuple[Any, Any]], expected: Sequence[tuple[Any, Any]], dtype: str
) -> None:
    """Each layer's out and lse against float64; NaN where a row was not to be written."""
    for (out, lse), (expected_out, expected_lse) in zip(found, expected, strict=True):
        attended = ~np.isnan(expected_out[:, 0, 0])
        assert np.isnan(lse[~attended]).all()
        seen = np.isfinite(expected_lse)
        assert np.array_equal(lse[attended & ~seen[:, 0]], expected_lse[attended & ~seen[:, 0]])
        assert not out[attended & ~seen[:, 0]].any()
        rows = attended & seen[:, 0]
        if rows.any():
            assert relative_error(out[rows], expected_out[rows]) < ERROR_LIMITS[dtype]
            assert np.abs(lse[rows] - expected_lse[rows]).max() < LSE_LIMITS[dtype]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("slot", [0, 1])
def test_chunks_and_decodes_equal_float64(tmp_path: Path, dtype: str, slot: int) -> None:
    with running(tmp_path, replace(GEOMETRY, kv_dtype=dtype)) as port:
        cache = Cache(port, seed=3)
        for chunks in HISTORY:
            check(cache.step(slot, chunks), cache.last_expected, dtype)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", isa.supported(lib))
def test_every_instruction_set_works_through_the_channel(
    tmp_path: Path, name: str, dtype: str
) -> None:
    before = isa.selected(lib)
    isa.select(lib, name)
    try:
        assert instruction_set() == name
        with running(tmp_path, replace(GEOMETRY, kv_dtype=dtype)) as port:
            cache = Cache(port, seed=3)
            for chunks in HISTORY[:3]:
                check(cache.step(0, chunks), cache.last_expected, dtype)
    finally:
        isa.select(lib, before)


def run_history(directory: Path, geometry: ChannelGeometry) -> list[Any]:
    with running(directory, geometry) as port:
        cache = Cache(port, seed=5)
        return [layer for chunks in HISTORY for layer in cache.step(0, chunks)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_results_do_not_depend_on_processes_or_nodes(tmp_path: Path, dtype: str) -> None:
    geometry = replace(GEOMETRY, kv_dtype=dtype)
    alone = run_history(tmp_path, replace(geometry, n_processes=1))
    for n_processes, n_nodes in ((2, 1), (3, 1), (2, 2), (5, 3)):
        others = run_history(tmp_path, replace(geometry, n_processes=n_processes, n_nodes=n_nodes))
        for (out, lse), (other_out, other_lse) in zip(alone, others, strict=True):
            np.testing.assert_array_equal(out, other_out)
            np.testing.assert_array_equal(lse, other_lse)


N_TOKENS = 1100


def run_cut(directory: Path, dtype: str, cuts: Sequence[int], others: int) -> NDArray[np.uint32]:
    """All outputs of one fixed sequence in chunks of these lengths, beside other sequences."""
    with running(directory, replace(GEOMETRY, kv_dtype=dtype, n_layers=1)) as port:
        g = port.geometry
        rng = np.random.default_rng(11)
        heads = (g.n_q_heads, g.n_kv_heads, g.n_kv_heads)
        qkv = [rng.standard_normal((N_TOKENS, n, g.head_dim), dtype=np.float32) for n in heads]
        if dtype == "bf16":
            qkv = [attention.to_bf16(x) for x in qkv]  # type: ignore[misc]
        for row in range(1 + others):
            port.set_blocks(row, 0, range(row * 75, row * 75 + -(-N_TOKENS // BLOCK_TOKENS)))
        results = []
        start = 0
        for n_tokens in cuts:
            rest = [(1 + i, start, n_tokens, (1 + i) * n_tokens, 0) for i in range(others)]
            for view, values in zip((port.q(0), port.k(0), port.v(0)), qkv, strict=True):
                view[: (1 + others) * n_tokens] = rng.permutation(values)[:1]
                view[:n_tokens] = values[start : start + n_tokens]
            port.prepare(0, items((0, start, n_tokens, 0, 0), *rest))
            port.post(0, 0)
            port.wait(0, timeout_s=30)
            out = port.out(0)[:n_tokens].reshape(n_tokens, -1).astype(np.float32)
            results.append(np.hstack([out, port.lse(0)[:n_tokens]]).view(np.uint32))
            start += n_tokens
        return np.vstack(results)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_tokens_result_is_the_same_in_any_chunk_and_any_company(
    tmp_path: Path, dtype: str
) -> None:
    whole = run_cut(tmp_path, dtype, [1000, 100], others=0)
    cuts = ([300] * 3 + [200], [13] * 70 + [190], [497, 15, 1, 1, 510] + [1] * 76)
    for pieces, others in zip(cuts, (2, 1, 0), strict=True):
        assert sum(pieces) == N_TOKENS
        np.testing.assert_array_equal(run_cut(tmp_path, dtype, pieces, others), whole)


@st.composite
def histories(draw: st.DrawFn) -> list[list[Chunk]]:
    """Steps of up to six sequences, some of which leave and come again."""
    steps = []
    for _ in range(draw(st.integers(1, 5))):
        rows = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True))
        length = st.one_of(st.just(1), st.integers(1, 200))
        flags = st.sampled_from([0, 0, 0, STORE_ONLY, ATTEND_EARLIER_ONLY])
        steps.append([Chunk(row, draw(length), draw(flags)) for row in rows])
    return steps


@pytest.mark.parametrize(
    ("dtype", "checksums"), [("fp32", False), ("bf16", False), ("fp32", True), ("bf16", True)]
)
def test_any_history_equals_float64(tmp_path: Path, dtype: str, checksums: bool) -> None:
    geometry = replace(
        GEOMETRY,
        kv_dtype=dtype,
        n_processes=3,
        n_nodes=2,
        kv_blocks=512,
        checksums=checksums,
    )
    with running(tmp_path, geometry) as port:

        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        @given(histories(), st.integers(0, 2**32 - 1))
        def run(steps: list[list[Chunk]], seed: int) -> None:
            cache = Cache(port, seed)
            for number, chunks in enumerate(steps):
                check(cache.step(number % 2, chunks), cache.last_expected, dtype)
            for row in list(cache.sequences):
                cache.release(row)

        run()


def test_both_slots_run_at_once(port: DevicePort) -> None:
    blocks = np.arange(64)
    port.set_blocks(0, 0, blocks)
    port.set_blocks(1, 0, blocks + 64)
    rng = np.random.default_rng(0)
    for slot in (0, 1):
        for view in (port.q(slot), port.k(slot), port.v(slot)):
            view[:] = rng.standard_normal(view.shape)
        port.prepare(slot, items((slot, 0, 1024, 0, 0)))
    port.post(0, 0)
    port.post(1, 0)
    port.wait(1, timeout_s=30)
    port.wait(0, timeout_s=30)
    together = [port.out(slot).copy() for slot in (0, 1)]
    for slot in (0, 1):
        port.out(slot)[:] = np.nan
        port.post(slot, 0)
        port.wait(slot, timeout_s=30)
        np.testing.assert_array_equal(port.out(slot), together[slot])


def test_times_tell_tasks_and_bytes(port: DevicePort) -> None:
    port.set_blocks(0, 0, range(100))
    port.prepare(0, items((0, SPLIT_TOKENS, 1, 0, 0)))
    begin_s = time.monotonic()
    port.post(0, 1)
    times = port.wait(0, timeout_s=30)
    end_s = time.monotonic()
    block_bytes = 2 * BLOCK_TOKENS * GEOMETRY.n_kv_heads * GEOMETRY.head_dim * 4
    assert times.kv_read_bytes == (SPLIT_TOKENS // BLOCK_TOKENS + 1) * block_bytes
    assert times.tasks >= 1
    assert 0 < times.longest_s <= times.busy_s
    assert times.longest_s <= times.elapsed_s
    spans = [span for span in port.process_spans(0) if span != (0, 0)]
    assert 1 <= len(spans) <= times.tasks
    assert all(begin_s <= begin < end <= end_s for begin, end in spans)
    with pytest.raises(InvalidArgumentError, match="slot: must be below 2"):
        port.process_spans(2)


def test_store_only_writes_no_output(port: DevicePort) -> None:
    cache = Cache(port, seed=1)
    (out, lse), *_ = cache.step(0, [Chunk(0, 30, STORE_ONLY)])
    assert np.isnan(out).all()
    assert np.isnan(lse).all()
    check(cache.step(0, [Chunk(0, 5)]), cache.last_expected, "fp32")


# ---- refusals ----

GOOD = (0, 0, 4, 0, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ((16, 0, 1, 4, 0), "row is not below max_sequences"),
        ((2**32 - 1, 0, 1, 4, 0), "row is not below max_sequences"),
        ((1, 0, 0, 4, 0), "n_tokens is 0"),
        ((1, 2047, 2, 4, 0), "max_context_tokens"),
        ((1, 2**32 - 1, 2, 4, 0), "max_context_tokens"),
        ((1, 0, 4, 1021, 0), "max_slot_tokens"),
        ((1, 0, 4, 2**32 - 2, 0), "max_slot_tokens"),
        ((1, 0, 1, 4, 3), "flags"),
        ((1, 0, 1, 4, 4), "flags"),
        ((0, 0, 1, 4, 0), "row is named twice"),
        ((1, 0, 2, 3, 0), "slot rows overlap"),
        ((1, 0, 17, 4, 0), "block id"),  # has one block only
        ((2, 0, 1, 4, 0), "block id"),  # has none
    ],
)
def test_a_wrong_item_is_named(port: DevicePort, wrong: tuple[int, ...], message: str) -> None:
    port.set_blocks(0, 0, [0])
    port.set_blocks(1, 0, [1])
    with pytest.raises(InvalidArgumentError, match=rf"items\[1\].*{message}"):
        port.prepare(0, items(GOOD, wrong))
    with pytest.raises(ChannelError, match="not prepared"):
        port.post(0, 0)
    port.prepare(0, items(GOOD))
    port.post(0, 0)
    port.wait(0, timeout_s=5)


def test_no_items_are_refused(port: DevicePort) -> None:
    with pytest.raises(InvalidArgumentError, match="or none"):
        port.prepare(0, items())


@pytest.mark.parametrize(
    ("row", "first", "blocks", "message"),
    [
        (16, 0, [1], "row"),
        (0, 127, [1, 2], "max_context_tokens"),
        (0, 0, [256], "block id"),
        (0, 0, [3, -1], "block id"),
    ],
)
def test_wrong_blocks_are_refused_and_change_nothing(
    port: DevicePort, row: int, first: int, blocks: list[int], message: str
) -> None:
    port.set_blocks(0, 0, [9])
    with pytest.raises(InvalidArgumentError, match=message):
        port.set_blocks(row, first, blocks)
    port.prepare(0, items(GOOD))


def test_a_cleared_row_must_get_blocks_again(port: DevicePort) -> None:
    port.set_blocks(0, 0, [9])
    port.clear_row(0)
    with pytest.raises(InvalidArgumentError, match="never set"):
        port.prepare(0, items(GOOD))


def test_layer_and_slot_are_checked(port: DevicePort) -> None:
    port.set_blocks(0, 0, [9])
    port.prepare(0, items(GOOD))
    for slot, layer in ((0, 2), (2, 0)):
        with pytest.raises(InvalidArgumentError, match="out of range"):
            port.post(slot, layer)


def test_waiting_for_nothing_is_an_error(port: DevicePort) -> None:
    with pytest.raises(ChannelError, match="not prepared"):
        port.wait(0, timeout_s=1)


# ---- checksums ----


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_a_changed_kv_byte_is_found_when_it_is_read(tmp_path: Path, dtype: str) -> None:
    with running(tmp_path, replace(GEOMETRY, kv_dtype=dtype, checksums=True)) as port:
        cache = Cache(port, seed=7)
        cache.step(0, [Chunk(0, 700), Chunk(1, 40)])
        cache.step(1, [Chunk(0, 1), Chunk(1, 1)])
        arena = Arena.open(arena_path(port._segment.path), port.geometry)
        layer_bytes = arena.size_bytes // port.geometry.n_layers
        block_bytes = layer_bytes // port.geometry.kv_blocks
        block = cache.sequences[1].blocks[2]
        at = layer_bytes + block * block_bytes + 5  # in layer 1
        arena.buffer[at : at + 1] = bytes([arena.buffer[at : at + 1][0] ^ 0x10])
        arena.close()
        port.prepare(0, items((0, 701, 1, 0, 0), (1, 41, 1, 1, 0)))
        port.post(0, 0)
        port.wait(0, timeout_s=10)
        port.post(0, 1)
        with pytest.raises(JobFailed, match="item 1: a KV block is not what was stored in it"):
            port.wait(0, timeout_s=10)
        # Whoever continues the block finds it too; a sequence that starts in it does not mind.
        port.prepare(0, items((1, 41, 3, 0, STORE_ONLY)))
        port.post(0, 1)
        with pytest.raises(JobFailed, match="a KV block is not what"):
            port.wait(0, timeout_s=10)
        cache.release(1)
        port.set_blocks(2, 0, [block])
        port.prepare(0, items((2, 0, 16, 0, 0)))
        port.post(0, 1)
        port.wait(0, timeout_s=10)


def test_changed_activations_are_found_on_both_sides(idle_checked_port: DevicePort) -> None:
    port = idle_checked_port
    post_one(port)
    port.k(0)[0, 1, 3] += 1
    port.place_holder.close()  # type: ignore[attr-defined]
    loop = LoopThread(port._segment.path, 0)
    wrong = "activations are not what was written into the slot"
    with pytest.raises(JobFailed, match=wrong):
        port.wait(0, timeout_s=10)
    port.prepare(0, items(GOOD))
    port.post(0, 0)
    time.sleep(0.5)  # it has ended
    port.lse(0)[0, 0] += 1
    with pytest.raises(JobFailed, match=wrong):
        port.wait(0, timeout_s=10)
    port.prepare(0, items(GOOD))
    port.post(0, 0)
    port.wait(0, timeout_s=10)
    port._segment.retire()
    loop.join()


# ---- waits that end otherwise ----


@pytest.fixture
def idle_port(tmp_path: Path) -> Iterator[DevicePort]:
    yield from unserved(tmp_path, replace(GEOMETRY, n_processes=1))


@pytest.fixture
def idle_checked_port(tmp_path: Path) -> Iterator[DevicePort]:
    yield from unserved(tmp_path, replace(GEOMETRY, n_processes=1, checksums=True))


def unserved(directory: Path, geometry: ChannelGeometry) -> Iterator[DevicePort]:
    """A port whose segment no attention loop serves (yet): its jobs stay where they are."""
    control = Control(directory, geometry)
    control.publish()
    # As if attention process 0 were there: alive, and beating below.

    place_holder = Segment.open(control.segment.path)
    place_holder.participate(process_participant(0))
    with DevicePort(control.segment.path, peer_timeout_s=60) as port:
        port.place_holder = place_holder  # type: ignore[attr-defined]
        yield port
    place_holder.close()
    control.close()


def post_one(port: DevicePort) -> None:
    port.set_blocks(0, 0, [9])
    port.prepare(0, items(GOOD))
    port.post(0, 0)


def test_a_wait_has_a_deadline_and_can_be_repeated(idle_port: DevicePort) -> None:
    post_one(idle_port)
    start_s = time.monotonic()
    with pytest.raises(WaitTimeout, match=r"after 0\.4 s"):
        idle_port.wait(0, timeout_s=0.4)
    assert 0.4 <= time.monotonic() - start_s < 1.4
    idle_port.place_holder.close()  # type: ignore[attr-defined]
    loop = LoopThread(idle_port._segment.path, 0)
    assert idle_port.wait(0, timeout_s=10).tasks == 2
    idle_port._segment.retire()
    loop.join()


def test_cancel_ends_a_wait_of_another_thread(idle_port: DevicePort) -> None:
    post_one(idle_port)
    timer = threading.Timer(0.2, idle_port.cancel)
    timer.start()
    start_s = time.monotonic()
    with pytest.raises(Cancelled):
        idle_port.wait(0, timeout_s=30)
    assert time.monotonic() - start_s < 1.2
    timer.join()
    with pytest.raises(Cancelled):
        idle_port.wait(0, timeout_s=30)


def test_a_running_slot_is_neither_prepared_nor_posted(idle_port: DevicePort) -> None:
    post_one(idle_port)
    for call in (lambda: idle_port.prepare(0, items(GOOD)), lambda: idle_port.post(0, 0)):
        with pytest.raises(ChannelError, match="busy"):
            call()


def test_a_closed_port_says_so(tmp_path: Path) -> None:
    with running(tmp_path, GEOMETRY) as port:
        port.close()
        with pytest.raises(ChannelError, match="closed"):
            port.post(0, 0)
        port.cancel()
