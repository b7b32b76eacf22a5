"""hvdc.DecentralizedOptimizer: models that differ between ranks, and messages to neighbors."""

import io
import warnings

import horovod.torch as hvd
import numpy as np
import torch
from checks import raises, registry
from torch import nn

import horovod_compress.torch as hvdc
from horovod_compress import MismatchError, WireError
from horovod_compress.decentralized.topology import Topology

from .training import Net, batches, flat, model_of, sgd, train
from .updates import SHAPES, told, weights

CASES, case = registry()
COARSE = "qsgd:bits=3,norm=max,min_numel=0"
# What suits each algorithm.
ALL = (
    ("dcd", COARSE),
    ("choco", "topk:ratio=0.1,min_numel=0"),
    ("ecd", "bf16"),
    ("exact", None),
)
MAKE = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
}


def gossiping(model, optimizer=None, spec=COARSE, algorithm="dcd", **options):
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return hvdc.DecentralizedOptimizer(
        optimizer or sgd(model), model.named_parameters(), spec, algorithm=algorithm, **options
    )


def gradients(model, rank, step):
    """Those of the distance to a target of its own in each step and rank."""
    for name, target in told(rank, step).items():
        model[name].grad = model[name].detach() - target.to(model[name].dtype)


def take_steps(model, optimizer, steps):
    for step in steps:
        gradients(model, hvd.rank(), step)
        optimizer.step()


def reloaded(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assert_mixed_is_right(optimizer, tolerance=1e-5):
    """W x̂ over real ranks."""
    gossip = optimizer._gossip
    w = Topology(gossip.topology.name, hvd.size()).weights[hvd.rank()]
    for name, copies in gossip.copies.items():
        public = hvd.allgather(torch.from_numpy(copies.public)[None], name=f"public.{name}")
        expected = w @ public.double().numpy()
        error = np.abs(copies.mixed - expected).max() / np.abs(expected).max()
        assert error < tolerance, f"{gossip.algorithm}, {name}: {error:.1e}"


@case(1, 2, 3, 4)
def exact_exchanges_are_d_psgd():
    """x ← W x + Δ of all ranks in one process. On a complete graph that averages before the step's
    own update."""
    for kind, make in MAKE.items():
        for topology in ("ring", "complete"):
            model = weights()
            optimizer = gossiping(model, make(model.parameters()), None, "exact", topology=topology)
            take_steps(model, optimizer, range(60))
            w = torch.from_numpy(Topology(topology, hvd.size()).weights).float()
            models = [weights() for _ in range(hvd.size())]
            optimizers = [make(each.parameters()) for each in models]
            for step in range(60):
                before = {n: torch.stack([m[n].detach().clone() for m in models]) for n in SHAPES}
                for rank, (each, its) in enumerate(zip(models, optimizers)):
                    gradients(each, rank, step)
                    its.step()
                    for n in SHAPES:
                        mixed = torch.tensordot(w[rank], before[n], 1)
                        each[n].data += mixed - before[n][rank]
            error = (flat(model) - flat(models[hvd.rank()])).abs().max() / flat(model).abs().max()
            assert error < 1e-5, f"{kind}, {topology}: {error:.1e}"


@case(2, 3, 4)
def what_is_mixed_is_right_whatever_happens():
    """After steps that are skipped and that are not finite on a rank, after an exchange without
    steps, and in a state that was saved and loaded."""
    for algorithm, spec in ALL:
        model = weights()
        optimizer = gossiping(model, None, spec, algorithm)
        take_steps(model, optimizer, range(4))
        gradients(model, hvd.rank(), 4)
        if hvd.rank() == 1:
            # As a GradScaler does.
            optimizer.found_inf, optimizer.grad_scale = torch.ones(()), None
        optimizer.step()
        if hvd.rank() == 1:
            del optimizer.found_inf, optimizer.grad_scale
        assert_mixed_is_right(optimizer)
        # Not with momentum, which would stay so.
        last = hvd.size() - 1
        if hvd.rank() == last:
            with torch.no_grad():
                model["matrix"][3, 5] = float("nan")
                model["bias"].fill_(float("inf"))
        optimizer.take_part()
        assert optimizer.stats()["steps_undone"] == (hvd.rank() == last)
        assert torch.isfinite(flat(model)).all()
        assert_mixed_is_right(optimizer)
        again = gossiping(model_copy := weights(), None, spec, algorithm)
        model_copy.load_state_dict(reloaded(model.state_dict()))
        again.load_state_dict(reloaded(optimizer.state_dict()))
        take_steps(model_copy, again, range(6, 9))
        assert_mixed_is_right(again)
        for each in again._gossip.copies.values():
            each.mixed += 1
        again.resync()
        assert_mixed_is_right(again, 1e-6)


@case(1, 2, 3)
def decentralized_training_resumes_bit_for_bit():
    for algorithm, spec in ALL:
        for every in (1, 3):
            model = weights()
            optimizer = gossiping(model, None, spec, algorithm, every=every)
            take_steps(model, optimizer, range(4))
            saved = reloaded((model.state_dict(), optimizer.state_dict()))
            take_steps(model, optimizer, range(4, 10))
            again = weights()
            its = gossiping(again, None, spec, algorithm, every=every)
            again.load_state_dict(saved[0])
            its.load_state_dict(saved[1])
            take_steps(again, its, range(4, 10))
            assert torch.equal(flat(again), flat(model)), f"{algorithm}, every {every}"


@case(1, 2, 3, 4)
def the_mean_moves_by_the_mean_of_local_updates():
    """In CHOCO, whatever messages lose, and over several local steps."""
    for spec in ("topk:ratio=0.02,min_numel=0", "efsignsgd:min_numel=0", COARSE):
        model, local = weights(), weights()
        optimizer = gossiping(
            model, torch.optim.SGD(model.parameters(), lr=0.1), spec, "choco", every=2, step=0.3
        )
        for step in range(8):
            for name, gradient in told(hvd.rank(), step).items():
                model[name].grad = gradient
                local[name].data -= 0.1 * gradient
            optimizer.step()
        expected = hvd.allreduce(flat(local), name="expected")
        with optimizer.mean_parameters():
            error = (flat(model) - expected).abs().max() / expected.abs().max()
            assert error < 1e-5, f"{spec}: {error:.1e}"
        assert len(optimizer.consensus()) == hvd.size()
        assert max(optimizer.consensus()) > 0 or hvd.size() == 1


@case(2, 3)
def a_portable_state_keeps_the_mean_model_on_other_ranks():
    model = weights()
    optimizer = gossiping(model)
    take_steps(model, optimizer, range(5))
    state = reloaded(optimizer.state_dict(portable=True))
    with optimizer.mean_parameters():
        mean = flat(model)
    fewer = hvd.add_process_set(range(hvd.size() - 1))
    try:
        for process_set in (fewer, None):
            if process_set is not None and not process_set.included():
                continue
            other = weights()
            its = hvdc.DecentralizedOptimizer(
                sgd(other),
                other.named_parameters(),
                "bf16",
                "complete",
                "choco",
                process_set=process_set,
            )
            its.load_state_dict(state)
            assert (flat(other) - mean).abs().max() < 1e-6
            take_steps(other, its, range(5, 7))
            assert its._gossip.steps == 7 and its.stats()["steps"] == 2
    finally:
        hvd.remove_process_set(fewer)


@case(1, 2, 3)
def decentralized_training_goes_down():
    """With batch normalization, whose statistics are averaged for evaluation, and half-precision
    parameters."""
    for algorithm, spec in ALL:
        model = model_of()
        optimizer = gossiping(model, None, spec, algorithm)
        alike = flat(model)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert torch.equal(flat(model), alike)
        data = list(batches(4))
        before = loss_of(model, data)
        train(model, optimizer, data * 6)
        with optimizer.mean_parameters(model.buffers()):
            everywhere = hvd.allgather(flat(model)[None], name="mean")
            running = hvd.allgather(model.norm.running_mean[None], name="running")
            assert (everywhere == everywhere[0]).all() and (running == running[0]).all()
            assert loss_of(model, data) < before
        assert hvd.size() == 1 or not torch.equal(model.norm.running_mean, running[0])
    half = weights().half()
    optimizer = gossiping(half)
    take_steps(half, optimizer, range(5))
    assert half["matrix"].dtype == torch.float16 and torch.isfinite(flat(half)).all()
    assert_mixed_is_right(optimizer)


def loss_of(model, data):
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(x), y) for x, y in data]
    return hvd.allreduce(torch.stack(losses).mean(), name="loss").item()


@case(2, 4)
def decentralized_ranks_that_differ_are_named():
    first = hvd.rank() == 0
    for options, word in (
        ({"topology": "ring" if first else "complete"}, "topology"),
        ({"algorithm": "dcd" if first else "choco"}, "algorithm"),
        ({"spec": COARSE if first else "natural"}, "options"),
        ({"algorithm": "choco", "step": 0.1 if first else 0.2}, "step"),
        ({"every": 1 if first else 2}, "every"),
    ):
        model = weights()
        optimizer = gossiping(model, **options)
        with raises(MismatchError, "rank 1 differs from rank 0", word):
            take_steps(model, optimizer, [0])
    model = weights()
    optimizer = gossiping(model)
    model["bias"].data += hvd.rank()
    with raises(MismatchError, "parameters", "broadcast_parameters"):
        take_steps(model, optimizer, [0])
    model = weights()
    optimizer = gossiping(model)
    take_steps(model, optimizer, range(3))
    state = optimizer.state_dict()
    state["decentralized"]["exchanges"] += hvd.rank()
    optimizer.load_state_dict(state)
    with raises(MismatchError, "exchanges"):
        take_steps(model, optimizer, [3])


@case(2, 4)
def a_damaged_message_is_an_error_on_all_ranks_and_resync_repairs():
    """All raise it in one step, so that loops which call resync() end together. On a ring of four
    that is the second exchange after the one of the damage, on two ranks the first."""
    for algorithm, spec, transport in (("dcd", COARSE, "horovod"), ("choco", COARSE, "mpi")):
        model = weights()
        optimizer = gossiping(model, None, f"{spec},transport={transport}", algorithm)
        neighbors, failed = optimizer._transport.neighbors, []

        def damaged(name, frame, ranks):
            wait = neighbors(name, frame, ranks)

            def received():
                frames = wait()
                # In the fourth exchange, and when copies are sent anew.
                if len(calls) in (4, 5 + hvd.size() // 2) and hvd.rank() == 1:
                    frames[0][40] ^= 1
                return frames

            calls.append(name)
            return received

        calls, optimizer._transport.neighbors = [], damaged
        for step in range(12):
            try:
                take_steps(model, optimizer, [step])
            except WireError as error:
                assert "rank 1: the message of its neighbor 0: " in str(error), error
                with raises(RuntimeError, "resync()"):
                    optimizer.step()
                with raises(RuntimeError, "resync()"):
                    optimizer.state_dict()
                optimizer.resync()
                failed.append(step)
        first = 3 + hvd.size() // 2
        assert failed == [first, first + 1 + hvd.size() // 2], failed
        assert_mixed_is_right(optimizer)
        assert torch.isfinite(flat(model)).all()


@case(2)
def messages_that_lose_more_than_they_bring_are_warned_of():
    """Once, of the mean over a hundred steps."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model = weights()
        inner = torch.optim.SGD(model.parameters(), lr=1e-3)
        optimizer = gossiping(model, inner, "qsgd:bits=1,norm=max,min_numel=0")
        for step in range(110):
            assert not found or step > 99
            for name, gradient in told(hvd.rank(), step).items():
                model[name].grad = gradient
            optimizer.step()
        assert ["alpha" in str(each.message) for each in found] == [True]
        assert optimizer.stats()["alpha"] > 1


@case(2)
def mistakes_with_decentralized_optimizers():
    model = weights()
    for options, words in (
        ({"spec": "dgc"}, ["momentum"]),
        ({"spec": "maxnorm"}, ["share a scale"]),
        ({"spec": hvdc.Compression.powersgd()}, ["powersgd"]),
        ({"algorithm": "exact"}, ["leave compression out"]),
        ({"algorithm": "gossip"}, ["dcd, ecd, choco, exact"]),
        ({"step": 0.5}, ["choco"]),
        ({"topology": [[1]]}, ["(2, 2)"]),
        ({"every": 0}, ["every"]),
        ({"optimizer": torch.optim.LBFGS(model.parameters())}, ["DecentralizedOptimizer", "SGD"]),
    ):
        with raises(ValueError, *words):
            gossiping(model, **options)
    optimizer = gossiping(model)
    with raises(ValueError, "exchanges already"):
        gossiping(model, optimizer)
    take_steps(model, optimizer, range(2))
    with optimizer.mean_parameters():
        for refused in (optimizer.step, optimizer.take_part, optimizer.state_dict):
            with raises(RuntimeError, "mean_parameters"):
                refused()
        optimizer.state_dict(portable=True)
    state = optimizer.state_dict()
    other = weights()
    its = gossiping(other)
    its.load_state_dict(state)
    with raises(RuntimeError, "of its model too"):
        take_steps(other, its, [2])
    for wrong, word in (
        ({"rank": 1 - hvd.rank()}, "rank"),
        ({"size": 3}, "size"),
        ({"algorithm": "choco"}, "algorithm"),
        ({"tensors": {}}, None),
        ({"tensors": {"bias": {}}}, "tensors"),
        ({"exchanges": -1}, "whole number"),
    ):
        changed = {**state, "decentralized": {**state["decentralized"], **wrong}}
        if word:
            with raises(ValueError, "does not fit", word):
                its.load_state_dict(changed)
    frozen = model_of(Net)
    its = gossiping(frozen)
    frozen.frozen.requires_grad_(True)
    its.param_groups[0]["params"] += list(frozen.frozen.parameters())[:1]
    with raises(ValueError, "make a new one"):
        its.step()


@case(2, 3, 4)
def mpi_moves_the_messages_that_horovod_moves():
    for algorithm, spec in (("dcd", COARSE), ("choco", "topk:ratio=0.1,min_numel=0")):
        results = []
        for transport in ("horovod", "mpi"):
            model = weights()
            optimizer = gossiping(model, None, f"{spec},transport={transport}", algorithm)
            take_steps(model, optimizer, range(8))
            results.append(flat(model))
        assert torch.equal(*results)


@case(4)
def over_mpi_ranks_wait_for_their_neighbors_only():
    """On a ring of four, rank 2 takes its step when rank 0 says that it has ended the same one."""
    from mpi4py import MPI

    model = weights()
    optimizer = gossiping(model, None, f"{COARSE},transport=mpi")
    take_steps(model, optimizer, range(2))
    for step in (2, 3):
        if hvd.rank() == 2:
            MPI.COMM_WORLD.recv(source=0, tag=4711)
        take_steps(model, optimizer, [step])
        if hvd.rank() == 0:
            MPI.COMM_WORLD.send(step, dest=2, tag=4711)
        hvd.barrier()
    assert_mixed_is_right(optimizer)
