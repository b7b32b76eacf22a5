"""The optimizer's own options, state and checkpoints work as without compression."""

import copy

import horovod.torch as hvd
import torch
from checks import raises, registry, said_by, scripts_of_pages
from torch import nn

import horovod_compress.torch as hvdc
from horovod_compress import MismatchError

from .training import (
    DENSE,
    assert_close,
    assert_replicas_identical,
    batches,
    compressed,
    flat,
    model_of,
    sgd,
    train,
    wrap,
)

CASES, case = registry()


def pair(make, **wrap_options):
    """(model, wrapped optimizer) without compression and with it, in the dense limit, both wrapped
    as the README does."""
    made = []
    for spec in (None, DENSE):
        model = model_of()
        optimizer = make(model)
        compression = (
            hvdc.Compression.from_spec(spec, optimizer, named_parameters=model.named_parameters())
            if spec
            else hvd.Compression.none
        )
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=compression,
            **wrap_options,
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
                assert (
                    optimizer.param_groups[0]["momentum"] > 0.5
                    and optimizer.param_groups[0]["weight_decay"] == 0.01
                )
                scheduler.step()
        assert_close(made[1][0], made[0][0])


@case(2)
def options_turned_off_and_on_while_training():
    made = pair(lambda m: sgd(m, weight_decay=0.1))
    changes = {
        3: {"weight_decay": 0},
        6: {"momentum": 0},
        9: {"momentum": 0.5},
        12: {"weight_decay": 0.05},
    }
    for model, optimizer, _ in made:
        for step, batch in enumerate(batches(15)):
            optimizer.param_groups[0].update(changes.get(step, {}))
            train(model, optimizer, [batch])
    assert_close(made[1][0], made[0][0])


@case(2)
def broadcast_optimizer_state_works_as_without_compression():
    """Rank 0 has loaded a checkpoint of a plain run; the broadcast brings all of it, momentum too,
    to the others."""
    source = model_of()
    trained = hvd.DistributedOptimizer(
        sgd(source, weight_decay=0.01), named_parameters=source.named_parameters()
    )
    train(source, trained, batches(5))
    checkpoint = source.state_dict(), trained.state_dict()
    checkpoint[1]["param_groups"][0]["lr"] = 0.02
    made = pair(lambda m: sgd(m, weight_decay=0.01))
    for model, optimizer, _ in made:
        if hvd.rank() == 0:
            model.load_state_dict(checkpoint[0])
            optimizer.load_state_dict(copy.deepcopy(checkpoint[1]))
        # Steps on rank 1, so parameters come afterwards.
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
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
        compression = hvdc.Compression.dgc(
            optimizer, named_parameters=model.named_parameters(), ratio=0.02
        )
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression
        )
        return (
            model,
            optimizer,
            compression,
            torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40),
        )

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
    for options, words in (
        ({"lr": 0.1}, "lr"),
        ({"weight_decay": 0.1}, "weight_decay"),
        ({"maximize": True}, "maximize"),
    ):
        model = model_of()
        optimizer = sgd(model, **(options if hvd.rank() == 1 else {}))
        compression = hvdc.Compression.dgc(
            optimizer, named_parameters=model.named_parameters(), ratio=0.01
        )
        wrapped = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression
        )
        with raises(MismatchError, "parameter group 0." + words, "rank 1"):
            train(model, wrapped, batches(1))


@case(2)
def an_optimizer_can_be_bound_again():
    reference, model = model_of(), model_of()
    train(
        reference, wrap(reference, sgd(reference, nesterov=True), hvd.Compression.none), batches(5)
    )
    optimizer = sgd(model, nesterov=True)
    for spec in ("dgc:ratio=0.5", "dgc:nesterov=true,momentum=0.9", DENSE):
        compression = hvdc.Compression.from_spec(
            spec, optimizer, named_parameters=model.named_parameters()
        )
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
        compression = hvdc.Compression.dgc(
            optimizer, named_parameters=model.named_parameters(), ratio=0.01
        )
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
        hvdc.Compression.dgc(
            sgd(model), named_parameters=model.named_parameters(), process_set=members
        )
    model = model_of()
    compressed(model, sgd(model), 3)
    assert_replicas_identical(model)
    hvd.remove_process_set(members)


@case(2)
def half_precision_results_that_overflow_are_given_back():
    model = nn.Linear(64, 64, bias=False).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-20)
    compression = hvdc.Compression.dgc(
        optimizer, named_parameters=model.named_parameters(), ratio=0.01
    )
    wrapped = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    used, steps = torch.zeros(64, 64, dtype=torch.float64), 40
    for _ in range(steps):
        wrapped.zero_grad()
        (model.weight * torch.full((64, 64), 30000.0, dtype=torch.float16)).sum().backward()
        wrapped.synchronize()
        # What a GradScaler would let through.
        if torch.isfinite(model.weight.grad).all():
            used += model.weight.grad.double()
    kept = hvd.allreduce(
        compression.state_dict()["tensors"]["weight"]["v"].double().view(64, 64), op=hvd.Average
    )
    assert compression.stats()["steps_undone"] > 0
    torch.testing.assert_close(
        used + kept, torch.full((64, 64), 30000.0 * steps, dtype=torch.float64), rtol=1e-3, atol=0
    )


@case(2)
def gradients_that_are_views_of_one_tensor():
    """As a forward pass on torch.cat of all parameters makes them."""
    models = []
    for spec in (None, DENSE, "topk:ratio=0.05"):
        model = model_of()
        optimizer = sgd(model)
        wrapped = wrap(
            model,
            optimizer,
            hvdc.Compression.from_spec(spec, optimizer, named_parameters=model.named_parameters())
            if spec
            else hvd.Compression.none,
        )
        for x, y in batches(5):
            wrapped.zero_grad()
            every = torch.cat([p.flatten() for p in model.parameters()])
            parts = every.split([p.numel() for p in model.parameters()])
            named = {
                name: part.view_as(p) for (name, p), part in zip(model.named_parameters(), parts)
            }
            nn.functional.cross_entropy(
                torch.func.functional_call(model, named, (x,)), y
            ).backward()
            wrapped.step()
        models.append(model)
    assert_close(models[1], models[0])
    assert_replicas_identical(models[2])


@case(2)
def the_readmes_script_runs_as_pasted():
    for page, script in scripts_of_pages("hvd.init()").items():
        said = said_by(script, page, hvd, "init")
        assert ("times fewer bytes" in said) == (hvd.rank() == 0), said
