"""Mistakes are named, and faults lose nothing."""

import gc
import os
import warnings
from unittest import mock

import torch
import torch._dynamo
import torch.distributed as dist
from checks import raises, registry
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision

from horovod_compress import MismatchError, ddp
from horovod_compress.protocol import wire

from .options import SPARSE, told_model, unit_sgd
from .told import assert_nothing_lost, told
from .training import (
    DENSE,
    assert_replicas_identical,
    backward,
    batches,
    model_of,
    sgd,
    train,
    wrapped,
)

CASES, case = registry()


@case(2)
def what_is_refused_is_named():
    model = DDP(model_of())
    optimizer = sgd(model)
    with raises(TypeError, "DistributedDataParallel"):
        ddp.compress(model.module, optimizer, "none")
    with raises(TypeError, "torch optimizer"):
        ddp.compress(model, model, "none")
    with raises(ValueError, "transport=mpi"):
        ddp.compress(model, optimizer, "dgc:transport=mpi")
    with (
        mock.patch.dict(os.environ),
        raises(ValueError, "hosts=true", "LOCAL_WORLD_SIZE", "torchrun"),
    ):
        del os.environ["LOCAL_WORLD_SIZE"]
        ddp.compress(model, optimizer, "dgc:hosts=true")
    with raises(ValueError, "ratio"):
        ddp.compress(model, optimizer, "dgc:ratio=2")
    with raises(ValueError, "optimizer", "momentum"):
        ddp.compress(model, None, "dgc")
    with raises(ValueError, "step() of its own"):
        ddp.compress(
            model,
            type("Own", (torch.optim.SGD,), {"step": lambda self: None})(
                model.parameters(), lr=0.1, momentum=0.9
            ),
            "dgc",
        )
    ddp.compress(model, optimizer, "none")
    with raises(ValueError, "communication hook already", "switch", "another optimizer"):
        ddp.compress(model, optimizer, "none")
    with raises(ValueError, "auto", "candidates"):
        ddp.compress(DDP(model_of()), optimizer, "auto:candidates=none")
    with raises(ValueError, "ddp.AdamW", "torch.optim.AdamW", "UpdateOptimizer"):
        its = DDP(model_of())
        ddp.compress(its, ddp.AdamW(its.parameters()), "none")
    # Without a GPU a PyTorch for GPUs cannot make the stream that such a model needs.
    if torch.cuda.is_available() or torch.version.cuda is None:
        precision = _MixedPrecision(torch.float32, torch.float32, torch.float32)
        mixed = DDP(nn.Linear(3, 3), mixed_precision=precision)
        with raises(ValueError, "mixed_precision"):
            ddp.compress(mixed, sgd(mixed), "none")
    embedding = DDP(nn.Sequential(nn.Embedding(5, 3, sparse=True)))
    with raises(ValueError, "0 has sparse gradients", "sparse=False"):
        ddp.compress(embedding, sgd(embedding), "none")
    numbers = DDP(nn.Linear(3, 3, dtype=torch.complex64))
    with raises(ValueError, "weight is complex", "real and imaginary parts"):
        ddp.compress(numbers, sgd(numbers), "none")
    with raises(ValueError, "no parameter of the model"):
        ddp.compress(DDP(model_of()), optimizer, "none")
    local = PostLocalSGDOptimizer(sgd(its), PeriodicModelAverager(period=2))
    with raises(ValueError, "PostLocalSGDOptimizer has no hooks", "inside"):
        ddp.compress(its, local, "none")
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        python = DDP(nn.Linear(3, 3))
    with raises(ValueError, "python_reducer"):
        ddp.compress(python, sgd(python), "none")
    net = nn.Linear(3, 3)
    delayed = DDP(
        net,
        delay_all_reduce_named_params=[("bias", net.bias)],
        param_to_hook_all_reduce=net.weight,
    )
    with raises(ValueError, "delay_all_reduce"):
        ddp.compress(delayed, sgd(delayed), "none")


@case(2)
def what_comes_later_is_refused():
    model, optimizer, _ = wrapped(SPARSE)
    with (
        raises(ValueError, "divide_by_initial_world_size"),
        model.join(divide_by_initial_world_size=False),
    ):
        train(model, optimizer, batches(1))
    net = model_of()
    model, optimizer, compression = wrapped(SPARSE, net)
    compression._by_parameter.pop(id(net.out.weight))
    with raises(ValueError, "frozen"):
        train(model, optimizer, batches(1))


@case(2)
def a_refused_backward_pass_is_no_step():
    """Its gradients are not those of all ranks."""
    model, optimizer, _ = wrapped(DENSE)
    train(model, optimizer, batches(2))
    first, second = batches(2)
    backward(model, *first)
    with raises(RuntimeError, "no optimizer.step() has used the results"):
        backward(model, *second)
    with raises(RuntimeError, "new DistributedDataParallel"):
        optimizer.step()
    assert_replicas_identical(model)


@case(2)
def a_step_of_another_optimizer_is_named():
    model, _, _ = wrapped("dgc:ratio=0.1")
    with raises(RuntimeError, "another optimizer has parameters", "new DistributedDataParallel"):
        train(model, sgd(model), batches(2))
    # Where nothing was taken over, that one takes steps that are as good.
    model, optimizer, compression = told_model()
    optimizers, gradients = (unit_sgd(model), optimizer), []
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for step in range(6):
            optimizer.zero_grad()
            gradients.append(told(dist.get_rank(), step))
            model(gradients[-1]).backward()
            optimizers[step % 2].step()
    assert_nothing_lost(model, compression, gradients)


@case(2)
def a_payload_that_was_changed_ends_the_model():
    model, optimizer, compression = wrapped(SPARSE)
    train(model, optimizer, batches(2))
    exchange = compression._session.exchange
    exchange.expect(index=exchange.steps_taken() + dist.get_rank())
    with raises(wire.WireError, "of step"):
        train(model, optimizer, batches(1))
    with raises(RuntimeError, "new DistributedDataParallel", "state_dict()"):
        train(model, optimizer, batches(1))
    with torch.no_grad():
        model(next(batches(1))[0])


@case(2)
def a_hook_that_has_served_a_model_is_refused_in_another():
    state, hook = ddp.comm_hook(SPARSE)
    for refused in (False, True):
        model = DDP(model_of())
        model.register_comm_hook(state, hook)
        optimizer = sgd(model)
        if refused:
            with raises(ValueError, "has served another model", "ddp.comm_hook"):
                train(model, optimizer, batches(1))
        else:
            train(model, optimizer, batches(1))


@case(2)
def a_model_that_is_wrapped_anew_leaves_its_optimizer_to_the_new_compression():
    model, optimizer, compression = wrapped(SPARSE)
    train(model, optimizer, batches(2))
    state = compression.state_dict()
    again = DDP(model.module)
    compression = ddp.compress(again, optimizer, SPARSE)
    compression.load_state_dict(state)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    train(again, optimizer, batches(2))
    assert_replicas_identical(again)


@case(2, 3)
def mismatched_ranks_are_named():
    rank = dist.get_rank()
    model, optimizer, _ = wrapped(f"topk:ratio=0.0{1 + (rank == 1)}")
    with raises(MismatchError, "rank 1", "ratio", "0.02"):
        train(model, optimizer, batches(1))
    model, optimizer, _ = wrapped(SPARSE, optimizer=lambda model: sgd(model, lr=0.1 + (rank == 1)))
    with raises(MismatchError, "rank 1", "lr"):
        train(model, optimizer, batches(1))
    model, optimizer, compression = wrapped(SPARSE)
    train(model, optimizer, batches(1))
    with raises(MismatchError, "rank 1"):
        compression.switch("none" if rank == 1 else "fp16")
    train(model, optimizer, batches(1))
    assert_replicas_identical(model)


@case(2, 3)
def gradients_that_are_not_finite_lose_nothing():
    for spec in (SPARSE, "topk:ratio=0.1,values=fp16,min_numel=0"):
        model, optimizer, compression = told_model(spec)
        gradients = []
        for step in range(5):
            optimizer.zero_grad()
            its = told(dist.get_rank(), step)
            if step == 2 and dist.get_rank() == 1:
                its["matrix"][3, 3] = float("nan")
            # All that is finite, on any rank, is still to come.
            gradients.append({name: grad.nan_to_num(0) for name, grad in its.items()})
            model(its).backward()
            finite = all(param.grad.isfinite().all() for param in model.parameters())
            assert finite == (step != 2)
            if finite:
                optimizer.step()
        assert compression.stats()["steps_undone"] == 1
        assert_replicas_identical(model)
        assert_nothing_lost(model, compression, gradients, 1e-5 if spec == SPARSE else 1e-3)
    for spec in ("none", "powersgd", "maxnorm", "dgc:momentum=0.9"):
        model, optimizer, compression = told_model(spec)
        for step in range(3):
            optimizer.zero_grad()
            its = told(dist.get_rank(), step)
            its["bias"][0] = float("inf") if step == 1 and dist.get_rank() else 0.0
            model(its).backward()
            if step != 1:
                optimizer.step()
            else:
                assert not model.module.held["bias"].grad.isfinite().all()
        assert_replicas_identical(model)


class Failing(torch.autograd.Function):
    """The identity, whose backward pass fails when it is told to."""

    fails = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, delta):
        if Failing.fails:
            raise ZeroDivisionError("in the middle of a backward pass")
        return delta


@case(2)
def a_backward_pass_that_fails_halfway():
    """DDP itself does not go on after that; a new wrapper around the model does, and the
    compression's state with it."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(192, 40), nn.Linear(40, 10)

        def forward(self, x):
            return self.second(Failing.apply(torch.relu(self.first(x.flatten(1)))))

    model, optimizer, compression = wrapped(SPARSE, model_of(Net), {"bucket_cap_mb": 0.001})
    train(model, optimizer, batches(3))
    Failing.fails = True
    for x, y in batches(1):
        with raises(ZeroDivisionError):
            backward(model, x, y)
    Failing.fails = False
    assert compression._session.exchange.under_way
    with raises(RuntimeError, "new DistributedDataParallel", "state_dict()"):
        optimizer.step()
    state, net = compression.state_dict(), model.module
    assert state["step"] == 4
    with raises(RuntimeError, "finished reduction in the prior iteration"):
        train(model, optimizer, batches(1))
    del model, optimizer, compression
    gc.collect()
    model, optimizer, compression = wrapped(SPARSE, net)
    compression.load_state_dict(state)
    train(model, optimizer, batches(2))
    assert_replicas_identical(model)


@case(2)
def states_that_do_not_fit_are_refused():
    model, optimizer, compression = wrapped(SPARSE)
    train(model, optimizer, batches(2))
    state = compression.state_dict()
    for spoilt in ({**state, "id": "dgc"}, {}, {**state, "size": 7}):
        with raises(ValueError):
            compression.load_state_dict(spoilt)
    train(model, optimizer, batches(2))
    assert_replicas_identical(model)
