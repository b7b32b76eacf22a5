"""Real images for the examples: Fashion-MNIST where it is installed (Debian:
dataset-fashion-mnist), else scikit-learn's handwritten digits, which come with it."""

import gzip
import pathlib

import numpy as np

FASHION_MNIST = pathlib.Path("/usr/share/datasets/fashion-mnist")
_FILES = {"train": "train-{}-idx{}-ubyte", "test": "t10k-{}-idx{}-ubyte"}


def load(folder=None):
    """(name, {"train": (images, labels), "test": …}): float32 images of n × 1 × side × side, zero
    mean; int64 labels.

    folder: of IDX files, gzipped or not (MNIST and its kin); default: Fashion-MNIST, or the digits
    where it is missing. Raises FileNotFoundError for a folder without them.
    """
    if folder is None and not FASHION_MNIST.exists():
        return "scikit-learn digits", digits()
    folder = pathlib.Path(folder or FASHION_MNIST)
    data = {}
    for part, file in _FILES.items():
        images = _idx(folder, file.format("images", 3)).astype(np.float32)[:, None] / 255
        data[part] = images, _idx(folder, file.format("labels", 1)).astype(np.int64)
    return folder.name, _normalized(data)


def _idx(folder, name):
    """The array of an IDX file: type and number of dimensions, their sizes as big-endian int32,
    then bytes."""
    path = next((p for p in (folder / f"{name}.gz", folder / name) if p.exists()), None)
    if path is None:
        raise FileNotFoundError(
            f"{folder} has no {name} or {name}.gz: it must hold MNIST's IDX files"
        )
    raw = (gzip.open if path.suffix == ".gz" else open)(path, "rb").read()
    shape = np.frombuffer(raw, ">i4", raw[3], 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def digits():
    """As `load` has them: 1400 images to train on and 397 to test."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = (found.images.astype(np.float32) / 16)[order][:, None]
    # 8 × 8 to 24 × 24, for the same network.
    images = images.repeat(3, axis=2).repeat(3, axis=3)
    labels = found.target.astype(np.int64)[order]
    return _normalized(
        {"train": (images[:1400], labels[:1400]), "test": (images[1400:], labels[1400:])}
    )


def _normalized(data):
    mean, deviation = data["train"][0].mean(), data["train"][0].std()
    return {part: ((images - mean) / deviation, labels) for part, (images, labels) in data.items()}
