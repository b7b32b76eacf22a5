"""Horovod's own collectives, through horovod.torch: works under MPI and Gloo, fused by Horovod with everything else it does."""
import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from .base import Transport

_OPS = {"sum": hvd.Sum, "max": hvd.Max}


class HorovodTransport(Transport):
    """The ranks of a Horovod process set.

    process_set: the one that is given to hvd.DistributedOptimizer too; default: all ranks.
    """

    def __init__(self, process_set=hvd.global_process_set):
        self._process_set = process_set

    @property
    def rank(self):
        return self._process_set.rank()

    @property
    def size(self):
        return self._process_set.size()

    def allgather(self, name, payload):
        handle = hvd.allgather_async(torch.from_numpy(payload), name=name, process_set=self._process_set)
        return lambda: self._wait(handle).numpy()

    def allreduce(self, name, array, op="sum"):
        tensor = torch.from_numpy(array)
        handle = hvd.allreduce_async_(tensor, name=name, op=_OPS[op], process_set=self._process_set)
        return lambda: self._wait(handle).numpy()

    def alltoall(self, name, payload, splits):
        splits = torch.tensor(splits, dtype=torch.int32)
        handle = hvd.alltoall_async(torch.from_numpy(payload), splits, name=name, process_set=self._process_set)

        def wait():
            received, lengths = self._wait(handle)
            return [part.numpy() for part in received.split(lengths.tolist())]

        return wait

    @staticmethod
    def _wait(handle):
        try:
            return hvd.synchronize(handle)
        except HorovodInternalError as error:
            if "Join" in str(error):
                raise RuntimeError(
                    "hvd.join() works with Horovod's own reductions only, and this compression exchanges more than those: let "
                    "every rank take the same number of steps, or use none or fp16"
                ) from error
            raise
