"""Merging the results of several KV ranges."""

from __future__ import annotations

import numpy as np
import pytest

from native import attention
from native.errors import InvalidArgumentError


def random_parts(n_splits: int, n_rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n_splits)
    outs = rng.standard_normal((n_splits, n_rows, 32), dtype=np.float32)
    return outs, rng.standard_normal((n_splits, n_rows), dtype=np.float32) * 3


def test_merge_weighs_parts_by_their_share_of_the_sum() -> None:
    outs, lses = random_parts(5, 7)
    out, lse = attention.merge(outs, lses)
    weights = np.exp(lses.astype(np.float64))
    expected = (outs * weights[:, :, None]).sum(0) / weights.sum(0)[:, None]
    assert np.linalg.norm(out - expected) / np.linalg.norm(expected) < 1e-6
    assert np.abs(lse - np.log(weights.sum(0))).max() < 1e-6


def test_merge_subtracts_the_maximum() -> None:
    outs, lses = random_parts(3, 4)
    near, _ = attention.merge(outs, lses)
    far, lse = attention.merge(outs, lses + np.float32(1024))
    assert np.isfinite(lse).all()
    # 1024 + x is rounded at 6e-5, and so are the weights.
    assert np.linalg.norm(far - near) / np.linalg.norm(near) < 3e-4


def test_one_part_passes_unchanged() -> None:
    outs, lses = random_parts(1, 9)
    out, lse = attention.merge(outs, lses)
    np.testing.assert_array_equal(out, outs[0])
    np.testing.assert_array_equal(lse, lses[0])


def test_empty_parts_change_nothing() -> None:
    outs, lses = random_parts(3, 6)
    padded = np.concatenate([outs, np.zeros((2, 6, 32), np.float32)])
    padded_lses = np.concatenate([lses, np.full((2, 6), -np.inf, np.float32)])
    np.testing.assert_array_equal(
        attention.merge(padded, padded_lses)[0], attention.merge(outs, lses)[0]
    )
    np.testing.assert_array_equal(
        attention.merge(padded, padded_lses)[1], attention.merge(outs, lses)[1]
    )


def test_all_parts_empty_gives_zero_and_minus_infinity() -> None:
    out, lse = attention.merge(
        np.zeros((2, 3, 16), np.float32), np.full((2, 3), -np.inf, np.float32)
    )
    assert (out == 0).all()
    assert (lse == -np.inf).all()


def test_bf16_output_is_rounded_to_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -3.14159, 1e-40, 3e38, np.nan, 65504.0])
    outs = np.tile(values.astype(np.float32), 2).reshape(1, 1, 16)
    out, _ = attention.merge(outs, np.zeros((1, 1), np.float32), "bf16")
    torch = pytest.importorskip("torch")
    expected = torch.from_numpy(outs[0]).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(attention.from_bf16(out), expected)


def test_wrong_arguments_are_refused_by_name() -> None:
    outs, lses = random_parts(2, 3)
    with pytest.raises(InvalidArgumentError, match="out_parts"):
        attention.merge(outs[:, :, :24], lses)
    with pytest.raises(InvalidArgumentError, match="lse_parts"):
        attention.merge(outs, lses[:, :2])
    with pytest.raises(InvalidArgumentError, match="out_dtype"):
        attention.merge(outs, lses, "int8")
