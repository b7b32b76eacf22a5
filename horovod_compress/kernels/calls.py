"""Calls of kernels on a device that tensors make together, because a launch for each of them would
take longer than its work."""

import dataclasses
from typing import Any, Dict, Tuple


@dataclasses.dataclass
class DeviceCall:
    """A call that is to be made. Answered with what the kernel returns, or with the exception that
    it raises.

    where: the array that says on which device; name: the kernel's; arrays, options: its positional
    arguments, and those by keyword; stream: the number of the GPU stream on which its arrays become
    ready, None on the CPU.
    """

    where: Any
    name: str
    arrays: Tuple[Any, ...]
    options: Dict[str, Any]
    stream: Any = None
