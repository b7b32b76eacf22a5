"""Results of encoders: a payload's body in a buffer, with facts about it."""

from typing import NamedTuple, Union

import numpy as np

HEADROOM = 24


class Encoded(NamedTuple):
    """A payload's body, as all kernels return it.

    buffer: a uint8 array, the body after HEADROOM zero bytes, for a frame's header, and before a
    zero byte. elements: how many of the tensor's elements it sends. finite: whether the gradient
    was finite everywhere; where it was not, the body is not used. undo: arrays and numbers that a
    rollback or a later pass needs, () for most;
        of encode_adacomp (indices, uint32; scale, float); of encode_variance (indices, uint32;
        float32 rows of r and v before); of encode_topk (indices, uint32; float32 rows as of
        take_entries); of encode_buckets (memory, uint8), which is `spare` of the next call and
        begins with the buffer.
    """

    buffer: np.ndarray
    elements: int
    finite: bool = True
    undo: tuple = ()

    @property
    def body(self) -> np.ndarray:
        return self.buffer[HEADROOM:-1]


def new_body(*parts: Union[bytes, np.ndarray]) -> np.ndarray:
    """The buffer of a body that consists of `parts`."""
    body = b"".join(part if isinstance(part, bytes) else part.tobytes() for part in parts)
    return np.frombuffer(bytes(HEADROOM) + body + b"\0", np.uint8).copy()
