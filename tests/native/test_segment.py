"""Segments: their layout for any geometry, their file, and what is not accepted as one."""

from __future__ import annotations

import itertools
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from native._channel import ffi, lib

from native.channel import ITEM_DTYPE
from native.errors import InvalidArgumentError
from native.segment import CONTROL, ChannelError, ChannelGeometry, Segment, default_spin_s
from tests.native.channel_rig import GEOMETRY


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    with Segment.create(tmp_path, GEOMETRY, epoch=77) as created:
        yield created


geometries = st.builds(
    ChannelGeometry,
    n_layers=st.integers(1, 128),
    n_kv_heads=st.integers(1, 16),
    n_q_heads=st.integers(1, 8),  # per KV head, see below
    head_dim=st.integers(1, 16).map(lambda n: 16 * n),
    kv_dtype=st.sampled_from(["fp32", "bf16"]),
    kv_blocks=st.integers(1, 10**6),
    max_sequences=st.integers(1, 4096),
    max_context_tokens=st.integers(1, 2**20),
    max_slot_tokens=st.integers(1, 2**15),
    n_processes=st.integers(1, 256),
    scale=st.just(0.1),
    n_nodes=st.integers(1, 8),
).map(lambda g: replace(g, n_q_heads=g.n_q_heads * g.n_kv_heads))


@given(geometries)
def test_parts_follow_each_other_aligned_and_large_enough(g: ChannelGeometry) -> None:
    layout = g.layout()
    element = layout.element_bytes
    slot_parts = [
        (layout.times, g.n_processes * 64),
        (layout.items, layout.max_items * ffi.sizeof("ml_item")),
        (layout.stores, layout.max_stores * 16),
        (layout.tiles, layout.max_tiles * 64),
        (layout.tasks, layout.max_tasks * 16),
        (layout.partial_out, layout.partial_rows * g.n_q_heads * g.head_dim * 4),
        (layout.partial_lse, layout.partial_rows * g.n_q_heads * 4),
        (layout.slot_bytes, 0),
    ]
    kv_bytes = g.max_slot_tokens * g.n_kv_heads * g.head_dim * element
    activation_parts = [
        (layout.q, g.max_slot_tokens * g.n_q_heads * g.head_dim * element),
        (layout.k, kv_bytes),
        (layout.v, kv_bytes),
        (layout.out, g.max_slot_tokens * g.n_q_heads * g.head_dim * element),
        (layout.lse, g.max_slot_tokens * g.n_q_heads * 4),
        (layout.activation_bytes, 0),
    ]
    whole = [
        (layout.participants, (2 + g.n_processes) * 64),
        (layout.block_tables, 4 * g.max_sequences * layout.blocks_per_sequence),
        (layout.slots, 2 * layout.slot_bytes),
        (layout.activations, 2 * layout.activation_bytes),
        (layout.total_bytes, 0),
    ]
    for parts in (slot_parts, activation_parts, whole):
        for (start, size_bytes), (following, _) in itertools.pairwise(parts):
            assert start + size_bytes <= following
            assert start % 64 == 0
    assert layout.activations % 4096 == 0
    assert layout.activation_bytes % 4096 == 0
    assert 16 * layout.blocks_per_sequence >= g.max_context_tokens
    sizes = g.sizes()
    assert sizes.kv_arena_bytes == g.n_layers * g.kv_blocks * 16 * 2 * (
        kv_bytes // g.max_slot_tokens
    )
    assert sizes.segment_bytes == layout.total_bytes


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_layers", 4097),
        ("n_q_heads", 5),
        ("n_kv_heads", 1025),
        ("head_dim", 8),
        ("kv_blocks", 2**31),
        ("kv_blocks", -1),
        ("max_sequences", 2**20 + 1),
        ("max_context_tokens", 2**22 + 1),
        ("max_slot_tokens", 0),
        ("n_processes", 257),
        ("n_nodes", 9),
        ("scale", 0.0),
        ("scale", float("inf")),
        ("kv_dtype", "fp16"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{field}: "):
        replace(GEOMETRY, **{field: value}).check()


def test_an_arena_beyond_the_address_space_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^kv_blocks: .*address space"):
        replace(GEOMETRY, kv_blocks=2**31 - 1, n_layers=4096, head_dim=256).check()


def test_a_segment_opens_as_it_was_made(segment: Segment) -> None:
    assert segment.life == "building"
    with Segment.open(segment.path) as opened:
        assert opened.geometry == replace(GEOMETRY, scale=opened.geometry.scale)
        assert opened.geometry.scale == np.float32(GEOMETRY.scale)
        assert opened.epoch == 77
        segment.publish()
        assert opened.life == "live"
        assert opened.alive(CONTROL)
        segment.retire()
        assert opened.life == "retired"
    assert segment.path.stat().st_size == GEOMETRY.sizes().segment_bytes


def test_only_its_owner_may_read_it(segment: Segment) -> None:
    assert stat.S_IMODE(segment.path.stat().st_mode) == 0o600


def test_all_its_memory_is_reserved(segment: Segment) -> None:
    assert segment.path.stat().st_blocks * 512 >= GEOMETRY.sizes().segment_bytes


def test_closing_twice_is_harmless_and_use_after_it_an_error(segment: Segment) -> None:
    segment.close()
    segment.close()
    with pytest.raises(ChannelError, match="closed"):
        segment.publish()


@pytest.mark.parametrize("offset", range(0, 96, 4))
def test_a_damaged_header_is_refused(segment: Segment, tmp_path: Path, offset: int) -> None:
    content = bytearray(segment.path.read_bytes())
    content[offset] ^= 1
    damaged = tmp_path / "damaged.seg"
    damaged.write_bytes(content)
    with pytest.raises(ChannelError, match=r"damaged\.seg: not a segment"):
        Segment.open(damaged)


@pytest.mark.parametrize("keep", [0, 1, 319, 320, -4096, -1])
def test_a_shortened_file_is_refused(segment: Segment, tmp_path: Path, keep: int) -> None:
    short = tmp_path / "short.seg"
    short.write_bytes(segment.path.read_bytes()[:keep])
    with pytest.raises(ChannelError, match="not a segment"):
        Segment.open(short)


def test_a_directory_or_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        Segment.open(tmp_path)
    with pytest.raises(FileNotFoundError):
        Segment.open(tmp_path / "absent")


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """As on a full file system: files cannot grow beyond the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_memory_that_cannot_be_reserved_leaves_nothing(tmp_path: Path) -> None:
    with file_size_limit(100_000), pytest.raises(OSError, match=r"\.seg"):
        Segment.create(tmp_path, GEOMETRY, 1)
    assert list(tmp_path.iterdir()) == []


def test_python_items_are_what_c_reads() -> None:
    assert ITEM_DTYPE.itemsize == ffi.sizeof("ml_item")
    item = np.array([(1, 2, 3, 4, 5)], ITEM_DTYPE)
    seen = ffi.cast("ml_item *", item.ctypes.data)
    assert [seen.row, seen.start_position, seen.n_tokens, seen.slot_offset, seen.flags] == [
        *range(1, 6)
    ]


def test_every_status_has_a_text() -> None:
    texts = {ffi.string(lib.ml_status_text(status)) for status in range(lib.ML_STATUS_COUNT)}
    assert len(texts) == lib.ML_STATUS_COUNT
    for unknown in (-1, lib.ML_STATUS_COUNT, 2**31 - 1):
        assert ffi.string(lib.ml_status_text(unknown)) == b"unknown status"


def test_spin_is_short_where_processes_share_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_LENS_SPIN_US", raising=False)
    assert default_spin_s(256) < 5e-6
    monkeypatch.setenv("MOE_LENS_SPIN_US", "12.5")
    assert default_spin_s(256) == 12.5e-6
    for wrong in ("-1", "ten", "1e7", "nan"):
        monkeypatch.setenv("MOE_LENS_SPIN_US", wrong)
        with pytest.raises(InvalidArgumentError, match="MOE_LENS_SPIN_US"):
            default_spin_s(1)
