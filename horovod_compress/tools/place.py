"""The place where compressions are measured: this processor, or a GPU."""

import argparse
import os
from typing import Any, Callable, NamedTuple

import numpy as np

from .. import kernels


class Place(NamedTuple):
    """put: returns an array there, flat; settle: waits for what is under way there."""

    put: Callable[[np.ndarray], Any]
    settle: Callable[[], None]


HERE = Place(lambda array: array, lambda: None)


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        type=place,
        default=place("cpu"),
        metavar="cuda",
        help="measure on this machine's GPU what has kernels there (default: on the CPU)",
    )


def place(device: str) -> Place:
    """The place on a device, as torch names it. ArgumentTypeError where there is none."""
    if not kernels.serves(device):
        if device == "cpu":
            return HERE
        raise argparse.ArgumentTypeError(
            f"there are no kernels for {device!r}: give cuda, on a machine with a GPU that PyTorch "
            "sees and with Triton, as horovod-compress[gpu] installs it"
        )
    import torch

    from ..kernels.device import DeviceArray

    if device == "cuda":
        if not torch.cuda.is_available():
            raise argparse.ArgumentTypeError("PyTorch sees no GPU here")
        # Each rank of a machine has its own, as in training.
        local = os.environ.get("LOCAL_RANK") or os.environ.get("HOROVOD_LOCAL_RANK") or "0"
        torch.cuda.set_device(int(local) % torch.cuda.device_count())
    settle = torch.cuda.synchronize if device == "cuda" else HERE.settle
    return Place(lambda array: DeviceArray(torch.from_numpy(array).to(device)), settle)
