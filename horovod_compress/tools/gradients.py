"""Gradients to measure with: random ones, or those of a file."""

import math
import os
import re
import zipfile
from typing import Any, Dict, List, Tuple

import numpy as np

from ..engine.lockstep import Named

# Bytes of random gradients, but at least two steps.
_PREPARED = 1e9


def random_gradients(shapes: Dict[str, Tuple[int, ...]], seed: int) -> List[Named]:
    """Normal gradients of two to four steps. Their scale is log-normal by row and the same in all
    steps.

    Args:
        shapes: by name.
        seed: of the random numbers.

    Returns:
        float32 arrays by name, for each step.
    """
    rng = np.random.default_rng(seed)
    scales = {n: 1e-3 * rng.lognormal(size=s[:1] + (1,) * (len(s) - 1)) for n, s in shapes.items()}
    count = int(_PREPARED / (4 * sum(map(math.prod, shapes.values()))))
    return [
        {n: rng.standard_normal(s, np.float32) * np.float32(scales[n]) for n, s in shapes.items()}
        for _ in range(min(max(count, 2), 4))
    ]


def load_gradients(path: str) -> List[Named]:
    """Reads gradients from a file.

    Args:
        path: an .npz file with an entry for each tensor; entries of several steps are named
            `step/name`.

    Returns:
        float32 arrays by name, for each step.

    Raises:
        ValueError: an array cannot be a gradient. The message names the entry.
    """
    path = os.path.expanduser(path)
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not there, or not an .npz file")
    steps: Dict[int, Named] = {}
    try:
        opened = np.load(path)
    # Whatever zip and NumPy make of a damaged file.
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    with opened as file:
        numbered = [re.fullmatch(r"(\d+)/(.+)", entry) for entry in file.files]
        for entry, match in zip(file.files, numbered):
            array = _read(file, entry, path)
            if bool(match) != bool(numbered[0]):
                raise ValueError(
                    f"{path}: {entry}: either all entries are named step/name, or none is"
                )
            step, name = (int(match[1]), match[2]) if match else (0, entry)
            if name in steps.setdefault(step, {}):
                raise ValueError(f"{path}: {entry}: step {step} has {name} twice")
            steps[step][name] = array
    if not steps:
        raise ValueError(f"{path} holds no gradients")
    first = min(steps)
    shapes = {name: array.shape for name, array in steps[first].items()}
    for step, named in steps.items():
        for name in [*shapes, *named]:
            if name not in shapes or name not in named or named[name].shape != shapes[name]:
                raise ValueError(
                    f"{path}: {step}/{name}: every step needs the names and shapes of step {first}"
                )
    return [{name: steps[step][name] for name in shapes} for step in sorted(steps)]


def _read(file: Any, entry: str, path: str) -> np.ndarray:
    try:
        array = np.asarray(file[entry])
    except Exception as error:
        # Whatever zip, zlib or NumPy make of a damaged entry.
        raise ValueError(f"{path}: {entry} cannot be read: {error}") from None
    if array.dtype.kind != "f" or not array.size:
        raise ValueError(
            f"{path}: {entry} must hold floats, not {array.dtype} of shape {array.shape}"
        )
    with np.errstate(over="ignore"):
        array = np.asarray(array, np.float32, order="C")
    if not np.isfinite(array).all():
        raise ValueError(f"{path}: {entry} holds numbers that are not finite in float32")
    return array
