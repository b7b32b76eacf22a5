"""exchange=split on real ranks: what the same ranks give in one process, in both transports."""

import alike
import horovod.torch as hvd
import torch
from checks import registry

import horovod_compress as hc
import horovod_compress.torch as hvdc

from .told import Holder, reduced, told
from .training import assert_replicas_identical, batches, flat, model_of, sgd, train, wrap

CASES, case = registry()
TRANSPORTS = ("horovod", "mpi")


def transports():
    return TRANSPORTS if hvd.mpi_enabled() else TRANSPORTS[:1]


@case(2, 3, 4)
def split_gives_what_it_gives_in_one_process():
    """Gradients, bytes and residuals; hooks fire in another order on every rank."""
    names = [name for name, _ in Holder().named_parameters()]  # by which compressors draw
    steps = [
        [
            {f"held.{name}": grad.numpy() for name, grad in told(rank, step).items()}
            for rank in range(hvd.size())
        ]
        for step in range(5)
    ]
    for spec in (
        "topk:ratio=0.05",
        "topk:ratio=0.02,values=power,accept=1.2",
        "dgc:ratio=0.05,momentum=0.9,values=fp16",
        "dgc:k=50,momentum=0.5",
    ):
        run = hc.simulate(f"{spec},min_numel=100,exchange=split", steps)
        expected = torch.stack(
            [
                torch.cat([torch.from_numpy(mean[name]).flatten() for name in names])
                for mean in run.mean
            ]
        )
        for transport in transports():
            found, compression = reduced(
                f"{spec},min_numel=100,exchange=split,transport={transport}", steps=5
            )
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
            sent = sum(sent[hvd.rank()] for sent in run.bytes_sent)
            assert alike.sent_of_tensors(compression) == sent, spec
            for name, arrays in compression.state_dict()["tensors"].items():
                for key, array in arrays.items():
                    expected_array = torch.from_numpy(run.state[hvd.rank()][name][key])
                    torch.testing.assert_close(array, expected_array, rtol=1e-6, atol=1e-6)


@case(2, 3, 4)
def with_all_accepted_split_gives_what_the_allgather_gives():
    """Bit for bit. Every tensor is compressed: sums of Horovod's own depend on which tensors it
    fuses."""
    for spec in (
        "topk:ratio=0.05,min_numel=0",
        "dgc:ratio=0.05,min_numel=0,momentum=0.9,clip_norm=3",
    ):
        for transport in transports():
            (expected, _), (found, _) = (
                reduced(f"{spec},transport={transport},{exchange}")
                for exchange in ("exchange=gather", f"exchange=split,accept={hvd.size()}")
            )
            assert torch.equal(found, expected), (spec, transport)


@case(2, 3, 4)
def split_trains_with_identical_replicas():
    """All of a user's script, SGD's momentum taken over: clipped, with op=Sum, and with
    predivision. With all accepted as gathered."""
    for options, wrapping in (
        ("", {}),
        (",clip_norm=0.5", {}),
        (",transport=mpi", {"op": hvd.Sum}),
        ("", {"gradient_predivide_factor": 2.0}),
    ):
        if "mpi" in options and not hvd.mpi_enabled():
            continue
        runs = []
        for exchange in ("gather", f"split,accept={hvd.size()}", "split"):
            model = model_of()
            optimizer = sgd(model, weight_decay=1e-3)
            compression = hvdc.Compression.from_spec(
                f"dgc:ratio=0.01{options},exchange={exchange}",
                optimizer,
                named_parameters=model.named_parameters(),
            )
            train(model, wrap(model, optimizer, compression, **wrapping), batches(10))
            assert_replicas_identical(model)
            runs.append((flat(model), compression.stats()))
        (gathered, _), (all_accepted, _), (split, stats) = runs
        torch.testing.assert_close(all_accepted, gathered, rtol=1e-4, atol=1e-5)
        assert (split - gathered).abs().max() > 1e-3 and stats["residual_norm"] > 0
