"""Straight lines through measured times, and how well they fit."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LinearFit:
    """time ≈ Σ coefficient · feature, no coefficient below 0.

    `mean_error` and `worst_error` are relative to the measured times.
    """

    coefficients: tuple[float, ...]
    mean_error: float
    worst_error: float


def fit(features: Sequence[Sequence[float]], times_s: Sequence[float]) -> LinearFit:
    """Least squares of the relative errors, so that short times count as much as long ones.

    Coefficients that would be negative are held at 0, the most negative first. Raises ValueError
    where there are fewer points than coefficients.
    """
    x = np.array(features, dtype=np.float64)
    y = np.array(times_s, dtype=np.float64)
    if len(x) < x.shape[1]:
        raise ValueError(f"{len(x)} points cannot determine {x.shape[1]} coefficients")
    scaled = x / y[:, None]
    # Columns of one size, or a tiny coefficient of a huge feature would drown.
    sizes = np.linalg.norm(scaled, axis=0)
    sizes[sizes == 0] = 1.0
    free = list(range(x.shape[1]))
    found = np.zeros(x.shape[1])
    while free:
        solution = np.linalg.lstsq(scaled[:, free] / sizes[free], np.ones(len(y)), rcond=None)[0]
        if solution.min() >= 0:
            found[free] = solution / sizes[free]
            break
        del free[int(np.argmin(solution))]
    errors = np.abs(x @ found / y - 1)
    return LinearFit(tuple(found.tolist()), float(errors.mean()), float(errors.max()))
