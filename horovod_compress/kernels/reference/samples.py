"""Squares of each sample's contribution to a product of matrices, computed sample by sample."""

from typing import Optional

import numpy as np


def add_sample_squares(
    left: np.ndarray, right: np.ndarray, squares: np.ndarray, sums: Optional[np.ndarray] = None
) -> None:
    """squares += Σ_z (left_z · right_z)², and sums += Σ_z left_z · right_z where given; both flat,
    elements of left by elements of right.

    left (samples, places …, elements …) and right (samples, places …, elements) may be views with
    any strides, and have the same dimensions of places. left_z · right_z sums over places.
    """
    places = right.ndim - 2
    for of_left, of_right in zip(left, right):
        product = np.tensordot(of_left, of_right, (range(places), range(places))).reshape(-1)
        squares += product * product
        if sums is not None:
            sums += product
