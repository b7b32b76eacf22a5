"""Options that others than their algorithm need."""

from typing import NamedTuple, Optional


class Policy(NamedTuple):
    """The options that others read, by their names. These are the values where an algorithm has no
    such option.

    clip_norm: where set, the exchange clips this rank's gradient as a whole, and encodes when all
    of it is there; seed: where set, all random draws follow from it; m, nesterov: the momentum that
    the algorithm itself gives gradients, in an array "u", and whether that is Nesterov's;
    follow_lr: whether the residual is rescaled where the learning rate changes, None where that is
    known.

    Examples:
        >>> import horovod_compress as hc
        >>> policy = hc.get_compressor("dgc:ratio=0.01,momentum=0.8,dense=fp16").policy
        >>> policy.m, policy.dense, policy.hosts
        (0.8, 'fp16', False)
        >>> hc.get_compressor("none").policy == type(policy)()
        True
    """

    transport: str = "horovod"
    dense: str = "fp32"
    hosts: bool = False
    exchange: str = "gather"
    moments: str = "minibatch"
    seed: Optional[int] = None
    clip_norm: Optional[float] = None
    m: float = 0.0
    nesterov: Optional[bool] = False
    follow_lr: Optional[bool] = False
