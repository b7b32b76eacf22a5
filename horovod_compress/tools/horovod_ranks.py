"""The ranks of a job that horovodrun or mpirun has started, for `cluster`."""

import functools
import importlib.util
from typing import Any, Callable, Iterable, Tuple

import horovod
import horovod.torch as hvd
import torch

from .. import torch as hvdc
from ..torch.transport import HorovodTransport
from .cluster import Parameters, Ranks

_START = {
    "allreduce": functools.partial(hvd.allreduce_async_, op=hvd.Sum),
    "allgather": hvd.allgather_async,
    "alltoall": hvd.alltoall_async,
}


class HorovodRanks(Ranks):
    """Horovod's ranks."""

    def __init__(self) -> None:
        hvd.init()
        super().__init__(HorovodTransport(hvd.global_process_set))
        self.local_size = hvd.local_size() if hvd.mpi_ops.is_homogeneous() else 1
        self.launcher = f"Horovod on {'MPI' if hvd.mpi_enabled() else 'Gloo'}"
        mpi4py = importlib.util.find_spec("mpi4py") is not None
        self.installed = {
            "horovod": horovod.__version__,
            "mpi4py": "installed" if mpi4py else "missing",
        }
        with_mpi = hvd.mpi_enabled() and all(self.gathered(mpi4py))
        self.transports = ["horovod", "mpi"] if with_mpi else ["horovod"]

    def barrier(self) -> None:
        hvd.barrier()

    def start(self, verb: str, tensor: torch.Tensor, name: str) -> Callable[[], Any]:
        return functools.partial(hvd.synchronize, _START[verb](tensor, name=name))

    def training(
        self, params: Parameters, optimizer: torch.optim.Optimizer, spec: Any = None
    ) -> Tuple[Callable[[], Iterable[torch.Tensor]], Any]:
        named, options = params.items(), {}
        if spec is not None:
            options["compression"] = hvdc.Compression.from_spec(
                spec, optimizer, named_parameters=named
            )
        return params.values, hvd.DistributedOptimizer(optimizer, named_parameters=named, **options)
