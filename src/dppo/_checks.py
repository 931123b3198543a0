"""Argument checks of the numpy core: every message names the argument, its value and the remedy."""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dppo.errors import InvalidInputError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


def as_floats(name: str, value: ArrayLike, *, ndim: int | None = None) -> Floats:
    """Return `value` as a float64 array; reject complex, text and ragged input."""
    try:
        array: NDArray[Any] = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"dtype {array.dtype}")
        floats = array.astype(np.float64, copy=False)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"{name} must be an array of real numbers: {error}") from error
    if ndim is not None and floats.ndim != ndim:
        raise InvalidInputError(f"{name} must have {ndim} dimension(s), got shape {floats.shape}")
    return floats


def finite(name: str, value: ArrayLike, *, ndim: int | None = None) -> Floats:
    """Like `as_floats`, and every entry is finite."""
    array = as_floats(name, value, ndim=ndim)
    reject(name, array, ~np.isfinite(array), "must be finite")
    return array


def as_array(name: str, value: ArrayLike) -> NDArray[Any]:
    """Return `value` as an array; reject ragged input."""
    try:
        return np.asarray(value)
    except ValueError as error:
        raise InvalidInputError(
            f"{name} must be a regular array, got {value!r:.80}: {error}"
        ) from error


def as_bools(name: str, value: ArrayLike, shape: Sequence[int] | None = None) -> Bools:
    """Return `value` as a boolean array of `shape`; 0 and 1 of any dtype are accepted."""
    array = as_array(name, value)
    if array.dtype.kind not in "biuf":
        raise InvalidInputError(f"{name} must be boolean (or 0 and 1), got dtype {array.dtype}")
    if array.dtype.kind != "b":
        reject(name, array, (array != 0) & (array != 1), "must be boolean (or 0 and 1)")
    if shape is not None:
        same_shape(name, array, shape)
    return array.astype(np.bool_)


def same_shape(name: str, array: NDArray[Any], shape: Sequence[int]) -> None:
    """Require `array.shape == shape`."""
    if array.shape != tuple(shape):
        raise InvalidInputError(f"{name} has shape {array.shape}, expected {tuple(shape)}")


def reject(name: str, array: NDArray[Any], bad: Bools, rule: str) -> None:
    """Raise if any entry is `bad`, naming the first one."""
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        count = int(bad.sum())
        raise InvalidInputError(
            f"{name} {rule}: {name}{list(where)} = {array[where]!r}"
            + (f" ({count} such entries)" if count > 1 else "")
        )


def not_empty(name: str, array: NDArray[Any]) -> None:
    """Require at least one entry."""
    if array.size == 0:
        raise InvalidInputError(
            f"{name} is empty (shape {array.shape}); there is nothing to select"
        )


def one_of(name: str, value: object, allowed: Sequence[str]) -> str:
    """Require `value` to be one of the names in `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise InvalidInputError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
    return value


def share(name: str, value: object, *, zero: bool = False, one: bool = True) -> float:
    """Require a real number in (0, 1], with the ends as told."""
    rule = f"{'[' if zero else '('}0, 1{']' if one else ')'}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidInputError(f"{name} must be a number in {rule}, got {value!r}")
    number = float(value)
    if not (number >= 0 if zero else number > 0) or not (number <= 1 if one else number < 1):
        raise InvalidInputError(f"{name} must be in {rule}, got {value!r}")
    return number


def natural(name: str, value: object) -> int:
    """Require a whole number >= 0."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise InvalidInputError(f"{name} must be a whole number >= 0, got {value!r}")
    return int(value)


def non_negative(name: str, value: object) -> float:
    """Require a finite real number >= 0."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < np.inf:
        raise InvalidInputError(f"{name} must be a finite number >= 0, got {value!r}")
    return float(value)
