"""The same results however gradients come: in several passes, in parts of one, from modules that
some replicas do not reach."""

import torch
import torch.distributed as dist
from checks import raises, registry
from ddp_cases.told import Holder, told
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from horovod_compress import fsdp

from .training import (
    DENSE,
    REPLICAS,
    adamw,
    assert_close,
    assert_replicas_identical,
    batches,
    cut,
    loss_of,
    mesh_of,
    model_of,
    modules_of,
    sgd,
    sharded,
    train,
    trained,
)

CASES, case = registry()
SPARSE = "topk:ratio=0.1,min_numel=0"


def passes_with(announce, spec, steps=3, passes=3, **options):
    """The model and its compression. announce(model, last): says whether a pass is the last."""
    model, optimizer, compression = sharded(spec, **options)
    for i, x in enumerate(batches(steps * passes)):
        if i % passes == 0:
            optimizer.zero_grad()
        last = (i + 1) % passes == 0
        announce(model, last)
        loss_of(model, x).backward()
        if last:
            optimizer.step()
    assert_replicas_identical(model)
    return model, compression


def by_sync(model, last):
    model.set_requires_gradient_sync(last)


def by_all_reduce(model, last):
    model.set_requires_all_reduce(last)


def by_last(model, last):
    model.set_is_last_backward(last)


def unannounced(model, last):
    pass


@case(4)
def several_passes_are_one_step():
    plain, _ = passes_with(by_sync, None)
    for announce in (by_sync, by_all_reduce, by_last):
        for spec in ("none", DENSE):
            model, compression = passes_with(announce, spec)
            assert_close(model, plain)
            assert compression.stats()["steps"] == 3
    model, compression = passes_with(unannounced, DENSE, backward_passes_per_step=3)
    assert_close(model, plain)
    assert compression.stats()["steps"] == 3
    # Each is exchanged, which is right where nothing has a momentum.
    for spec in ("none", "topk:ratio=1,min_numel=0"):
        model, compression = passes_with(unannounced, spec)
        assert_close(model, plain)
        assert compression.stats()["steps"] == 9
    for options in (
        {"spec": DENSE},
        {"spec": "none", "discardable": True},
        {"spec": "none", "discardable": True, "bound": False},
    ):
        with raises(RuntimeError, "backward_passes_per_step"):
            passes_with(unannounced, **options)


@case(4)
def passes_that_are_given_up_stay_forgotten():
    """By zero_grad(), of results that are in gradients still, and of those that add up to them."""
    for to_none in (True, False):
        plain, its, _ = sharded(None, model=model_of().double())
        wide = model_of().double()
        model, optimizer, _ = sharded("none", model=wide, backward_passes_per_step=2)
        for each, made in ((plain, its), (model, optimizer)):
            for i, x in enumerate(batches(7)):
                loss_of(each, x).backward()
                if i == 2:
                    made.zero_grad(set_to_none=to_none)
                elif i % 2 == (i < 2):
                    made.step()
        assert_close(model, plain, 1e-12)


@case(4)
def passes_whose_gradients_are_zero_on_one_rank_count():
    """As those of a batch that only fills up."""
    plain, its, _ = sharded(None)
    model, optimizer, compression = sharded("none", backward_passes_per_step=2)
    replica = mesh_of(REPLICAS)["replicate"].get_local_rank()
    for each, made in ((plain, its), (model, optimizer)):
        for i, x in enumerate(batches(6)):
            if i % 2 == 0:
                made.zero_grad()
            filling = i % 2 == 0 and replica == 1
            (loss_of(each, x) * (0.0 if filling else 1.0)).backward()
            if i % 2:
                made.step()
    assert_close(model, plain, 1e-5)
    assert compression.stats()["steps"] == 3


@case(4)
def gradients_that_are_zeroed_in_place_do_not_add_up():
    plain, _ = trained(None, steps=4)
    model, optimizer, _ = sharded(DENSE)
    for x in batches(4):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, x).backward()
        optimizer.step()
    assert_close(model, plain)


@case(4)
def replicas_reach_different_modules():
    """Where the one that has reached them has a gradient, or one of zeros, which decays too."""
    replica = mesh_of(REPLICAS)["replicate"].get_local_rank()
    for spec in ("none", DENSE, SPARSE):
        for optimizer in (sgd, adamw):
            model, made, _ = sharded(spec, optimizer=optimizer)
            for step, x in enumerate(batches(6)):
                branch = None if (step + replica) % 2 else float(step % 3 == 0)
                made.zero_grad()
                loss_of(model, x, branch).backward()
                made.step()
            assert_replicas_identical(model)


@case(4)
def what_nobody_reaches_stays_as_it_is():
    """Though it has a weight decay, a momentum, and something that waits."""
    for spec in ("none", DENSE, SPARSE, "dgc:ratio=0.1,min_numel=0"):
        model, optimizer, compression = sharded(
            spec, optimizer=lambda model: sgd(model, weight_decay=0.1)
        )
        values = []
        for step, x in enumerate(batches(6)):
            optimizer.zero_grad()
            loss_of(model, x, 1.0 if step < 2 else None).backward()
            optimizer.step()
            assert (model.sometimes.weight.grad is None) == (step >= 2)
            values.append(model.sometimes.weight.full_tensor().detach().clone())
        assert all(torch.equal(its, values[1]) for its in values[2:]), spec
        assert_replicas_identical(model)


class Apart(Holder):
    """In which fully_shard has cut each parameter, by which gradients of some may be missing."""


@case(2, 4)
def nothing_is_lost_whatever_is_reached():
    """What was applied and what is held back make up the mean of all gradients, but for those of a
    step that a GradScaler skips, in which one of two optimizers finds a number that is not
    finite."""
    for spec in (SPARSE, "maxnorm:bits=16,ratio=0.1,min_numel=0", "adacomp:min_numel=0"):
        mesh = mesh_of(REPLICAS)
        model = Apart()
        fully_shard(model, mesh=mesh["shard"])
        others = dict(model.held)
        other = torch.optim.SGD([others.pop("matrix")], lr=1.0)
        optimizer = torch.optim.SGD(others.values(), lr=1.0)
        group = mesh["replicate"]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        compression = fsdp.compress(
            model, optimizer, spec, replicate_group=group, grad_scaler=scaler
        )
        sums = {}
        for step in range(7):
            model.zero_grad()
            its = [told(rank, step) for rank in range(dist.get_world_size())]
            for rank, gradients in enumerate(its):
                # By the rank of its replica, as FSDP wants it of all shards.
                for name in ("wide", "bias")[: (step + rank // mesh["shard"].size()) % 3]:
                    del gradients[name]
                for name, gradient in gradients.items() if step != 4 else ():
                    sums[name] = sums.get(name, 0) + gradient.double() / len(its)
            if step == 4:
                # In the first row, which is in one shard alone.
                its[-1]["matrix"][0, 0] = float("inf")
            scaler.scale(model(its[dist.get_rank()])).backward()
            for each in (optimizer, other):
                scaler.step(each)
            scaler.update()
        assert_replicas_identical(model)
        assert compression.stats()["steps_undone"] == 1
        held = compression.state_dict(portable=True)["tensors"]
        for name, param in model.held.items():
            applied = -param.full_tensor().double()
            for key in {"residual", "v"} & held[f"held.{name}"].keys():
                applied += held[f"held.{name}"][key].full_tensor().double()
            error = (applied - sums[name]).abs().max().item()
            assert error <= 1e-5 * sums[name].abs().max(), f"{spec}: {error:.1e} of {name} is lost"


@case(4)
def parts_of_a_loss_and_grouped_modules():
    """As torchtitan does: words, norm and head in one group, a loss in parts, each with a backward
    pass of its own, and a divide factor, by which replicas are added up."""

    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.norm = model_of(), nn.LayerNorm(24)
            self.head = nn.Linear(24, 50)

        def forward(self, x):
            return self.norm(self.inside.body(x))

    def steps(spec, parts):
        torch.manual_seed(0)
        model, mesh = Grouped(), mesh_of(REPLICAS)
        model.inside.head = None
        over = mesh if spec is None else mesh["shard"]
        for block in model.inside.blocks:
            fully_shard(block, mesh=over)
        fully_shard([model.norm, model.head], mesh=over)
        fully_shard(model, mesh=over)
        for module in modules_of(model):
            module.set_gradient_divide_factor(3.0)
            # Gloo cannot multiply before it adds.
            module.set_force_sum_reduction_for_comms(True)
        optimizer = sgd(model)
        if spec is not None:
            fsdp.compress(
                model,
                optimizer,
                spec,
                replicate_group=mesh["replicate"],
                backward_passes_per_step=1 if parts == 1 else parts + 1,
            )
        for x in batches(4):
            optimizer.zero_grad()
            hidden = model(x[:, :-1])
            apart = hidden.detach().requires_grad_() if parts > 1 else hidden
            for h, y in zip(apart.chunk(parts, 1), x[:, 1:].chunk(parts, 1)):
                its = nn.functional.cross_entropy(
                    model.head(h).flatten(0, 1), y.flatten(), reduction="sum"
                )
                (its / 28).backward()
            if parts > 1:
                hidden.backward(apart.grad)
            optimizer.step()
        assert_replicas_identical(model)
        return model

    plain = steps(None, 1)
    for spec in ("none", DENSE):
        for parts in (1, 3):
            assert_close(steps(spec, parts), plain, 2e-6)


@case(4)
def checkpointed_and_compiled_blocks():
    plain, _ = trained(None, steps=4)

    def with_blocks(change, spec):
        model = model_of()
        for i, block in enumerate(model.blocks):
            model.blocks[i] = change(block)
        model, optimizer, compression = sharded(spec, model=model)
        train(model, optimizer, batches(4))
        assert_replicas_identical(model)
        assert set(compression.stats_by_tensor()) == names
        return model

    names = set(trained("none", steps=1)[1].stats_by_tensor())
    for spec in ("none", DENSE):
        assert_close(with_blocks(checkpoint_wrapper, spec), plain)
    compiled = with_blocks(lambda block: torch.compile(block, backend="aot_eager"), "none")
    assert_close(compiled, plain)


@case(4)
def a_pass_that_fails_leaves_no_trace():
    """As FSDP goes on alone. Before the failure gradients of a part of the model have come."""

    def fail(*_):
        raise KeyError("in backward")

    def failing(spec):
        model, optimizer, compression = sharded(spec)
        for step, x in enumerate(batches(4)):
            optimizer.zero_grad()
            if step == 2:
                handle = model.blocks[0].register_full_backward_hook(fail)
                with raises(KeyError, "in backward"):
                    loss_of(model, x).backward()
                handle.remove()
                if compression is not None:
                    with raises(RuntimeError, "reset_iter_state"):
                        optimizer.step()
                    compression.state_dict()
                model.reset_iter_state()
                optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
        assert_replicas_identical(model)
        assert compression is None or compression.stats()["steps"] == 4
        return model

    plain = failing(None)
    for spec in ("none", DENSE, "topk:ratio=1,min_numel=0"):
        assert_close(failing(spec), plain)


@case(2)
def one_optimizer_with_a_closure():
    plain, _ = trained(None, steps=4)
    model, optimizer, _ = sharded(DENSE)
    for x in batches(4):

        def closure(x=x):
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_close(model, plain)


@case(4)
def two_models_at_a_time():
    """Each with a compression of its own, over one group."""
    mesh = mesh_of(REPLICAS)
    models = [cut(model_of(seed=seed), mesh["shard"]) for seed in (0, 1)]
    optimizers = [sgd(model) for model in models]
    for model, optimizer in zip(models, optimizers):
        fsdp.compress(model, optimizer, SPARSE, replicate_group=mesh["replicate"])
    for x in batches(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(loss_of(model, x) for model in models).backward()
        for optimizer in optimizers:
            optimizer.step()
    for model in models:
        assert_replicas_identical(model)
