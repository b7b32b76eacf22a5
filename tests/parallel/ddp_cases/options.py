"""What DDP, its optimizers and PyTorch offer goes on working."""

import itertools
import pickle
import warnings

import torch
import torch.distributed as dist
from checks import raises, registry
from torch import nn
from torch.distributed._composable import replicate
from torch.nn.parallel import DistributedDataParallel as DDP

from horovod_compress import ddp
from horovod_compress.session import notices
from horovod_compress.session.unbound import NotBoundError

from .told import Holder, assert_nothing_lost, told
from .training import (
    BUCKETS,
    DENSE,
    assert_close,
    assert_replicas_identical,
    backward,
    batches,
    flat,
    model_of,
    same_in_any_bucket,
    sgd,
    train,
    trained,
    wrapped,
)

CASES, case = registry()
SPARSE = "topk:ratio=0.05,min_numel=0"
SPECS = ("dgc:ratio=0.01,min_numel=0", "maxnorm:min_numel=0", "powersgd", "none")


def unit_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)


def told_model(spec=SPARSE, optimizer=unit_sgd, options=(), **compression):
    model = DDP(Holder(), bucket_cap_mb=0.01, **dict(options))
    made = optimizer(model)
    return model, made, ddp.compress(model, made, spec, **compression)


@case(2, 3)
def buckets_and_their_options_change_nothing():
    for spec in same_in_any_bucket(SPECS):
        expected = flat(trained(spec)[0])
        for options in (
            {"bucket_cap_mb": 25},
            {"gradient_as_bucket_view": True},
            {"static_graph": True},
            {"find_unused_parameters": True},
        ):
            found = flat(trained(spec, ddp_options=options)[0])
            assert torch.equal(found, expected), f"{spec} with {options}"


@case(2, 3)
def gradients_that_add_up_over_passes():
    """no_sync; and without it what is not sent is carried on, or for a momentum refused."""
    model, optimizer, compression = wrapped(DENSE)
    plain, its, _ = wrapped(None)
    for each, step in ((model, optimizer), (plain, its)):
        for x, y in batches(4):
            step.zero_grad()
            with each.no_sync():
                backward(each, x[:4], y[:4])
            backward(each, x[4:], y[4:])
            step.step()
    assert_close(model, plain)
    model, optimizer, compression = told_model()
    gradients = []
    for step in range(6):
        gradients.append(told(dist.get_rank(), step))
        model(gradients[-1]).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert_nothing_lost(model, compression, gradients)
    model, optimizer, compression = wrapped("dgc:ratio=0.01")
    refused = None
    for x, y in batches(2):
        try:
            backward(model, x, y)
        except RuntimeError as error:
            refused = str(error)
    assert refused and "no_sync" in refused and "discard" in refused, refused


@case(2, 3)
def ranks_that_join():
    model, optimizer, compression = told_model()
    rank, gradients = dist.get_rank(), []
    with model.join():
        for step in range(3 + 2 * rank):
            gradients.append(told(rank, step))
            optimizer.zero_grad()
            model(gradients[-1]).backward()
            optimizer.step()
    assert_replicas_identical(model)
    assert_nothing_lost(model, compression, gradients)


@case(2, 3)
def momentum_with_ranks_that_join():
    for spec in ("dgc:ratio=0.1,min_numel=0", "powersgd", "variance:moments=microbatch"):
        model, optimizer, compression = wrapped(spec)
        with model.join():
            train(model, optimizer, batches(3 + 2 * dist.get_rank()))
        assert_replicas_identical(model)
        train(model, optimizer, batches(2))


@case(2)
def compiled_models():
    # DDP's own limits: PyTorch splits graphs by them.
    model, optimizer, compression = wrapped(DENSE, ddp_options={"bucket_cap_mb": 25})
    train(torch.compile(model, backend="eager"), optimizer, batches(4))
    assert_close(model, trained(None, steps=4)[0])
    assert compression.stats()["steps"] >= 3


@case(2, 3)
def closures():
    model, optimizer, _ = wrapped(DENSE)
    for x, y in batches(5):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        assert optimizer.step(closure) > 0
    assert_close(model, trained(None, steps=5)[0])


@case(2, 3)
def types_of_models():
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        for spec in ("none", SPARSE, "dgc:ratio=0.01,momentum=0.9", "maxnorm", "powersgd"):
            model, optimizer, compression = _of_type(spec, dtype)
            for step in range(3):
                optimizer.zero_grad()
                model(told(dist.get_rank(), step, dtype)).backward()
                optimizer.step()
            assert_replicas_identical(model)
            if spec == "none" and dtype == torch.float64:
                means = sum(
                    sum(told(r, s, dtype)["matrix"] for r in range(dist.get_world_size()))
                    for s in range(3)
                )
                found = -model.module.held["matrix"].detach() * dist.get_world_size() / 0.01
                torch.testing.assert_close(found, means, rtol=1e-12, atol=1e-12)


def _of_type(spec, dtype):
    model = DDP(Holder(dtype), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, ddp.compress(model, optimizer, spec)


@case(2, 3)
def autocast_and_a_loss_scale():
    """Steps with a GradScaler are those without one; one that it skips leaves no trace."""
    gradients = []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    model, optimizer, compression = told_model(grad_scaler=scaler)
    for step in range(8):
        optimizer.zero_grad()
        its = told(dist.get_rank(), step)
        if step == 4 and dist.get_rank() == 0:
            its["wide"][0, 0] = float("inf")
        else:
            gradients.append(its)
        scaler.scale(model(its)).backward()
        scaler.step(optimizer)
        scaler.update()
    if dist.get_rank():
        # The step was skipped on all ranks.
        del gradients[4]
    assert compression.stats()["steps_undone"] == 1
    assert_nothing_lost(model, compression, gradients)
    model, optimizer, _ = wrapped("dgc:ratio=0.05,min_numel=0")
    for x, y in batches(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert_replicas_identical(model)


@case(2, 3)
def moments_of_samples_and_passes():
    for moments in ("microbatch", "per_sample"):
        net = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10))
        model, optimizer, compression = wrapped(
            f"variance:moments={moments},min_numel=0", model_of(lambda: net)
        )
        train(model, optimizer, batches(4))
        assert_replicas_identical(model)
        assert compression.stats()["elements_sent"] > 0


@case(1)
def one_rank_trains_as_without_compression():
    for spec in ("none", "dgc:ratio=0.01", "powersgd", "auto"):
        model, compression = trained(spec)
        assert torch.equal(flat(model), flat(trained(None)[0])), spec
        assert compression.stats()["bytes_sent"] == 0


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another, as accelerate makes it."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


@case(2)
def optimizers_in_wrappers():
    model, optimizer, _ = wrapped(DENSE, optimizer=lambda model: Wrapper(sgd(model)))
    train(model, optimizer, batches(4))
    assert_close(model, trained(None, steps=4)[0])
    state, hook = ddp.comm_hook(DENSE)
    model = DDP(model_of(), **BUCKETS)
    model.register_comm_hook(state, hook)
    train(model, Wrapper(sgd(model)), batches(4))
    assert_close(model, trained(None, steps=4)[0])


@case(2)
def two_models_step_in_turn():
    """In a backward pass each, and in one together."""
    specs = ("dgc:ratio=0.01", "topk:ratio=0.05")
    for together in (False, True):
        pairs = [wrapped(spec) for spec in specs]
        for x, y in batches(4):
            for model, optimizer, _ in pairs:
                optimizer.zero_grad()
                if not together:
                    backward(model, x, y)
            if together:
                sum(nn.functional.cross_entropy(model(x), y) for model, _, _ in pairs).backward()
            for _, optimizer, _ in pairs:
                optimizer.step()
        for (model, _, _), spec in zip(pairs, specs):
            assert torch.equal(flat(model), flat(trained(spec, steps=4)[0]))


@case(2)
def learning_rates_and_momenta_on_schedule():
    found = []
    for spec in (None, DENSE):
        model, optimizer, _ = wrapped(spec)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        for x, y in batches(8):
            train(model, optimizer, [(x, y)])
            schedule.step()
        found.append(model)
    assert_close(*found)


@case(2)
def gradients_that_are_clipped_after_the_exchange():
    found = []
    for spec in (None, DENSE):
        model, optimizer, _ = wrapped(spec, optimizer=lambda model: sgd(model, momentum=0.0))
        for x, y in batches(6):
            optimizer.zero_grad()
            backward(model, x, y)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        found.append(model)
    assert_close(*found)


@case(2)
def clipping_of_momentum_is_warned_of():
    for limit, view in itertools.product((None, 0.001), (False, True)):
        model, optimizer, compression = wrapped("dgc", None, {"gradient_as_bucket_view": view})
        notices._warned.clear()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for x, y in batches(3):
                optimizer.zero_grad()
                backward(model, x, y)
                if limit:
                    nn.utils.clip_grad_norm_(model.parameters(), limit)
                optimizer.step()
            compression.switch("none")
            train(model, optimizer, batches(1))
        words = [str(each.message) for each in told]
        clipping = [each for each in words if "between backward() and the step" in each]
        assert len(clipping) == bool(limit), (limit, view, words)


@case(2)
def a_hook_of_a_model_that_replicate_has_not_wrapped():
    model = replicate(model_of())
    state, hook = ddp.comm_hook(SPARSE)
    model.register_comm_hook(state, hook)
    train(model, sgd(model), batches(5))
    assert_replicas_identical(model)
    assert state.state_dict()["step"] == 5 and state.stats()["ratio"] > 5


@case(2)
def a_hook_that_is_made_before_model_and_optimizer():
    """As Lightning registers it; a closure brings the first gradients there."""
    for spec in (DENSE, "topk:ratio=0.01", "auto"):
        for by_closure in (False, True):
            state, hook = pickle.loads(pickle.dumps(ddp.comm_hook(spec)))
            with raises(NotBoundError, "register"):
                state.state_dict()
            model = DDP(model_of(), **BUCKETS)
            model.register_comm_hook(state, hook)
            optimizer = sgd(model)
            for x, y in batches(5):

                def closure(x=x, y=y, model=model, optimizer=optimizer):
                    optimizer.zero_grad()
                    backward(model, x, y)

                if by_closure:
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.step()
            assert_replicas_identical(model)
            assert state.stats()["steps"] >= 4 and state.state_dict()["step"] == 5
            if spec != "auto":
                assert torch.equal(flat(model), flat(trained(spec, steps=5)[0])), (spec, by_closure)
    with raises(ValueError, "forward pass", "ddp.compress"):
        ddp.comm_hook("variance:moments=microbatch")
    with raises(ValueError, "ratio"):
        ddp.comm_hook("topk:ratio=2")
