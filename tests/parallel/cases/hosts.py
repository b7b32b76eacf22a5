"""hosts=true on real ranks: what the same ranks give in one process, in both transports."""

import alike
import horovod.torch as hvd
import torch
from checks import raises, registry

import horovod_compress as hc
import horovod_compress.torch as hvdc

from .split import transports
from .told import Holder, reduced, told
from .training import assert_replicas_identical, batches, flat, model_of, sgd, train, wrap

CASES, case = registry()


@case(2, 3, 4)
def hosts_give_what_they_give_in_one_process():
    """Gradients, bytes and residuals; hooks fire in another order on every rank. Steps that go
    dense are among them."""
    names = [name for name, _ in Holder().named_parameters()]  # by which compressors draw
    steps = [
        [
            {f"held.{name}": grad.numpy() for name, grad in told(rank, step).items()}
            for rank in range(hvd.size())
        ]
        for step in range(5)
    ]
    starts = (
        "topk:ratio=0.05,",
        "dgc:ratio=0.05,momentum=0.9,",
        "dgc:schedule=0/1+2/0.05,momentum=0.9,",
        "adacomp:",
        "variance:",
        "efsignsgd:",
    )
    for spec in (f"{start}min_numel=100,hosts=true" for start in starts):
        run = hc.simulate(spec, steps, local_size=hvd.local_size())
        expected = torch.stack(
            [
                torch.cat([torch.from_numpy(mean[name]).flatten() for name in names])
                for mean in run.mean
            ]
        )
        for transport in transports():
            found, compression = reduced(f"{spec},transport={transport}", steps=5)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            sent = sum(sent[hvd.rank()] for sent in run.bytes_sent)
            assert alike.sent_of_tensors(compression) == sent, spec
            for name, arrays in compression.state_dict()["tensors"].items():
                for key, array in arrays.items():
                    torch.testing.assert_close(
                        array,
                        torch.from_numpy(run.state[hvd.rank()][name][key]),
                        rtol=1e-5,
                        atol=1e-5,
                    )


@case(2, 3, 4)
def hosts_train_with_identical_replicas():
    """All of a user's script, SGD's momentum taken over: clipped, with op=Sum, with predivision,
    and with every algorithm that gathers."""
    others = [
        f"{id}:min_numel=100"
        for id in ("adacomp", "variance", "randomk", "strom", "qsgd", "natural", "onebit")
    ]
    for spec, wrapping in (
        ("dgc:ratio=0.01", {}),
        ("dgc:ratio=0.01,clip_norm=0.5", {}),
        ("dgc:ratio=0.01", {"op": hvd.Sum}),
        ("dgc:ratio=0.01", {"gradient_predivide_factor": 2.0}),
        *((spec, {}) for spec in others),
    ):
        model = model_of()
        optimizer = sgd(model, weight_decay=1e-3)
        compression = hvdc.Compression.from_spec(
            f"{spec},hosts=true", optimizer, named_parameters=model.named_parameters()
        )
        train(model, wrap(model, optimizer, compression, **wrapping), batches(10))
        assert_replicas_identical(model)
        assert compression.stats()["steps_undone"] == 0 and torch.isfinite(flat(model)).all(), spec


@case(2, 4)
def states_of_hosts_resume_and_switch():
    """A rank's own state goes on bit for bit; a portable one, and a switch to and from one level,
    keep what results are owed."""
    spec = "topk:ratio=0.02,min_numel=100"

    def owed(compression):
        """By name, the mean over ranks of what they keep, as a portable state has it."""
        state = compression.state_dict(portable=True)["tensors"]
        return {
            name: sum(array for key, array in arrays.items() if key in ("residual", "owed"))
            for name, arrays in state.items()
        }

    model = model_of()
    optimizer = sgd(model, momentum=0)
    compression = hvdc.Compression.from_spec(
        f"{spec},hosts=true", optimizer, named_parameters=model.named_parameters()
    )
    wrapped = wrap(model, optimizer, compression)
    train(model, wrapped, batches(5))
    own, portable, before = (
        compression.state_dict(),
        compression.state_dict(portable=True),
        owed(compression),
    )
    again = hvdc.Compression.from_spec(
        f"{spec},hosts=true", sgd(model, momentum=0), named_parameters=model.named_parameters()
    )
    again.load_state_dict(own)
    assert all(
        torch.equal(a, again.state_dict()["tensors"][n][k])
        for n, named in own["tensors"].items()
        for k, a in named.items()
    )
    one_level = hvdc.Compression.from_spec(
        spec, sgd(model, momentum=0), named_parameters=model.named_parameters()
    )
    with raises(ValueError, "shards"):
        one_level.load_state_dict(own)
    for other in (again, one_level):
        other.load_state_dict(portable)
        torch.testing.assert_close(owed(other), before)
    for other in (spec, f"{spec},hosts=true", "none", "dgc:ratio=0.01,min_numel=100,hosts=true"):
        compression.switch(other)
        if not other.startswith("dgc"):  # whose u and v say it otherwise
            torch.testing.assert_close(owed(compression), before)
    train(model, wrapped, batches(3))
    assert_replicas_identical(model)
