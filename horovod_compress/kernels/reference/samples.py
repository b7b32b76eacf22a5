"""What each sample contributes to a product of matrices: sample by sample, its product is made, squared and added."""
from typing import Optional

import numpy as np


def add_sample_squares(left: np.ndarray, right: np.ndarray, squares: np.ndarray, sums: Optional[np.ndarray] = None) -> None:
    """squares += Σ_z (left_z · right_z)², and sums += Σ_z left_z · right_z where given; flat, left's elements by right's.

    left (samples, places …, elements …) and right (samples, places …, elements) may be views with any strides; as many dimensions
    of left are places as of right. left_z · right_z sums over places.
    """
    places = right.ndim - 2
    for of_left, of_right in zip(left, right):
        product = np.tensordot(of_left, of_right, (range(places), range(places))).reshape(-1)
        squares += product * product
        if sums is not None:
            sums += product
