"""What real ranks are asked to prove. Each case runs on every rank of one job; run_cases.py runs them, test_ranks.py asks.

A case raises on the rank that finds something wrong. `sizes` are the numbers of ranks it is meant for.
"""
import copy
import os
import pathlib
import socket
import sys
import tempfile
import warnings

import alike
import horovod.torch as hvd
import numpy as np
import torch
from checks import raises, registry
from torch import nn

import horovod_compress.torch as hvdc
from horovod_compress import MismatchError, available, binding, kernels, simulate
from horovod_compress.transport.mpi import MPITransport

CASES, case = registry()


def start():
    """The rank, ready to run cases."""
    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    return hvd.rank()


# -- a model, data that differs between ranks, and a training loop as users write it ------------------------------------


class Net(nn.Module):
    """Convolution, normalization, a layer used twice, a frozen layer, a linear layer: 17 thousand parameters."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.shared = nn.Linear(64, 64)
        self.frozen = nn.Linear(64, 64)
        self.out = nn.Linear(64, 10)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x))).mean(1).flatten(1)
        return self.out(torch.relu(self.frozen(torch.relu(self.shared(torch.relu(self.shared(x)))))))


def model_of(cls=Net, seed=0):
    torch.manual_seed(seed)
    return cls()


def batches(steps, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + hvd.rank())
    for _ in range(steps):
        yield torch.randn(8, 1, 8, 8, generator=generator), torch.randint(0, 10, (8,), generator=generator)


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def wrap(model, optimizer, compression, **options):
    named = list(model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression, **options)
    hvd.broadcast_optimizer_state(wrapped, root_rank=0)
    return wrapped


def train(model, optimizer, data):
    for x, y in data:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def compressed(model, optimizer, steps=10, spec="dgc:ratio=0.01", wrap_options=None, process_set=None):
    compression = hvdc.Compression.from_spec(spec, optimizer, model.named_parameters(), process_set=process_set)
    train(model, wrap(model, optimizer, compression, **(wrap_options or {})), batches(steps))
    return compression


def flat(model):
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def assert_replicas_identical(model, process_set=None):
    mine = flat(model)
    # Named: unnamed collectives are numbered, and ranks that are in other process sets have counted further.
    options = {} if process_set is None else {"process_set": process_set}
    all_of_them = hvd.allgather(mine[None], name="replicas", **options)
    assert torch.isfinite(mine).all(), "parameters are not finite"
    worst = (all_of_them - all_of_them[0]).abs().max().item()
    assert worst == 0, f"replicas differ by {worst:.2e}"


def assert_close(model, reference, tolerance=1e-6):
    a, b = flat(model), flat(reference)
    error = ((a - b).abs().max() / b.abs().max()).item()
    assert error <= tolerance, f"parameters differ by {error:.2e} relative"


# -- the dense limit: the same trajectory as plain Horovod ---------------------------------------------------------------

DENSE = "dgc:ratio=1,masking=false"


@case(2, 3)
def dense_limit():
    for nesterov in (False, True):
        for weight_decay in (0, 0.01):
            for spec in (DENSE, DENSE + ",min_numel=0"):
                options = {"nesterov": nesterov, "weight_decay": weight_decay}
                reference, model = model_of(), model_of()
                train(reference, wrap(reference, sgd(reference, **options), hvd.Compression.none), batches(20))
                compressed(model, sgd(model, **options), steps=20, spec=spec)
                assert_close(model, reference)
                assert_replicas_identical(model)


@case(2)
def dense_limit_through_gathered_payloads():
    """At 16-bit values a full density still moves less than dense on 2 ranks, so it is gathered. Gradients of few
    significant bits survive that exactly."""
    reference, model = nn.Linear(40, 40, bias=False), nn.Linear(40, 40, bias=False)
    model.load_state_dict(reference.state_dict())
    for net, spec in ((reference, None), (model, "dgc:ratio=1,masking=false,momentum=0,values=bf16")):
        optimizer = torch.optim.SGD(net.parameters(), lr=2**-6)
        compression = hvdc.Compression.from_spec(spec, optimizer) if spec else hvd.Compression.none
        wrapped = wrap(net, optimizer, compression)
        for step in range(10):
            generator = torch.Generator().manual_seed(10 * step + hvd.rank())
            gradient = torch.randint(-100, 100, (40, 40), generator=generator).float()
            wrapped.zero_grad()
            (net.weight * gradient).sum().backward()
            wrapped.step()
    assert compression.stats()["bytes_sent"] < 0.6 * compression.stats()["dense_bytes"]
    assert_close(model, reference)


@case(2)
def dense_limit_with_other_optimizers():
    for make in (
        lambda m: torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.01),
        lambda m: sgd(m, momentum=0, weight_decay=0.01),
        lambda m: sgd(m, weight_decay=0.01, maximize=True, lr=1e-4),
    ):
        reference, model = model_of(), model_of()
        train(reference, wrap(reference, make(reference), hvd.Compression.none), batches(20))
        compressed(model, make(model), steps=20, spec=DENSE)
        assert_close(model, reference, 2e-6)


@case(2)
def dense_limit_with_parameter_groups_and_a_momentum_schedule():
    def optimizer_of(model):
        return torch.optim.SGD(
            [
                {"params": model.conv.parameters(), "momentum": 0.5, "weight_decay": 0.1},
                {"params": model.norm.parameters(), "momentum": 0},
                {"params": [*model.shared.parameters(), *model.out.parameters()], "nesterov": True},
            ],
            lr=0.05, momentum=0.9, weight_decay=0.01,
        )

    models = model_of(), model_of()
    for model, spec in zip(models, (None, DENSE)):
        optimizer = optimizer_of(model)
        compression = hvdc.Compression.from_spec(spec, optimizer, model.named_parameters()) if spec else hvd.Compression.none
        wrapped = wrap(model, optimizer, compression)
        for step, batch in enumerate(batches(20)):
            if step == 10:
                wrapped.param_groups[0]["momentum"] = 0.7
            train(model, wrapped, [batch])
    assert_close(models[1], models[0])
    assert [group["momentum"] for group in wrapped.param_groups] == [0.7, 0, 0.9]


# -- the optimizer's own options, state and checkpoints ---------------------------------------------------------------------


def pair(make, compression_options=None, **wrap_options):
    """(model, wrapped optimizer) without compression and with it, in the dense limit, both wrapped as the README does."""
    made = []
    for spec in (None, DENSE):
        model = model_of()
        optimizer = make(model)
        compression = hvdc.Compression.from_spec(spec, optimizer, model.named_parameters()) if spec else hvd.Compression.none
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression, **wrap_options
        )
        made.append((model, optimizer, compression))
    return made


@case(2)
def schedulers_see_and_set_the_groups_as_usual():
    for scheduler_of in (
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=4),
    ):
        made = pair(lambda m: sgd(m, weight_decay=0.01))
        for model, optimizer, _ in made:
            scheduler = scheduler_of(optimizer)
            for batch in batches(20):
                train(model, optimizer, [batch])
                assert optimizer.param_groups[0]["momentum"] > 0.5 and optimizer.param_groups[0]["weight_decay"] == 0.01
                scheduler.step()
        assert_close(made[1][0], made[0][0])


@case(2)
def options_turned_off_and_on_while_training():
    made = pair(lambda m: sgd(m, weight_decay=0.1))
    changes = {3: {"weight_decay": 0}, 6: {"momentum": 0}, 9: {"momentum": 0.5}, 12: {"weight_decay": 0.05}}
    for model, optimizer, _ in made:
        for step, batch in enumerate(batches(15)):
            optimizer.param_groups[0].update(changes.get(step, {}))
            train(model, optimizer, [batch])
    # SGD keeps its buffer while momentum is 0 and takes it up again; here only the weight decay's part is kept so.
    assert_close(made[1][0], made[0][0], 2e-2)
    made = pair(lambda m: sgd(m, weight_decay=0.1))
    changes.pop(6), changes.pop(9)
    for model, optimizer, _ in made:
        for step, batch in enumerate(batches(15)):
            optimizer.param_groups[0].update(changes.get(step, {}))
            train(model, optimizer, [batch])
    assert_close(made[1][0], made[0][0])


@case(2)
def broadcast_optimizer_state_works_as_without_compression():
    """Rank 0 has loaded a checkpoint of a plain run; the broadcast brings all of it, momentum too, to the others."""
    source = model_of()
    trained = hvd.DistributedOptimizer(sgd(source, weight_decay=0.01), named_parameters=source.named_parameters())
    train(source, trained, batches(5))
    checkpoint = source.state_dict(), trained.state_dict()
    checkpoint[1]["param_groups"][0]["lr"] = 0.02
    made = pair(lambda m: sgd(m, weight_decay=0.01))
    for model, optimizer, _ in made:
        if hvd.rank() == 0:
            model.load_state_dict(checkpoint[0])
            optimizer.load_state_dict(copy.deepcopy(checkpoint[1]))
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # steps on rank 1, so parameters come afterwards
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        assert optimizer.param_groups[0]["lr"] == 0.02
        train(model, optimizer, batches(10, seed=3))
        assert_replicas_identical(model)
    assert_close(made[1][0], made[0][0])


@case(2)
def resume_under_a_momentum_schedule_is_bit_for_bit():
    def start():
        model = model_of()
        optimizer = sgd(model, weight_decay=0.01)
        compression = hvdc.Compression.dgc(optimizer, model.named_parameters(), ratio=0.02)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
        return model, optimizer, compression, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)

    def go_on(model, optimizer, scheduler, seed):
        for batch in batches(10, seed):
            train(model, optimizer, [batch])
            scheduler.step()

    first = start()
    go_on(first[0], first[1], first[3], 0)
    saved = [copy.deepcopy(part.state_dict()) for part in first]
    go_on(first[0], first[1], first[3], 1)
    second = start()
    for part, state in zip(second, saved):
        part.load_state_dict(state)
    go_on(second[0], second[1], second[3], 1)
    assert torch.equal(flat(second[0]), flat(first[0]))


@case(2)
def a_rank_that_skips_backward_changes_nothing_for_the_others():
    made = pair(lambda m: sgd(m, weight_decay=0.1))
    for model, optimizer, _ in made:
        for step, (x, y) in enumerate(batches(6)):
            model.zero_grad(set_to_none=False)
            if step != 2 or hvd.rank() == 0:
                nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        assert_replicas_identical(model)
    assert_close(made[1][0], made[0][0])


@case(2)
def options_that_differ_are_named_at_the_first_step():
    for options, words in (({"lr": 0.1}, "lr"), ({"weight_decay": 0.1}, "weight_decay"), ({"maximize": True}, "maximize")):
        model = model_of()
        optimizer = sgd(model, **(options if hvd.rank() == 1 else {}))
        compression = hvdc.Compression.dgc(optimizer, model.named_parameters(), ratio=0.01)
        wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
        with raises(MismatchError, "parameter group 0." + words, "rank 1"):
            train(model, wrapped, batches(1))


@case(2)
def an_optimizer_can_be_bound_again():
    reference, model = model_of(), model_of()
    train(reference, wrap(reference, sgd(reference, nesterov=True), hvd.Compression.none), batches(5))
    optimizer = sgd(model, nesterov=True)
    for spec in ("dgc:ratio=0.5", "dgc:nesterov=true,momentum=0.9", DENSE):
        compression = hvdc.Compression.from_spec(spec, optimizer, model.named_parameters())
    train(model, wrap(model, optimizer, compression), batches(5))
    assert_close(model, reference)
    model = model_of()
    compressed(model, sgd(model), 3, "dgc:nesterov=true,ratio=0.01")
    assert_replicas_identical(model)


@case(2)
def equal_and_not_finite_sparse_gradients():
    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = nn.Embedding(50, 40, sparse=True)
            self.right = nn.Embedding(50, 40, sparse=True)

        def forward(self, words):
            return (self.left(words) + self.right(words)).sum()

    for factor in (1.0, float("nan")):
        model = model_of(Twins)
        optimizer = sgd(model)
        compression = hvdc.Compression.dgc(optimizer, model.named_parameters(), ratio=0.01)
        wrapped = wrap(model, optimizer, compression, sparse_as_dense=True)
        for _ in range(3):
            wrapped.zero_grad()
            (model(torch.arange(10)) * (factor if hvd.rank() == 1 else 1.0)).backward()
            wrapped.step()
        assert torch.isfinite(flat(model)).all() == (factor == 1.0)
        values = hvd.allgather(flat(model)[None])
        assert torch.equal(values[0].nan_to_num(7), values[1].nan_to_num(7))
        assert compression.stats()["steps_undone"] == (0 if factor == 1.0 else 3)


@case(3)
def compressions_of_members_only():
    members = hvd.add_process_set([0, 1])
    if members.included():
        model = model_of()
        hvdc.Compression.dgc(sgd(model), model.named_parameters(), process_set=members)
    model = model_of()
    compressed(model, sgd(model), 3)
    assert_replicas_identical(model)
    hvd.remove_process_set(members)


@case(2)
def half_precision_results_that_overflow_are_given_back():
    model = nn.Linear(64, 64, bias=False).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    compression = hvdc.Compression.dgc(optimizer, model.named_parameters(), ratio=0.01)
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    used, steps = torch.zeros(64, 64, dtype=torch.float64), 40
    for _ in range(steps):
        wrapped.zero_grad()
        (model.weight * torch.full((64, 64), 30000.0, dtype=torch.float16)).sum().backward()
        wrapped.synchronize()
        if torch.isfinite(model.weight.grad).all():  # what a GradScaler would let through
            used += model.weight.grad.double()
    kept = hvd.allreduce(compression.state_dict()["tensors"]["weight"]["v"].double().view(64, 64), op=hvd.Average)
    assert compression.stats()["steps_undone"] > 0
    torch.testing.assert_close(used + kept, torch.full((64, 64), 30000.0 * steps, dtype=torch.float64), rtol=1e-3, atol=0)


# -- replicas, under every option of hvd.DistributedOptimizer --------------------------------------------------------------


@case(2, 3, 4)
def replicas_identical_after_100_steps():
    model = model_of()
    compression = compressed(model, sgd(model, nesterov=True, weight_decay=1e-4), 100, "dgc:ratio=0.001")
    assert_replicas_identical(model)
    stats = compression.stats()
    assert stats["steps"] == 100 and stats["elements_sent"] > 0 and stats["residual_norm"] > 0


@case(2)
def optimizer_options():
    """Every option gives the dense limit too, so nothing is scaled wrongly."""
    for options in (
        {"groups": 2},
        {"gradient_predivide_factor": 2.0},
        {"op": hvd.Sum},
        {"op": hvd.Sum, "groups": 3},
    ):
        for spec in (DENSE, "dgc:ratio=0.02,values=fp16", "dgc:ratio=0.02,clip_norm=0.1", "none"):
            model = model_of()
            compressed(model, sgd(model, lr=0.01), 10, spec, options)
            assert_replicas_identical(model)
            if spec in (DENSE, "none"):
                reference = model_of()
                train(reference, wrap(reference, sgd(reference, lr=0.01), hvd.Compression.none, **options), batches(10))
                assert_close(model, reference)


@case(2, 4, 8)
def clip_norm_limits_the_update_as_clip_grad_norm_does():
    """Where the ranks' gradients are independent and far above the limit, the update has the norm that vanilla clipping gives it."""
    for options in ({}, {"op": hvd.Sum}, {"gradient_predivide_factor": 4.0}):
        for spec in (None, "dgc:ratio=1,momentum=0,clip_norm=1,min_numel=0", "dgc:ratio=0.5,momentum=0,clip_norm=1"):
            torch.manual_seed(hvd.rank())
            noise = {"matrix": torch.randn(80, 100), "bias": torch.randn(900)}
            norm = torch.cat([tensor.flatten() for tensor in noise.values()]).norm()
            params = {name: nn.Parameter(torch.zeros_like(tensor)) for name, tensor in noise.items()}
            optimizer = torch.optim.SGD(params.values(), lr=1.0)
            compression = hvdc.Compression.from_spec(spec, optimizer, params.items()) if spec else hvd.Compression.none
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=params.items(), compression=compression, **options)
            sum((10 * hvd.size() / norm * noise[name] * param).sum() for name, param in params.items()).backward()
            optimizer.synchronize()
            if spec is None:
                nn.utils.clip_grad_norm_(params.values(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
            update = torch.cat([param.detach().flatten() for param in params.values()])
            if spec and "0.5" in spec:  # what was not sent yet is in the residual, and no part of the limit
                assert update.norm() < 1.1, f"{options}, {spec}: {update.norm()}"
            else:
                assert 0.9 < update.norm() < 1.1, f"{options}, {spec}: {update.norm()}"


@case(8)
def payloads_that_would_move_more_than_dense_ones_go_dense():
    """9 bits an element from 8 ranks move more than a ring allreduce of 32: the mean is plain Horovod's, and so are the bytes."""
    reference, model = model_of(), model_of()
    train(reference, wrap(reference, sgd(reference, momentum=0), hvd.Compression.none), batches(5))
    optimizer = sgd(model, momentum=0)
    compression = hvdc.Compression.natural(optimizer, model.named_parameters())
    train(model, wrap(model, optimizer, compression), batches(5))
    assert_close(model, reference)
    assert_replicas_identical(model)
    stats = compression.stats()
    assert stats["bytes_sent"] == stats["dense_bytes"], stats


@case(2)
def average_sum_and_predivide_scale_gathered_payloads_alike():
    """The same gathered entries: Sum is twice Average on 2 ranks, a predivide factor changes nothing."""
    updates = {}
    for label, options in (("average", {}), ("predivide", {"gradient_predivide_factor": 4.0}), ("sum", {"op": hvd.Sum})):
        model = nn.Linear(64, 64, bias=False)
        nn.init.zeros_(model.weight)
        compressed_optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        compression = hvdc.Compression.dgc(compressed_optimizer, model.named_parameters(), ratio=0.05)
        wrapped = wrap(model, compressed_optimizer, compression, **options)
        generator = torch.Generator().manual_seed(hvd.rank())
        (model.weight * torch.randn(64, 64, generator=generator)).sum().backward()
        wrapped.step()
        updates[label] = model.weight.detach().clone()
    assert (updates["average"] != 0).sum() > 205
    torch.testing.assert_close(updates["predivide"], updates["average"])
    torch.testing.assert_close(updates["sum"], 2 * updates["average"])


@case(2)
def backward_passes_per_step():
    models = model_of(), model_of()
    for model, spec in zip(models, (None, DENSE)):
        optimizer = sgd(model, weight_decay=0.01)
        compression = hvdc.Compression.from_spec(spec, optimizer, model.named_parameters()) if spec else hvd.Compression.none
        wrapped = wrap(model, optimizer, compression, backward_passes_per_step=2)
        data = list(batches(11))
        for step in range(0, 11, 2):  # the last step has one pass only
            wrapped.zero_grad()
            for x, y in data[step : step + 2]:
                nn.functional.cross_entropy(model(x), y).backward()
            wrapped.step()
    assert_close(models[1], models[0])
    assert_replicas_identical(models[1])


@case(3)
def process_set():
    pair = hvd.add_process_set([0, 2])
    model, reference = model_of(), model_of()
    optimizer = sgd(model, weight_decay=0.01)
    compression = hvdc.Compression.from_spec(DENSE, optimizer, model.named_parameters(), process_set=pair)
    plain = hvd.DistributedOptimizer(
        sgd(reference, weight_decay=0.01), named_parameters=reference.named_parameters(), process_set=pair
    )
    wrapped = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression, process_set=pair
    )
    train(reference, plain, batches(10))
    train(model, wrapped, batches(10))
    assert_close(model, reference)  # on rank 1, which is outside, too: there nothing was taken over
    sparse = model_of()
    optimizer = sgd(sparse)
    compression = hvdc.Compression.dgc(optimizer, sparse.named_parameters(), process_set=pair, ratio=0.01)
    wrapped = hvd.DistributedOptimizer(
        optimizer, named_parameters=sparse.named_parameters(), compression=compression, process_set=pair
    )
    train(sparse, wrapped, batches(10))
    if hvd.rank() != 1:
        assert_replicas_identical(sparse, pair)
        assert compression.stats()["steps"] == 10
    else:
        assert compression.stats()["steps"] == 0
    hvd.remove_process_set(pair)


@case(2)
def parameters_unused_in_a_step():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
            self.out = nn.Linear(64, 10)

        def forward(self, x):
            branch = self.first if self.training else self.second
            return self.out(branch(x.flatten(1)))

    for set_to_none in (True, False):
        model = model_of(Branches)
        optimizer = sgd(model)
        compression = hvdc.Compression.dgc(optimizer, model.named_parameters(), ratio=0.01)
        wrapped = wrap(model, optimizer, compression)
        for step, (x, y) in enumerate(batches(20)):
            model.train((step + hvd.rank()) % 3 != 0)  # different branches on different ranks
            model.zero_grad(set_to_none=set_to_none)
            nn.functional.cross_entropy(model(x), y).backward()
            wrapped.step()
        assert_replicas_identical(model)


@case(2)
def sparse_embeddings_as_dense():
    class Embeddings(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = nn.Embedding(100, 32, sparse=True)
            self.right = nn.Embedding(100, 32, sparse=True)
            self.out = nn.Linear(32, 10)

        def forward(self, words):
            return self.out((self.left(words) + 2 * self.right(99 - words)).mean(1))

    def words(steps):
        generator = torch.Generator().manual_seed(hvd.rank())
        for _ in range(steps):
            yield torch.randint(0, 100, (8, 4), generator=generator), torch.randint(0, 10, (8,), generator=generator)

    reference, model = model_of(Embeddings), model_of(Embeddings)
    for net, spec in ((reference, None), (model, DENSE)):
        optimizer = sgd(net, momentum=0)
        compression = hvdc.Compression.from_spec(spec, optimizer, net.named_parameters()) if spec else hvd.Compression.none
        train(net, wrap(net, optimizer, compression, sparse_as_dense=True), words(10))
    assert_close(model, reference)

    model = model_of(Embeddings)
    optimizer = sgd(model)
    compression = hvdc.Compression.dgc(optimizer, model.named_parameters(), ratio=0.01)
    train(model, wrap(model, optimizer, compression, sparse_as_dense=True), words(10))
    assert_replicas_identical(model)
    assert compression.stats()["steps"] == 10

    model = model_of(Embeddings)  # Horovod's own sparse path: fine without momentum, an error with it
    optimizer = sgd(model, momentum=0)
    compression = hvdc.Compression.dgc(optimizer, model.named_parameters(), ratio=0.01)
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    train(model, wrapped, words(3))
    assert_replicas_identical(model)
    model = model_of(Embeddings)
    optimizer = sgd(model)
    compression = hvdc.Compression.dgc(optimizer, model.named_parameters(), ratio=0.01)
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    with raises(ValueError, "sparse_as_dense=True"):
        train(model, wrapped, words(1))


@case(2)
def other_dtypes_and_memory_formats():
    for convert, dtype in (
        (lambda m: m.half(), torch.float16),
        (lambda m: m.bfloat16(), torch.bfloat16),
        (lambda m: m.double(), torch.float64),
        (lambda m: m.to(memory_format=torch.channels_last), torch.float32),
    ):
        for spec in (DENSE, "dgc:ratio=0.02", "dgc:ratio=0.02,clip_norm=1"):
            for groups in (None, 2):
                model = convert(nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(256, 10)))
                optimizer = sgd(model, lr=0.01, weight_decay=0.01)
                compression = hvdc.Compression.from_spec(spec, optimizer, model.named_parameters())
                for p in model.parameters():  # Horovod 0.28.1 broadcasts neither bfloat16 nor channels_last
                    p.data.copy_(hvd.broadcast(p.detach().float().contiguous(), 0))
                wrapped = hvd.DistributedOptimizer(
                    optimizer, named_parameters=model.named_parameters(), compression=compression, groups=groups
                )
                for x, y in batches(5):
                    wrapped.zero_grad()
                    logits = model(x.expand(-1, 3, -1, -1).to(dtype))
                    nn.functional.cross_entropy(logits.float(), y).backward()
                    assert model[0].weight.grad.dtype == dtype
                    wrapped.step()
                assert_replicas_identical(model)


@case(2)
def manual_synchronize_and_clipping():
    models = model_of(), model_of()
    for model, spec in zip(models, (None, "dgc:ratio=1,masking=false,momentum=0")):
        optimizer = sgd(model, weight_decay=0.01)
        compression = hvdc.Compression.from_spec(spec, optimizer, model.named_parameters()) if spec else hvd.Compression.none
        wrapped = wrap(model, optimizer, compression)
        for x, y in batches(10):
            wrapped.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            wrapped.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with wrapped.skip_synchronize():
                wrapped.step()
    assert_close(models[1], models[0])

    model = model_of()  # weight decay once a step, whether the user synchronizes or step() does
    reference = model_of()
    for net, manual in ((reference, False), (model, True)):
        optimizer = sgd(net, weight_decay=0.1)
        compression = hvdc.Compression.dgc(optimizer, net.named_parameters(), ratio=0.01)
        wrapped = wrap(net, optimizer, compression)
        for x, y in batches(10):
            wrapped.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            if manual:
                wrapped.synchronize()
                with wrapped.skip_synchronize():
                    wrapped.step()
            else:
                wrapped.step()
    assert torch.equal(flat(model), flat(reference))


# -- state ---------------------------------------------------------------------------------------------------------------


@case(2)
def resume_is_bit_for_bit():
    for spec in ("dgc:ratio=0.01,values=fp16", "dgc:ratio=0.01,warmup_steps=12", "dgc:ratio=0.01,momentum=0"):
        def start(seed):
            model = model_of(seed=seed)
            optimizer = sgd(model, nesterov=True, weight_decay=0.01)
            compression = hvdc.Compression.from_spec(spec, optimizer, model.named_parameters())
            return model, compression, wrap(model, optimizer, compression)

        model, compression, optimizer = start(seed=0)
        train(model, optimizer, batches(10))
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, f"rank{hvd.rank()}.pt")
            torch.save([model.state_dict(), optimizer.state_dict(), compression.state_dict()], path)
            train(model, optimizer, batches(10, seed=1))
            again, its_compression, its_optimizer = start(seed=7)
            loaded = torch.load(path, weights_only=True)
        again.load_state_dict(loaded[0])
        its_optimizer.load_state_dict(loaded[1])
        its_compression.load_state_dict(loaded[2])
        train(again, its_optimizer, batches(10, seed=1))
        assert torch.equal(flat(again), flat(model)), spec
        mine, its = compression.state_dict(), its_compression.state_dict()
        assert mine["step"] == its["step"] == 20
        for name, arrays in mine["tensors"].items():
            for key, array in arrays.items():
                assert torch.equal(array, its["tensors"][name][key]), (name, key)

        foreign = hvd.allgather_object(loaded[2])[1 - hvd.rank()]
        with raises(ValueError, "rank"):
            its_compression.load_state_dict(foreign)


@case(2)
def not_finite_gradients_lose_nothing():
    for spec in ("dgc:ratio=0.01", "dgc:ratio=0.01,momentum=0,values=fp16", "dgc:ratio=1,masking=false"):
        for poison in (float("nan"), float("inf")):
            for layer in ("shared", "norm"):  # a compressed tensor, and one that goes dense
                model = model_of()
                optimizer = sgd(model)
                compression = hvdc.Compression.from_spec(spec, optimizer, model.named_parameters())
                wrapped = wrap(model, optimizer, compression)
                train(model, wrapped, batches(3))
                x, y = next(batches(1))
                before = compression.state_dict()["tensors"]
                wrapped.zero_grad()
                handle = getattr(model, layer).weight.register_hook(
                    lambda g: torch.full_like(g, poison) if hvd.rank() == 1 else g
                )
                local = {}
                watch = [
                    p.register_hook(lambda g, n=n: local.__setitem__(n, g.clone()))
                    for n, p in model.named_parameters() if p.requires_grad
                ]
                nn.functional.cross_entropy(model(x), y).backward()
                wrapped.synchronize()
                bad = not torch.isfinite(getattr(model, layer).weight.grad).all()
                assert bad, "this rank does not see the other's poison"
                handle.remove()
                [w.remove() for w in watch]
                # A GradScaler skips the step here.
                after = compression.state_dict()["tensors"]
                for name, arrays in after.items():
                    for key, array in arrays.items():
                        assert torch.isfinite(array).all(), (spec, name, key)
                    if "v" in arrays and "momentum=0" in spec:  # v holds all it had, and the finite part of this gradient
                        g = torch.nan_to_num(local[name].flatten(), 0, 0, 0)
                        torch.testing.assert_close(arrays["v"], before[name]["v"] + g, rtol=1e-5, atol=1e-7)
                wrapped.zero_grad()
                train(model, wrapped, batches(5, seed=2))
                assert_replicas_identical(model)
                assert compression.stats()["steps_undone"] == 1


@case(2)
def dynamic_loss_scaling():
    """A GradScaler that overflows on one rank skips the step on both, and training goes on."""
    model = model_of()
    optimizer = sgd(model, momentum=0)
    compression = hvdc.Compression.dgc(optimizer, model.named_parameters(), ratio=0.01)
    wrapped = wrap(model, optimizer, compression)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step, (x, y) in enumerate(batches(8)):
        before = flat(model).clone()
        wrapped.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if step == 4 and hvd.rank() == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        wrapped.synchronize()
        with wrapped.skip_synchronize():
            scaler.step(wrapped)
        scaler.update()
        assert torch.equal(flat(model), before) == (step == 4)
    assert scaler.get_scale() == 1.0
    assert_replicas_identical(model)


# -- errors: on every rank, in words, without a hang ------------------------------------------------------------------------


@case(2, 3)
def mismatched_ranks_are_named():
    last = hvd.size() - 1
    ours = "dgc:ratio=0.01"
    for theirs, words in (
        ("dgc:ratio=0.02", ("options.ratio", f"rank {last}", "0.02", "0.01")),
        ("dgc:ratio=0.01,min_numel=0", ("options.min_numel",)),
        ("none", ("options.id", "none", "dgc")),
    ):
        model = model_of()
        with raises(MismatchError, *words):
            compressed(model, sgd(model), 1, theirs if hvd.rank() == last else ours)
    model = model_of()
    if hvd.rank() == last:
        model.out = nn.Linear(64, 11)
    with raises(MismatchError, "tensors.out.weight.shape", f"rank {last}", "[11, 64]"):
        hvdc.Compression.from_spec(ours, sgd(model), model.named_parameters())
    model, installed = model_of(), binding.__version__
    binding.__version__ = "0.0.9" if hvd.rank() == last else installed
    with raises(MismatchError, "version of horovod-compress", "0.0.9", installed):
        hvdc.Compression.from_spec(ours, sgd(model), model.named_parameters())
    binding.__version__ = installed
    model = model_of()
    with raises(MismatchError, "momentum", f"rank {last}"):
        compressed(model, sgd(model, momentum=0.8 if hvd.rank() == last else 0.9), 1, ours)


@case()
def ranks_on_different_kernels():
    """Asked for by name, with the reference on rank 1."""
    assert kernels.backend == ("reference" if hvd.rank() == 1 else "native")
    for spec in ("dgc:ratio=0.05,clip_norm=1,min_numel=0", "terngrad:min_numel=0", "efsignsgd:min_numel=0"):
        model = model_of()
        compressed(model, sgd(model), 10, spec)
        assert_replicas_identical(model)
    model = model_of()
    with raises(MismatchError, "rank 1 differs from rank 0 in kernels", "powersgd", "reference on rank 1, native on rank 0"):
        compressed(model, sgd(model), 1, "powersgd")


@case(2)
def mistakes_get_clear_errors():
    model = model_of()
    with raises(ValueError, "dampening"):
        hvdc.Compression.dgc(sgd(model, dampening=0.1), model.named_parameters())
    with raises(ValueError, "does not name"):
        hvdc.Compression.dgc(sgd(model), model.conv.named_parameters())
    with raises(ValueError, "unique", "x"):
        hvdc.Compression.dgc(sgd(model), [("x", p) for p in model.parameters()])
    with raises(ValueError, "pairs"):
        hvdc.Compression.dgc(sgd(model), model.parameters())
    with raises(ValueError, "no option 'ration'", "ratio"):
        hvdc.Compression.dgc(sgd(model), model.named_parameters(), ration=1)
    with raises(ValueError, "say momentum="):
        hvdc.Compression.dgc(None, model.named_parameters())
    with raises(ValueError, "not registered"):
        hvdc.Compression.dgc(sgd(model), model.named_parameters(), process_set=hvd.ProcessSet([0]))
    optimizer = sgd(model)
    compression = hvdc.Compression.dgc(optimizer, model.named_parameters())
    model.extra = nn.Linear(10, 10)
    optimizer.add_param_group({"params": model.extra.parameters()})
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    assert wrapped.param_groups[-1]["params"] == list(model.extra.parameters())
    x, y = next(batches(1))
    with raises(ValueError, "add_param_group"):
        nn.functional.cross_entropy(model.extra(model(x)), y).backward()
    hvd.barrier()


@case(2)
def adasum_is_refused():
    model = model_of()
    optimizer = sgd(model)
    compression = hvdc.Compression.dgc(optimizer, model.named_parameters())
    wrapped = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Adasum
    )
    with raises(ValueError, "op=Adasum is not supported"):
        train(model, wrapped, batches(1))


@case(2)
def momentum_is_taken_over_and_nothing_is_patched():
    import horovod.torch.optimizer as theirs

    before = {name: value for name, value in vars(theirs).items() if callable(value)}
    for spec in ("dgc", "dgc:momentum=0", "none"):
        model = model_of()
        made = sgd(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hvdc.Compression.from_spec(spec, made, model.named_parameters())
        assert made.param_groups[0]["momentum"] == 0.9, spec
    model = model_of()
    adam = torch.optim.Adam(model.parameters())
    assert hvdc.Compression.dgc(adam, model.named_parameters()).config["momentum"] == 0
    assert {name: value for name, value in vars(theirs).items() if callable(value)} == before


@case(1)
def one_rank_trains_as_without_compression():
    reference, model = model_of(), model_of()
    train(reference, wrap(reference, sgd(reference, weight_decay=0.01), hvd.Compression.none), batches(5))
    compression = compressed(model, sgd(model, weight_decay=0.01), 5)
    assert torch.equal(flat(model), flat(reference))
    assert compression.stats()["steps"] == 0


# -- what the variance compressor calls a sample ----------------------------------------------------------------------------


def sums_of_squares(model, passes, per_sample):
    """{name: Σ_z g_z²} of some backward passes of `train`, z being their samples or the passes themselves."""
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    sums = {name: torch.zeros(param.shape) for name, param in named.items()}
    for x, y in passes:
        for part in zip(x.split(1), y.split(1)) if per_sample else [(x, y)]:
            loss = nn.functional.cross_entropy(model(part[0]), part[1]) * len(part[0]) / len(x)
            for name, gradient in zip(named, torch.autograd.grad(loss, list(named.values()))):
                sums[name] += (gradient.to_dense() if gradient.is_sparse else gradient) ** 2
    return sums


def assert_variances_are(compression, sums):
    for name, arrays in compression.state_dict()["tensors"].items():
        atol = 1e-4 * sums[name].max().item()
        torch.testing.assert_close(arrays["v"], sums[name].flatten(), rtol=1e-4, atol=atol, msg=lambda m: f"{name}: {m}")


NEVER_SENT = "variance:alpha=1e30,zeta=1,min_numel=0"  # v keeps the sum of all squares


@case(2)
def variance_of_samples_and_of_backward_passes():
    for moments in ("per_sample", "microbatch"):
        model, passes = model_of(), list(batches(3))
        model.norm = nn.GroupNorm(2, 8)
        optimizer = sgd(model)
        compression = hvdc.Compression.from_spec(f"{NEVER_SENT},moments={moments}", optimizer, model.named_parameters())
        wrapped = wrap(model, optimizer, compression, backward_passes_per_step=3)
        expected = sums_of_squares(model, passes, moments == "per_sample")
        for x, y in passes:
            nn.functional.cross_entropy(model(x), y).backward()
        wrapped.step()
        assert_variances_are(compression, expected)

    model = nn.Sequential(nn.Embedding(16, 8, sparse=True), nn.Flatten(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compression = hvdc.Compression.from_spec(f"{NEVER_SENT},moments=microbatch", optimizer, model.named_parameters())
    wrapped = wrap(model, optimizer, compression, backward_passes_per_step=2, sparse_as_dense=True)
    passes = [(torch.randint(0, 16, (8, 4)), torch.randint(0, 10, (8,))) for _ in range(2)]
    expected = sums_of_squares(model, passes, per_sample=False)
    for x, y in passes:
        nn.functional.cross_entropy(model(x), y).backward()
    wrapped.step()
    assert_variances_are(compression, expected)


@case(2)
def training_with_moments():
    trained = {}
    for moments in ("minibatch", "microbatch", "per_sample"):
        model = trained[moments] = model_of()
        compression = compressed(model, sgd(model), 10, f"variance:min_numel=0,exclude=norm.*,moments={moments}")
        assert_replicas_identical(model)
        assert compression.stats()["elements_sent"] > 0
    assert torch.equal(flat(trained["minibatch"]), flat(trained["microbatch"]))  # a step is one pass here
    assert not torch.equal(flat(trained["minibatch"]), flat(trained["per_sample"]))
    model = model_of()
    with raises(ValueError, "norm.weight", "BatchNorm2d", "exclude="):
        hvdc.Compression.variance(sgd(model), model.named_parameters(), min_numel=0, moments="per_sample")


class Sequences(nn.Module):
    """An embedding, a recurrent layer and attention, over rows of four words."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True)
        self.attention = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 10)

    def forward(self, x):
        return self.out(self.attention(self.lstm(self.embedding(x))[0]).mean(1))


def words(steps):
    generator = torch.Generator().manual_seed(hvd.rank())
    x = torch.randint(0, 16, (steps, 8, 4), generator=generator)
    return list(zip(x, x.sum(2) % 10))


@case(2)
def samples_of_sequences():
    model, passes = model_of(Sequences), words(2)
    optimizer = sgd(model)
    compression = hvdc.Compression.from_spec(f"{NEVER_SENT},moments=per_sample", optimizer, model.named_parameters())
    wrapped = wrap(model, optimizer, compression, backward_passes_per_step=2)
    expected = sums_of_squares(model, passes, per_sample=True)
    for x, y in passes:
        nn.functional.cross_entropy(model(x), y).backward()
    wrapped.step()
    assert_variances_are(compression, expected)

    model = model_of(Sequences)
    optimizer = sgd(model)
    compression = hvdc.Compression.from_spec("variance:min_numel=0,moments=per_sample", optimizer, model.named_parameters())
    train(model, wrap(model, optimizer, compression), words(20))
    assert_replicas_identical(model)
    assert 0 < compression.stats()["elements_sent"] < 20 * sum(param.numel() for param in model.parameters())


@case(1)
def one_rank_is_not_hooked():
    model = model_of()
    compression = compressed(model, sgd(model), 1, "variance:min_numel=0,moments=per_sample")
    assert not nn.modules.module._global_forward_hooks and compression.stats()["steps"] == 0


def assert_join_is_refused(spec, words):
    model = model_of()
    optimizer = sgd(model)
    wrapped = wrap(model, optimizer, hvdc.Compression.from_spec(spec, optimizer, model.named_parameters()))
    train(model, wrapped, batches(2))
    if hvd.rank() == 0:
        with raises(RuntimeError, words):
            train(model, wrapped, batches(1))
    hvd.join()


@case()
def join_is_refused():
    """Asked for by name, in a job of its own: the ranks do not leave it together."""
    assert_join_is_refused("dgc", "hvd.join() works with Horovod's own reductions only")


@case()
def join_is_refused_with_sums():
    """The same for payloads that an allreduce adds up: without the ranks that have joined their sums would be too small."""
    assert_join_is_refused("maxnorm", "1 of 2 ranks have called hvd.join()")


# -- every algorithm ----------------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """Parameters whose gradients are what they are told to be."""

    def __init__(self):
        super().__init__()
        shapes = {"matrix": (40, 50), "kernel": (8, 6, 3, 3), "wide": (3, 900), "bias": (40,)}
        self.held = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()})

    def forward(self, gradients):
        return sum((self.held[name] * gradient).sum() for name, gradient in gradients.items())


def told(rank, step):
    """The gradients of a step on a rank, known to all ranks."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {n: torch.randn(p.shape, generator=generator) for n, p in Holder().held.items()}


@case(2, 3)
def every_algorithm_gives_what_simulate_gives():
    steps, size = 4, hvd.size()
    named = [[{f"held.{n}": g.numpy() for n, g in told(rank, step).items()} for rank in range(size)] for step in range(steps)]
    for op, groups in ((hvd.Average, None), (hvd.Sum, 2)):
        for id in available():
            expected = simulate(id, named)
            model = Holder()
            optimizer = torch.optim.Adam(model.parameters())  # takes nothing over: momentum would be DGC's
            compression = hvdc.Compression.from_spec(id if id != "dgc" else "dgc:momentum=0.9", optimizer, model.named_parameters())
            wrapped = wrap(model, optimizer, compression, op=op, groups=groups)
            for step in range(steps):
                model.zero_grad()
                model(told(hvd.rank(), step)).backward()
                wrapped.synchronize()
                for name, param in model.named_parameters():
                    mean = torch.from_numpy(expected.mean[step][name]) * (1 if op == hvd.Average else size)
                    error = (param.grad - mean).abs().max().item()
                    tolerance = 2e-3 if id == "fp16" else 1e-5
                    assert error <= tolerance * size * mean.abs().max().item() + 1e-30, f"{id}: {name} differs by {error} in step {step}"
                with wrapped.skip_synchronize():
                    wrapped.step()
            stats = compression.stats()
            sent = sum(sent[hvd.rank()] for sent in expected.bytes_sent)
            assert stats["bytes_sent"] == sent, f"{id}: {stats['bytes_sent']} bytes sent, {sent} in simulate"
            assert_replicas_identical(model)


def reduced(spec, steps=4, process_set=hvd.global_process_set):
    """(the gradients of every step after the exchange, the compression) of a spec; hooks fire in another order on every rank."""
    model = Holder()
    optimizer = torch.optim.Adam(model.parameters())
    compression = hvdc.Compression.from_spec(spec, optimizer, model.named_parameters(), process_set)
    wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression, process_set=process_set)
    results = []
    for step in range(steps):
        named = list(told(hvd.rank(), step).items())
        model.zero_grad()
        model(dict(named[hvd.rank() :] + named[: hvd.rank()])).backward()
        wrapped.synchronize()
        results.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        with wrapped.skip_synchronize():
            wrapped.step()
    return torch.stack(results), compression


@case(2, 3)
def residuals_follow_each_groups_learning_rate():
    """efsignsgd under a scheduler, with a group of its own rate, through a checkpoint: as `simulate`, which is as published."""
    groups, rates = {"matrix": 1.0, "kernel": 0.3}, [0.1, 0.2, 0.2, 0.02, 0.5, 0.05]

    def start():
        params = {name: nn.Parameter(torch.zeros(alike.SHAPES[name])) for name in groups}
        optimizer = torch.optim.SGD([{"params": [params[name]], "lr": times} for name, times in groups.items()])
        compression = hvdc.Compression.from_spec("efsignsgd:min_numel=0", optimizer, list(params.items()))
        wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=list(params.items()), compression=compression)
        return params, compression, wrapped, torch.optim.lr_scheduler.LambdaLR(wrapped, lambda step: rates[min(step, 5)])

    def take(params, wrapped, scheduler, steps):
        for step in steps:
            given = alike.gradients(hvd.rank(), step)
            wrapped.zero_grad()
            sum((param * torch.from_numpy(given[name])).sum() for name, param in params.items()).backward()
            wrapped.step()
            scheduler.step()

    params, compression, wrapped, scheduler = start()
    take(params, wrapped, scheduler, range(3))
    saved = [copy.deepcopy(part.state_dict()) for part in (compression, wrapped, scheduler)]
    values = {name: param.detach().clone() for name, param in params.items()}
    params, compression, wrapped, scheduler = start()
    for part, state in zip((compression, wrapped, scheduler), saved):
        part.load_state_dict(state)
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(values[name])
    take(params, wrapped, scheduler, range(3, 6))
    gradients = [[alike.gradients(rank, step) for rank in range(hvd.size())] for step in range(6)]
    for name, times in groups.items():
        own = [[{name: named[name]} for named in ranks] for ranks in gradients]
        run = simulate("efsignsgd:min_numel=0", own, lr=[rate * times for rate in rates])
        expected = -sum(rate * times * mean[name].astype(np.float64) for rate, mean in zip(rates, run.mean))
        np.testing.assert_allclose(params[name].detach().numpy(), expected, rtol=1e-4, atol=1e-5)
        plain = simulate("efsignsgd:min_numel=0", own)
        other = -sum(rate * times * mean[name].astype(np.float64) for rate, mean in zip(rates, plain.mean))
        assert np.abs(other - expected).max() > 0.01 * np.abs(expected).max(), "the rates would not show"
        residual = compression.state_dict()["tensors"][name]["residual"].numpy()
        np.testing.assert_allclose(residual, run.state[hvd.rank()][name]["residual"], rtol=1e-4, atol=1e-4)
    with raises(ValueError, "follow_lr needs the optimizer"):
        hvdc.Compression.from_spec("efsignsgd:follow_lr=true", None, list(params.items()))


@case(2, 3)
def coordinates_of_the_whole_model():
    """K of all tensors together, also where a tensor has none of them: as `simulate`."""

    def named(rank, step):
        return {f"held.{name}": gradient.numpy() for name, gradient in told(rank, step).items()}

    for spec in ("globalrandk:k=40", "maxnorm:k=40", "multiscale:k=40,unbiased=true"):
        spec += ",of=model,min_numel=0"
        found, compression = reduced(spec, steps=3)
        run = simulate(spec, [[named(rank, step) for rank in range(hvd.size())] for step in range(3)])
        expected = np.array([np.concatenate([mean[name].reshape(-1) for name in named(0, 0)]) for mean in run.mean])
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)
        assert compression.stats()["bytes_sent"] == sum(sent[hvd.rank()] for sent in run.bytes_sent), spec


@case(2, 3)
def mpi_gives_what_horovod_gives():
    moved = [id for id, about in available().items() if "transport" in about["options"]]
    for id in moved if hvd.size() == 2 else ("dgc", "multiscale", "powersgd"):
        (expected, other), (found, compression) = (
            reduced({"id": id, "min_numel": 0, "transport": transport}, steps=2) for transport in ("horovod", "mpi")
        )
        # Floats that are summed in another order differ in the last bits.
        tolerance = 1e-5 if id in ("globalrandk", "powersgd") and hvd.size() > 2 else 0
        assert (found - expected).abs().max() <= tolerance * expected.abs().max(), f"{id} differs by {(found - expected).abs().max()}"
        assert compression.stats()["bytes_sent"] == other.stats()["bytes_sent"], id
        assert (found == hvd.broadcast(found, 0, name=f"of the first rank {id}")).all(), f"{id}: replicas differ"


@case(3)
def mpi_in_a_process_set():
    members = hvd.add_process_set([0, 2])
    if members.included():
        for spec in ("dgc:min_numel=0,momentum=0.9", "maxnorm:min_numel=0"):
            (expected, _), (found, _) = (reduced(f"{spec},transport={t}", process_set=members) for t in ("horovod", "mpi"))
            assert (found == expected).all(), spec
    hvd.remove_process_set(members)


@case(2)
def mpi_transport_with_two_compressions_and_a_step_that_is_not_finite():
    models = [model_of(seed=seed) for seed in (0, 1)]
    optimizers = [sgd(model) for model in models]
    compressions = [
        hvdc.Compression.from_spec(spec, optimizer, model.named_parameters())
        for spec, optimizer, model in zip(("dgc:ratio=0.05,transport=mpi", "maxnorm:transport=mpi"), optimizers, models)
    ]
    wrapped = [wrap(*each) for each in zip(models, optimizers, compressions)]
    for round in range(3):
        for model, optimizer, compression in zip(models, wrapped, compressions):
            train(model, optimizer, batches(4))
            assert_replicas_identical(model)
            before = flat(model)
            x, y = next(batches(1))
            model.zero_grad()
            (nn.functional.cross_entropy(model(x), y) * (float("nan") if hvd.rank() == 1 else 1)).backward()
            optimizer.synchronize()
            assert any(torch.isnan(p.grad).any() for p in model.parameters() if p.requires_grad)
            assert compression.stats()["steps_undone"] == round + 1 and (flat(model) == before).all()


@case(2)
def mpi_ranks_that_exchange_different_things_get_an_error():
    transport = MPITransport(hvd, hvd.global_process_set)
    started = [transport.allgather(f"a{i}", np.zeros(3, np.uint8)) for i in range(1 + hvd.rank())]
    with raises(MismatchError, "arrays in this step"):
        started[0]()
    assert transport.allgather("again", np.full(2, hvd.rank(), np.uint8))().tolist() == [0, 0, 1, 1]  # the ranks are in step


@case()
def mpi_needs_mpi():
    """Under Gloo, by name."""
    model = model_of()
    with raises(ValueError, "transport=mpi needs a Horovod that runs on MPI"):
        compressed(model, sgd(model), 1, "dgc:transport=mpi")


@case()
def on_two_hosts():
    """By name: the ranks are on two hosts, and both roads work there, on both transports."""
    names = hvd.allgather_object(socket.gethostname(), name="hosts")
    assert sorted(set(names)) == ["a", "b"] and names.count("a") == names.count("b"), names
    for spec in ("dgc:min_numel=0,momentum=0.9", "maxnorm:min_numel=0"):
        expected, _ = reduced(spec)
        if hvd.mpi_enabled():
            found, _ = reduced(f"{spec},transport=mpi")
            assert (found == expected).all(), spec
        assert (expected == hvd.broadcast(expected, 0, name=f"of the first rank {spec}")).all(), spec


@case()
def trains_until_cut_off():
    """By name: a host goes away meanwhile."""
    model = model_of()
    optimizer = sgd(model)
    transport = "mpi" if hvd.mpi_enabled() else "horovod"
    wrapped = wrap(model, optimizer, hvdc.Compression.dgc(optimizer, model.named_parameters(), transport=transport))
    for step in range(10**6):
        train(model, wrapped, batches(1))
        if step == 10:
            pathlib.Path(f"{sys.argv[2]}.{hvd.rank()}.trains").touch()


@case(2)
def every_algorithm_trains():
    """Hooks in any order, accumulation, half precision, a scaler that skips a step: finite, and the same on all ranks."""
    for id in available():
        model = model_of()
        model.shared.half()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001 if id == "signsgd" else 0.01, momentum=0.9, weight_decay=1e-4)
        compression = hvdc.Compression.from_spec(id, optimizer, model.named_parameters())
        wrapped = wrap(model, optimizer, compression, backward_passes_per_step=2)
        for step, (x, y) in enumerate(batches(12)):
            x = torch.relu(model.norm(model.conv(x))).mean(1).flatten(1)
            hidden = torch.relu(model.shared(torch.relu(model.shared(x.half())))).float()
            loss = nn.functional.cross_entropy(model.out(torch.relu(model.frozen(hidden))), y)
            (loss * (float("nan") if step == 5 and hvd.rank() == 1 else 1)).backward()
            if step % 2:
                wrapped.synchronize()
                finite = all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)
                assert finite == (step != 5), f"{id}: finite {finite} in step {step}"
                with wrapped.skip_synchronize():
                    if finite:
                        wrapped.step()
                model.zero_grad()
        assert_replicas_identical(model)
        assert compression.stats()["steps_undone"] == 1, f"{id}: {compression.stats()['steps_undone']} steps undone"


@case()
def told_gradients_to_a_file():
    """For test_tensorflow.py, which compares them."""
    results, sent = {}, {}
    for spec in alike.SPECS:
        params = {name: nn.Parameter(torch.zeros(shape)) for name, shape in alike.SHAPES.items()}
        optimizer = torch.optim.Adam(params.values())
        compression = hvdc.Compression.from_spec(spec, optimizer, list(params.items()))
        wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=list(params.items()), compression=compression)
        results[spec] = []
        for step in range(alike.STEPS):
            wrapped.zero_grad()
            given = alike.gradients(hvd.rank(), step)
            sum((params[name] * torch.from_numpy(gradient)).sum() for name, gradient in given.items()).backward()
            wrapped.synchronize()
            results[spec].append({name: param.grad.numpy().copy() for name, param in params.items()})
        sent[spec] = compression.stats()["bytes_sent"]
    alike.write(f"{sys.argv[2]}.{hvd.rank()}.npz", results, sent)


@case()
def a_compressor_of_another_package():
    """For test_other_packages.py, which installs one."""
    params = {name: nn.Parameter(torch.zeros(shape)) for name, shape in alike.SHAPES.items()}
    optimizer = torch.optim.Adam(params.values())
    compression = hvdc.Compression.cyclic(optimizer, list(params.items()), every=4)
    assert compression.config["id"] == "cyclic"
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=list(params.items()), compression=compression)
    for step, means in enumerate(alike.cyclic_means(4, hvd.size())):
        wrapped.zero_grad()
        given = alike.gradients(hvd.rank(), step)
        sum((params[name] * torch.from_numpy(gradient)).sum() for name, gradient in given.items()).backward()
        wrapped.synchronize()
        for name, mean in means.items():
            np.testing.assert_allclose(params[name].grad.numpy(), mean, atol=1e-6)
    assert compression.stats()["ratio"] > 2
