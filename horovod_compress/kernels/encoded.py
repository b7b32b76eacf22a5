"""What encoders return: a payload's body in a buffer, and what goes with it."""
from typing import NamedTuple, Union

import numpy as np

HEADROOM = 24


class Encoded(NamedTuple):
    """A payload's body, as both sets of kernels return it.

    buffer: a uint8 array, the body with HEADROOM zero bytes before it, for a frame's header, and a zero byte behind it.
    elements: int, how many of the tensor's elements it sends.
    finite: bool, whether the gradient was finite everywhere; where it was not, the body is not used.
    undo: what a rollback or a later pass needs, arrays and numbers: () for most;
        encode_adacomp (indices, uint32; scale, float), encode_variance (indices, uint32; float32 rows of r and v before),
        encode_buckets (memory, uint8), which is `spare` of the next call: the buffer is a view of its beginning.
    """

    buffer: np.ndarray
    elements: int
    finite: bool = True
    undo: tuple = ()

    @property
    def body(self) -> np.ndarray:
        return self.buffer[HEADROOM:-1]


def new_body(*parts: Union[bytes, np.ndarray]) -> np.ndarray:
    """The buffer of a body that joins `parts`, bytes or arrays."""
    body = b"".join(part if isinstance(part, bytes) else part.tobytes() for part in parts)
    return np.frombuffer(bytes(HEADROOM) + body + b"\0", np.uint8).copy()
