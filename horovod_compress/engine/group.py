"""Groups: tensors that go the same way through a step, and travel as one message.

A tensor costs calls and messages more than its bytes, so those of one compressor are encoded,
moved and decoded together. State, seeds, k and scales stay each tensor's own. Groups are formed
from what all ranks know, not by when gradients come. They are small enough to travel while the
backward pass goes on.
"""

import zlib
from typing import Any, Dict, FrozenSet, Iterable, List, Sequence

import numpy as np

from ..compressors.base import Compressor
from ..protocol import wire
from .tensor import Tensor

# Elements of a group, at most; a larger tensor is alone.
MOST = 1 << 20
# On a device, where launches cost the CPU more than elements.
MOST_ON_DEVICE = 1 << 24


class Group:
    """Tensors of one compressor.

    tensors: alike on all ranks, in this order; carried: True if their payloads are the reducer's
    carriers; frame_length: what frames are padded to; checked: whether a first step has kept to the
    contract; measured: True if the sizes of payloads are not known beforehand.
    """

    def __init__(self, carried: bool, frame_length: wire.FrameLength) -> None:
        self.tensors: List[Tensor] = []
        self.carried, self.frame_length = carried, frame_length
        self.numel = 0
        self.checked = self.measured = False
        self.on_device = False
        # By stage of their compressor: the tensors that go dense in it.
        self.dense: Dict[Any, FrozenSet[str]] = {}

    @property
    def compressor(self) -> Compressor:
        """The compressor of the first; of the others that is the same, or one of its kin."""
        return self.tensors[0].compressor

    def add(self, tensor: Tensor) -> None:
        """Adds a tensor."""
        self.tensors.append(tensor)
        self.numel += tensor.numel

    def follow(self, tensors: Sequence[Tensor], grads: Sequence[Any]) -> bool:
        """Moves the tensors' states to the device of their gradients. True if all gradients are on
        one device and all tensors have the same compressor."""
        if self.on_device or set(map(type, grads)) != {np.ndarray}:
            self.on_device = True
            for tensor, grad in zip(tensors, grads):
                tensor.state.follow(grad)
        places = {getattr(grad, "device", None) for grad in grads}
        compressor = tensors[0].compressor
        return len(places) == 1 and all([tensor.compressor is compressor for tensor in tensors])


def digest_of(tensors: Sequence[Tensor]) -> int:
    """uint32 of configuration and tensors, on every frame of a group."""
    if len(tensors) == 1:
        return tensors[0].digest
    return zlib.crc32(np.array([tensor.digest for tensor in tensors], "<u4").tobytes())


def form(
    tensors: Iterable[Tensor], carries: bool, frame_length: Any, on_device: bool
) -> List[Group]:
    """Forms groups of tensors of one kin, the last ones first, because their gradients are.

    Args:
        tensors: in an order that is alike on all ranks.
        carries: whether payloads of the reducer can be carriers.
        frame_length: returns what a group's frames are padded to.
        on_device: True if gradients are on a device.

    Returns:
        The groups, in the order in which they are full.
    """
    groups: List[Group] = []
    most = MOST_ON_DEVICE if on_device else MOST
    # By kin.
    open_groups: Dict[int, Group] = {}
    for tensor in reversed(list(tensors)):
        group = open_groups.get(tensor.kin)
        if group is None or group.numel + tensor.numel > most:
            carried = carries and tensor.declared[0].verb == "reducer"
            group = open_groups[tensor.kin] = Group(carried, frame_length())
            groups.append(group)
        tensor.alone, tensor.place = None, len(group.tensors)
        group.add(tensor)
    return groups
