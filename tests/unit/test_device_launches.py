"""Launches, copies and waits of kernels on a device, whatever the number of tensors."""

import collections
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from horovod_compress.kernels.device import DeviceArray, launches, selection  # noqa: E402


def counted(step):
    """What a step does: {"launches", "copies to it", "waits": how many}."""
    counts = collections.Counter()

    def counting(what, function):
        def call(*arguments, **named):
            counts[what] += 1
            return function(*arguments, **named)

        return call

    with (
        mock.patch.object(launches, "launch", counting("launches", launches.launch)),
        mock.patch.object(launches, "copied", counting("copies to it", launches.copied)),
        mock.patch.object(torch.Tensor, "cpu", counting("waits", torch.Tensor.cpu)),
    ):
        step()
    return dict(counts)


@pytest.mark.parametrize("momentum", [False, True])
def test_a_step_of_any_number_of_tensors_waits_once(momentum):
    """Its tables are on the device since the step before."""
    found = []
    for number in (1, 7):
        rng = np.random.default_rng(number)
        grads, us, vs = (
            [
                DeviceArray(torch.from_numpy(rng.standard_normal(900, np.float32)))
                for _ in range(number)
            ]
            for _ in range(3)
        )
        ks = [9] * number

        def step():
            selection.encode_topk(
                grads,
                us if momentum else None,
                vs,
                momentum=0.9,
                k=ks,
                samples=0,
                offset=0,
                kind="fp32",
                masked=900,
            )

        step()
        found.append(counted(step))
    assert found[0] == found[1]
    # Six of the choice, and one that writes what entries leave.
    assert found[0]["launches"] == 7 and found[0]["waits"] == 1
    # Indices, and what is left there.
    assert found[0]["copies to it"] == (3 if momentum else 2), found
