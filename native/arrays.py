"""Views of numpy arrays and torch tensors as the C functions want them: address, shape, row stride.

`native` does not import torch: a tensor is recognised by its `data_ptr`. BF16 is torch.bfloat16, or
uint16 in numpy (the upper halves of float32).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from native.errors import InvalidArgumentError

ITEM_BYTES = {"fp32": 4, "bf16": 2, "int32": 4, "int64": 8, "uint8": 1}
_TORCH_DTYPES = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.int32": "int32",
    "torch.int64": "int64",
    "torch.uint8": "uint8",
}
_NUMPY_DTYPES = {"<f4": "fp32", "<u2": "bf16", "<i4": "int32", "<i8": "int64", "|u1": "uint8"}


class Array(NamedTuple):
    """Memory as rows: (n_rows, n_columns), columns without gaps, rows `stride_bytes` apart.

    address: of the first element. dtype: a key of ITEM_BYTES. owner: what must stay alive. What has
    one dimension is one row; more than two are columns from the second on.
    """

    address: int
    n_rows: int
    n_columns: int
    stride_bytes: int
    dtype: str
    owner: Any = None


def as_array(value: Any, name: str) -> Array:
    """`value` (Array, torch tensor or numpy array) as an Array; `name` is for the error.

    Raises InvalidArgumentError where the type, dtype, device or layout is not one the kernels take.
    """
    if isinstance(value, Array):
        return value
    if hasattr(value, "data_ptr"):
        return _from_tensor(value, name)
    if isinstance(value, np.ndarray):
        return _from_numpy(value, name)
    raise InvalidArgumentError(
        f"{name}: {type(value).__name__} is neither a torch tensor, a numpy array nor an Array"
    )


def _from_tensor(value: Any, name: str) -> Array:
    dtype = _TORCH_DTYPES.get(str(value.dtype))
    if dtype is None:
        raise _dtype_error(name, value.dtype)
    if not value.is_cpu:
        raise InvalidArgumentError(f"{name}: is on device {value.device}, must be on cpu")
    shape, strides, size = value.shape, value.stride(), ITEM_BYTES[dtype]
    if len(shape) == 2 and strides[1] == 1 and strides[0] >= shape[1]:  # nearly all there are
        return Array(value.data_ptr(), shape[0], shape[1], strides[0] * size, dtype, value)
    return _rows(value.data_ptr(), shape, [s * size for s in strides], dtype, name, value)


def _from_numpy(value: Any, name: str) -> Array:
    interface = value.__array_interface__
    dtype = _NUMPY_DTYPES.get(interface["typestr"])
    if dtype is None:
        raise _dtype_error(name, value.dtype)
    return _rows(interface["data"][0], value.shape, value.strides, dtype, name, value)


def _dtype_error(name: str, dtype: Any) -> InvalidArgumentError:
    return InvalidArgumentError(f"{name}: dtype {dtype} is not one of {', '.join(ITEM_BYTES)}")


def _rows(
    address: int, shape: Sequence[int], strides: Sequence[int], dtype: str, name: str, owner: Any
) -> Array:
    n_columns = 1
    for length, stride in zip(reversed(shape[1:] or shape), reversed(strides), strict=False):
        if length > 1 and stride != n_columns * ITEM_BYTES[dtype]:
            raise InvalidArgumentError(
                f"{name}: the columns of a row must lie without gaps "
                f"(shape {tuple(shape)}, strides {tuple(strides)} bytes)"
            )
        n_columns *= length
    if len(shape) < 2:
        return Array(address, 1, n_columns, n_columns * ITEM_BYTES[dtype], dtype, owner)
    # A tensor of one row may have any stride.
    stride = strides[0] if shape[0] > 1 else n_columns * ITEM_BYTES[dtype]
    if stride < n_columns * ITEM_BYTES[dtype] and shape[0] > 1:
        raise InvalidArgumentError(f"{name}: rows overlap (stride {stride} bytes)")
    return Array(address, int(shape[0]), n_columns, stride, dtype, owner)


def expect(
    array: Array, name: str, *, dtype: str | None = None, columns: int | None = None
) -> None:
    """Raises InvalidArgumentError unless the array has this dtype and number of columns."""
    if dtype is not None and array.dtype != dtype:
        raise InvalidArgumentError(f"{name}: is {array.dtype}, must be {dtype}")
    if columns is not None and array.n_columns != columns:
        raise InvalidArgumentError(f"{name}: has {array.n_columns} columns, must have {columns}")


def expect_rows(array: Array, name: str, n_rows: int) -> None:
    """Raises InvalidArgumentError where the array has fewer rows."""
    if array.n_rows < n_rows:
        raise InvalidArgumentError(f"{name}: has {array.n_rows} rows, needs {n_rows}")


def as_vector(value: Any, name: str, dtype: str, length: int) -> Array:
    """`value` as one gapless row of `length` elements of `dtype`.

    Raises InvalidArgumentError, naming what is wrong.
    """
    array = as_array(value, name)
    expect(array, name, dtype=dtype)
    gapless = array.n_rows == 1 or array.stride_bytes == array.n_columns * ITEM_BYTES[dtype]
    if array.n_rows * array.n_columns != length or not gapless:
        raise InvalidArgumentError(
            f"{name}: must hold {length} elements without gaps, "
            f"is ({array.n_rows}, {array.n_columns})"
        )
    return array
