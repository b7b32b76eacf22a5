"""The ranks of a job, as horovodrun, mpirun or torchrun has started them, for `cluster`."""

import atexit
import dataclasses
import importlib.util
from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np
import torch

from ..compressors import get_compressor
from ..session.ranks import Ranks


@dataclasses.dataclass
class Job:
    """The ranks of a job, as the checks need them.

    Attributes:
        ranks: who they are.
        launcher: what moves their messages.
        transports: ways in which compressions exchange, by the option `transport`.
        training: training(model, optimizer, spec) has the gradients of a model reduced, compressed
            where the spec is not None. It returns the model and the optimizer to train with.
        installed: {what: version} that must be the same everywhere.
        transport: between the ranks.
        say: prints a line, on the first rank; the others say nothing.
    """

    ranks: Ranks
    launcher: str
    transports: List[str]
    training: Callable[[torch.nn.Module, Any, Any], Tuple[torch.nn.Module, Any]]
    installed: Dict[str, str]
    say: Callable[[str], Any] = str

    def __post_init__(self) -> None:
        self.transport = self.ranks.transport = self.ranks.transport_of(get_compressor("none"))

    def slowest(self, seconds: Sequence[float]) -> List[float]:
        """The largest of all ranks, of each."""
        return self.transport.allreduce("check.seconds", np.array(seconds), "max")().tolist()


def of_horovod() -> Job:
    """The job of horovodrun or mpirun."""
    import horovod
    import horovod.torch as hvd

    from .. import torch as hvdc
    from ..torch.transport import TorchRanks

    hvd.init()

    def training(model: torch.nn.Module, optimizer: Any, spec: Any) -> Tuple[torch.nn.Module, Any]:
        named, options = list(model.named_parameters()), {}
        if spec is not None:
            options["compression"] = hvdc.Compression.from_spec(
                spec, optimizer, named_parameters=named
            )
        return model, hvd.DistributedOptimizer(optimizer, named_parameters=named, **options)

    mpi4py = "missing" if importlib.util.find_spec("mpi4py") is None else "installed"
    job = Job(
        TorchRanks(None),
        f"Horovod on {'MPI' if hvd.mpi_enabled() else 'Gloo'}",
        ["horovod"],
        training,
        {"horovod": horovod.__version__, "mpi4py": mpi4py},
    )
    if hvd.mpi_enabled() and "missing" not in job.ranks.gathered("mpi4py", mpi4py):
        job.transports.append("mpi")
    return job


def of_torchrun() -> Job:
    """The job of torchrun, on Gloo."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from .. import ddp
    from ..torch_distributed.ranks import GroupRanks

    dist.init_process_group("gloo")
    atexit.register(dist.destroy_process_group)

    def training(model: torch.nn.Module, optimizer: Any, spec: Any) -> Tuple[torch.nn.Module, Any]:
        reduced = DistributedDataParallel(model)
        if spec is not None:
            ddp.compress(reduced, optimizer, spec)
        return reduced, optimizer

    launcher, transports = "torch.distributed on Gloo", ["torch.distributed"]
    return Job(GroupRanks(None), launcher, transports, training, {})
