"""Steps that do not come as backward(), then step(): closures, layers that are frozen and thawed,
wrappers, shared parameters.

On one rank: in elastic jobs Horovod reduces there too, and gradients take the way that they take on
several.
"""

import copy
import gc
import pickle
import warnings
import weakref
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")
hvd = pytest.importorskip("horovod.torch")

from torch import nn  # noqa: E402

import horovod_compress.torch as hvdc  # noqa: E402
from horovod_compress import available  # noqa: E402
from horovod_compress.session import notices, process_sets  # noqa: E402
from horovod_compress.torch import horovod_internals  # noqa: E402
from horovod_compress.torch_common.search import objects_of, subclasses_of  # noqa: E402

DENSE = "dgc:ratio=1,masking=false,min_numel=0"
MOMENTA = ({}, {"weight_decay": 0.1}, {"nesterov": True, "weight_decay": 0.1}, {"momentum": 0})


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    monkeypatch.setattr(process_sets.HorovodRanks, "refuse_unsynced", lambda *_: None)
    monkeypatch.setattr(notices, "_warned", set())
    hvd.init()
    if not hvd.global_process_set.included():
        # As where horovod.tensorflow was imported too.
        hvd.init()


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left():
    yield
    gc.collect()


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def made(spec, bound_to=None, **options):
    """The compression of a spec, Horovod's own where that is None. bound_to: (optimizer, model)."""
    if spec is None:
        return hvd.Compression.none
    if bound_to is None:
        return hvdc.Compression.from_spec(spec, **options)
    optimizer, model = bound_to
    return hvdc.Compression.from_spec(
        spec, optimizer, named_parameters=model.named_parameters(), **options
    )


def wrap(model, optimizer, compression, **options):
    named = model.named_parameters()
    return hvd.DistributedOptimizer(
        optimizer, named_parameters=named, compression=compression, **options
    )


def synchronizing(optimizer, loss):
    """A closure that has its gradients reduced."""

    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.synchronize()
        return value

    return closure


def losses(model, steps=4, seed=0):
    """Functions that compute the loss, one a step."""
    generator = torch.Generator().manual_seed(seed)
    for x in torch.randn(steps, 4, 8, generator=generator):
        yield lambda x=x: model(x).square().mean()


def train(model, optimizer, **options):
    for loss in losses(model, **options):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def assert_close(model, reference):
    torch.testing.assert_close(flat(model), flat(reference), rtol=0, atol=1e-6)


# -- backward inside optimizer.step(closure)


def train_by_closures(model, optimizer, passes=1, by_name=False):
    for loss in losses(model):

        def closure(loss=loss):
            optimizer.zero_grad()
            for _ in range(passes):
                value = loss()
                value.backward()
            optimizer.synchronize()
            return value

        with optimizer.skip_synchronize():
            value = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        assert value is not None


@pytest.mark.parametrize("options", MOMENTA)
@pytest.mark.parametrize("spec", [DENSE, "topk:min_numel=0", "none", "variance:moments=per_sample"])
def test_closures_that_synchronize(spec, options):
    for passes in (1, 2):
        models = [model_of() for _ in range(3)]
        for model, name in zip(models, (None, spec, spec)):
            wrapped = wrap(
                model, sgd(model, **options), made(name), backward_passes_per_step=passes
            )
            train_by_closures(model, wrapped, passes, by_name=model is models[2])
        for model in models[1:]:
            assert_close(model, models[0])


def test_closures_come_and_go():
    models = [model_of(), model_of()]
    for model, spec in zip(models, (None, DENSE)):
        wrapped = wrap(model, sgd(model, weight_decay=0.1), made(spec))
        train(model, wrapped)
        train_by_closures(model, wrapped)
        # With a closure that only evaluates.
        for loss in losses(model):
            wrapped.zero_grad()
            loss().backward()
            wrapped.step(loss)
    assert_close(*models)


def test_closures_that_are_called_several_times():
    models = [model_of(), model_of(), model_of()]
    for model, spec in zip(models, (None, "none", "topk:min_numel=0")):
        wrapped = wrap(model, torch.optim.LBFGS(model.parameters(), 0.1, max_iter=4), made(spec))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train_by_closures(model, wrapped)
    assert hvdc.compression_of(wrapped).stats()["steps"] > 4
    for model in models[1:]:
        assert_close(model, models[0])


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("skipping", [True, False])
@pytest.mark.parametrize("spec", [DENSE, "topk:min_numel=0", "none", "qsgd", "powersgd"])
def test_closures_that_do_not_synchronize_are_refused(spec, skipping, passes):
    model = model_of()
    wrapped = wrap(model, sgd(model), made(spec), backward_passes_per_step=passes)

    def closure():
        wrapped.zero_grad()
        loss = model(torch.ones(1, 8)).sum()
        loss.backward()
        return loss

    with pytest.raises(
        RuntimeError, match="hvdc.UpdateOptimizer in place of hvd.DistributedOptimizer"
    ):
        if skipping:
            with wrapped.skip_synchronize():
                wrapped.step(closure)
        else:
            wrapped.step(closure)


def test_a_rank_that_horovod_does_not_count_is_told(monkeypatch):
    """As after the first hvd.init() where horovod.tensorflow was imported last."""
    monkeypatch.setattr(hvd.global_process_set, "ranks", [])
    model = model_of()
    with pytest.raises(ValueError, match="hvd.init.. once more"):
        made("topk", (sgd(model), model))


def test_a_closure_that_synchronizes_after_the_step_has():
    """What Horovod exchanges at the step's beginning would stay in what is kept."""
    for spec in ("none", DENSE):
        models = [model_of(), model_of()]
        for model, name in zip(models, (None, spec)):
            compression = made(name, discardable=True)
            wrapped = wrap(model, sgd(model), compression)
            for loss in losses(model):
                wrapped._synchronized = False
                wrapped.step(synchronizing(wrapped, loss))
        assert_close(*models)
    model = model_of()
    wrapped = wrap(model, sgd(model), made(DENSE))

    def kept():
        wrapped.zero_grad()
        model(torch.ones(1, 8)).sum().backward()
        wrapped.synchronize()

    with pytest.raises(
        RuntimeError, match="exchanged others at the step's beginning.*skip_synchronize"
    ):
        wrapped.step(kept)


def test_a_step_that_skips_what_did_not_come_is_refused():
    model = model_of()
    wrapped = wrap(model, sgd(model), made(DENSE))
    model(torch.ones(1, 8)).sum().backward()
    expected = pytest.raises(RuntimeError, match="a step came before its results: call")
    with expected, wrapped.skip_synchronize():
        wrapped.step()


# -- two steps on one gradient


@pytest.mark.parametrize("options", MOMENTA)
def test_gradients_that_are_read_or_used_again(options):
    """SAM, whose first gradient no step uses, and several steps on one gradient: the recipe of
    docs/recipes.md."""
    warnings.simplefilter("error", RuntimeWarning)
    models = [model_of(), model_of()]
    for model, spec in zip(models, (None, f"{DENSE},momentum=0")):
        compression = made(spec, discardable=True)
        wrapped = wrap(model, sgd(model, **options), compression)
        for loss in losses(model):
            wrapped.zero_grad()
            loss().backward()
            wrapped.synchronize()
            with torch.no_grad():
                norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
                moved = [0.05 / norm * p.grad for p in model.parameters()]
                torch._foreach_add_(list(model.parameters()), moved)
            wrapped.zero_grad()
            loss().backward()
            wrapped.synchronize()
            torch._foreach_sub_([p.data for p in model.parameters()], moved)
            with wrapped.skip_synchronize():
                wrapped.step()
                wrapped.step()
            wrapped.step()
    assert_close(*models)


def new_gradients(model):
    """What may come between two steps: none, other ones, and those of Horovod's own step."""
    params = list(model.parameters())
    yield lambda: model.zero_grad()
    yield lambda: model.zero_grad(set_to_none=False)
    yield lambda: [param.grad.mul_(0.5) for param in params]
    yield lambda: [setattr(param, "grad", torch.zeros_like(param)) for param in params]


@pytest.mark.parametrize("skipping", [True, False])
@pytest.mark.parametrize(
    ("spec", "told"), [(DENSE, True), (f"{DENSE},momentum=0", False), ("topk:min_numel=0", False)]
)
def test_a_second_step_on_the_same_gradients(spec, told, skipping):
    model = model_of()
    wrapped = wrap(model, sgd(model, weight_decay=0.1), made(spec))

    def said_in_two_steps(between):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for loss in losses(model, 2):
                model.zero_grad()
                loss().backward()
                wrapped.synchronize()
                with wrapped.skip_synchronize():
                    wrapped.step()
                    between()
                    if skipping:
                        wrapped.step()
                if not skipping:
                    wrapped.step()
        return [each for each in said if "a second time on the same gradients" in str(each.message)]

    for between in new_gradients(model):
        assert not said_in_two_steps(between)
    assert len(said_in_two_steps(lambda: None)) == told


def test_parameters_that_are_updated_by_hand():
    model = model_of()
    wrapped = wrap(model, sgd(model), made("topk:min_numel=0", discardable=True))
    with pytest.warns(RuntimeWarning, match="update parameters from p.grad yourself"):
        for loss in losses(model):
            wrapped.zero_grad()
            loss().backward()
            wrapped.synchronize()
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.1 * param.grad


@pytest.mark.parametrize("spec", [DENSE, "topk:min_numel=0", "none"])
@pytest.mark.parametrize("discardable", [True, False])
def test_results_are_not_exchanged_once_more(spec, discardable):
    models = [model_of(), model_of()]
    for model, each in zip(models, (None, spec)):
        wrapped = wrap(model, sgd(model, weight_decay=0.1), made(each, discardable=discardable))
        for loss in losses(model):
            wrapped.zero_grad()
            loss().backward()
            wrapped.synchronize()
            for again in (wrapped.synchronize, wrapped.step) if each not in (None, "none") else ():
                with pytest.raises(RuntimeError, match="synchronize.. has brought these gradients"):
                    again()
            with wrapped.skip_synchronize():
                wrapped.step()
    if spec != "topk:min_numel=0":
        assert_close(*models)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_step_without_a_whole_backward_pass_uses_no_earlier_results(passes):
    models = [model_of(), model_of()]
    for model, spec in zip(models, (None, DENSE)):
        compression = made(spec, discardable=True)
        wrapped = wrap(model, sgd(model), compression, backward_passes_per_step=passes)
        for loss in losses(model):
            for used in (True, False):
                wrapped.zero_grad()
                for _ in range(passes):
                    loss().backward()
                wrapped.step() if used else wrapped.synchronize()
            wrapped.zero_grad()
            for _ in range(passes - 1):
                loss().backward()
            wrapped.step()
    assert_close(*models)
    assert compression.stats()["steps_undone"] == 4


def with_gradients_in_one_tensor(model):
    """Gradients are views, which share their version."""
    params = list(model.parameters())
    shared = torch.zeros(sum(p.numel() for p in params)).split([p.numel() for p in params])
    for param, part in zip(params, shared):
        param.grad = part.view_as(param)
    return model


def test_gradients_that_are_views_of_one_tensor():
    models = [with_gradients_in_one_tensor(model_of()) for _ in range(2)]
    for model, spec in zip(models, (None, DENSE)):
        wrapped = wrap(model, sgd(model), made(spec))
        for loss in losses(model):
            model.zero_grad(set_to_none=False)
            loss().backward()
            wrapped.step()
    assert_close(*models)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("spec", "clips", "told"),
    [
        (DENSE, True, True),
        (DENSE, False, False),
        (f"{DENSE},momentum=0", True, False),
        ("topk:min_numel=0", True, False),
    ],
)
def test_gradients_that_are_clipped_with_their_momentum(spec, clips, told, scaled):
    model = with_gradients_in_one_tensor(model_of())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
    wrapped = wrap(model, sgd(model, weight_decay=0.1), made(spec, grad_scaler=scaler))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for loss in losses(model):
            model.zero_grad(set_to_none=False)
            scaler.scale(loss()).backward()
            wrapped.synchronize()
            scaler.unscale_(wrapped)
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with wrapped.skip_synchronize():
                scaler.step(wrapped)
            scaler.update()
    assert [True for each in said if "Clip with clip_norm=" in str(each.message)] == [True] * told


# -- momentum that a scheduler changes


def scheduled(spec, momenta, resumed_at=None, **options):
    """A model trained under a schedule. resumed_at: after so many steps another process goes on,
    whose optimizer is as at the start until it has loaded its state."""

    def started():
        model = model_of()
        compression = made(spec)
        return model, wrap(model, sgd(model, **options), compression), compression

    model, wrapped, compression = started()
    for step, momentum in enumerate(momenta):
        if step == resumed_at:
            saved = [copy.deepcopy(each.state_dict()) for each in (model, wrapped, compression)]
            model, wrapped, compression = started()
            for each, state in zip((compression, model, wrapped), saved[-1:] + saved[:-1]):
                each.load_state_dict(state)
        wrapped.param_groups[0]["momentum"] = momentum
        train(model, wrapped, steps=1, seed=step)
    return model


WARMED = [0.0, 0.0, 0.3, 0.6, 0.9, 0.9]
OFF_AND_ON = [0.9, 0.6, 0.0, 0.0, 0.5, 0.5]
CYCLE = [0.95, 0.85, 0.8, 0.9, 0.95, 0.9]


@pytest.mark.parametrize(
    ("momenta", "options"),
    [
        (WARMED, {"momentum": 0, "weight_decay": 0.1}),
        (OFF_AND_ON, {"weight_decay": 0.1}),
        (OFF_AND_ON, {"nesterov": True}),
        (CYCLE, {"nesterov": True, "weight_decay": 0.1}),
        (WARMED, {"nesterov": True}),
    ],
)
def test_a_schedule_of_momentum(momenta, options):
    """It may begin at 0, or go there. Runs go on bit for bit from saved states."""
    # The last layer goes dense.
    spec = "dgc:ratio=1,masking=false,min_numel=20"
    model = scheduled(spec, momenta, **options)
    assert_close(model, scheduled(None, momenta, **options))
    for step in (1, 3, 5):
        resumed = scheduled(spec, momenta, step, **options)
        assert torch.equal(flat(resumed), flat(model)), step


def test_a_schedule_of_momentum_over_steps_that_are_skipped():
    models = [model_of(), model_of()]
    for model, spec in zip(models, (None, DENSE)):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        wrapped = wrap(model, sgd(model, nesterov=True), made(spec, grad_scaler=scaler))
        for momentum, loss in zip(CYCLE, losses(model, len(CYCLE))):
            wrapped.param_groups[0]["momentum"] = momentum
            wrapped.zero_grad()
            (scaler.scale(loss()) * (float("inf") if momentum == 0.8 else 1)).backward()
            wrapped.synchronize()
            with wrapped.skip_synchronize():
                scaler.step(wrapped)
            scaler.update()
    assert_close(*models)


@pytest.mark.parametrize(("specs", "refused"), [(("split", "gather"), 1), (("gather", "split"), 0)])
def test_two_optimizers_that_step_out_of_order_in_uneven(specs, refused):
    """Ranks without data answer the first one's step before the second one's."""
    pairs = []
    for spec in specs:
        model = model_of()
        compression = made(f"topk:min_numel=0,exchange={spec}")
        # Other names.
        pairs.append((model, wrap(nn.ModuleDict({spec: model}), sgd(model), compression)))
    (_, first), (_, second) = pairs
    with hvdc.uneven(first, second):
        for order in ((first, second), (second, first)):
            for model, wrapped in pairs:
                wrapped.zero_grad()
                model(torch.ones(1, 8)).sum().backward()
            late = refused and order[0] is second
            with pytest.raises(RuntimeError, match="in the order") if late else nullcontext():
                order[0].step()
            for wrapped in order[::-1] if late else order[1:]:
                wrapped.step()


# -- layers that are frozen and thawed


def freeze_and_thaw(spec, bound=False, uneven=False, **options):
    model = model_of()
    optimizer = sgd(model, weight_decay=0.1)
    compression = made(spec, (optimizer, model) if bound else None)
    wrapped = wrap(model, optimizer, compression, **options)
    model[0].requires_grad_(False)
    if uneven and spec:
        with hvdc.uneven(wrapped):
            train(model, wrapped)
    else:
        train(model, wrapped)
    model[0].requires_grad_(True)
    train(model, wrapped, seed=1)
    return model


@pytest.mark.parametrize("id", available())
def test_layers_frozen_after_horovods_optimizer_was_made(id):
    spec = f"{id}:min_numel=0" if "min_numel" in available()[id]["options"] else id
    for bound in (True, False):
        assert torch.isfinite(flat(freeze_and_thaw(spec, bound))).all()


@pytest.mark.parametrize("options", [{}, {"groups": 2}])
@pytest.mark.parametrize(
    "spec",
    [DENSE, "none", "variance:moments=per_sample,min_numel=0", "variance:moments=microbatch"],
)
def test_frozen_layers_train_as_with_plain_horovod(spec, options):
    reference = freeze_and_thaw(None)
    for bound in (True, False):
        for uneven in (True, False):
            # Horovod itself wants a gradient of each in a group.
            if not (options and not uneven):
                assert_close(freeze_and_thaw(spec, bound, uneven and not options), reference)


@pytest.mark.parametrize("asked", ["not", "stats", "state_dict", "handshake"])
def test_layers_thawed_and_frozen_before_horovods_optimizer_is_made(asked):
    models = [model_of(), model_of()]
    for model, spec in zip(models, (None, DENSE)):
        optimizer = sgd(model)
        model[0].requires_grad_(False)
        compression = made(spec, (optimizer, model))
        if spec and asked != "not":
            getattr(compression, asked)()
        records = []
        if spec:
            compression.record(records.append, every=1)
        model[0].requires_grad_(True)
        model[2].requires_grad_(False)
        wrapped = wrap(model, optimizer, compression)
        train(model, wrapped)
    assert_close(*models)
    assert len(records) == 3 and set(compression.stats_by_tensor()) == {
        "0.weight",
        "0.bias",
        "4.weight",
        "4.bias",
    }


def test_a_layer_that_was_to_be_seen_cannot_be_thawed():
    model = model_of()
    optimizer = sgd(model)
    model[0].requires_grad_(False)
    compression = made("variance:moments=per_sample,min_numel=0", (optimizer, model))
    model[0].requires_grad_(True)
    wrapped = wrap(model, optimizer, compression)
    with pytest.raises(ValueError, match="0.weight was thawed after this compression was made"):
        train(model, wrapped)


@pytest.mark.parametrize("options", [*MOMENTA, {"maximize": True, "weight_decay": 0.1}])
def test_what_horovod_does_not_reduce_keeps_what_sgd_does(options):
    models, wrappers = [model_of(), model_of()], []
    for model, spec in zip(models, (None, DENSE)):
        model[0].requires_grad_(False)
        groups = [
            {"params": [*model[0].parameters(), *model[2].parameters()]},
            {"params": list(model[4].parameters()), "lr": 0.05},
        ]
        wrapped = wrap(
            model, torch.optim.SGD(groups, **{"lr": 0.1, "momentum": 0.9, **options}), made(spec)
        )
        wrappers.append(wrapped)
        train(model, wrapped)
        model[0].requires_grad_(True)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            train(model, wrapped, steps=6, seed=1)
    assert_close(*models)
    assert [group["params"] for group in wrapped.param_groups] == [
        group["params"] for group in groups
    ]
    assert wrappers[0].state_dict()["param_groups"] == wrapped.state_dict()["param_groups"]
    (words,) = [str(warning.message) for warning in said]
    assert "does not reduce the gradients of 2 parameters" in words and "0.weight, 0.bias" in words


# -- shared parameters, wrappers, copies


@pytest.mark.parametrize("spec", [DENSE, "topk:min_numel=0", "none"])
@pytest.mark.parametrize("bound", [True, False])
def test_another_compression_has_this_parameter(spec, bound):
    encoder, heads, optimizers = nn.Linear(8, 6), [nn.Linear(6, 2), nn.Linear(6, 3)], []
    for i, head in enumerate(heads):
        named = [(f"{i}.{name}", p) for name, p in nn.Sequential(encoder, head).named_parameters()]
        optimizer = torch.optim.SGD([p for _, p in named], 0.1)
        compression = (
            hvdc.Compression.from_spec(spec, optimizer, named_parameters=named)
            if bound
            else made(spec)
        )
        optimizers.append(
            hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)
        )
    h = encoder(torch.ones(1, 8))
    sum(head(h).sum() for head in heads).backward()
    optimizers[0].step()
    with pytest.raises(RuntimeError, match="another compression has this parameter"):
        optimizers[1].step()


def test_one_bound_compression_for_two_optimizers_is_refused():
    models, optimizers = [model_of(), model_of()], []
    named = [(f"{i}.{n}", p) for i in (0, 1) for n, p in models[i].named_parameters()]
    compression = hvdc.Compression.topk(named_parameters=named, discardable=True)
    for i, model in enumerate(models):
        optimizer = sgd(model, momentum=0)
        optimizers.append(
            hvd.DistributedOptimizer(
                optimizer, named_parameters=named[6 * i : 6 * i + 6], compression=compression
            )
        )
    train(models[0], optimizers[0])
    with pytest.raises(ValueError, match="parameter of another optimizer of Horovod's"):
        train(models[1], optimizers[1])


@pytest.mark.parametrize("spec", [DENSE, "topk:ratio=1,min_numel=0"])
@pytest.mark.parametrize("bound", [True, False])
def test_a_parameter_that_has_two_names(spec, bound):
    models = [model_of(), model_of()]
    for model, each in zip(models, (None, spec)):
        named = [*model.named_parameters(), *model.named_parameters("again")]
        optimizer = sgd(model, nesterov=True, weight_decay=0.1)
        compression = (
            hvdc.Compression.from_spec(each, optimizer, named_parameters=named)
            if each and bound
            else made(each)
        )
        wrapped = hvd.DistributedOptimizer(
            optimizer, named_parameters=named, compression=compression
        )
        train(model, wrapped)
    assert_close(*models)
    assert len(compression.stats_by_tensor()) == 6


def wrappers_of(optimizer):
    """As Lightning makes them: of a class that is derived from the optimizer's, with the same
    attributes, copied or asked for."""

    class Copied:
        def __init__(self, optimizer):
            self.__dict__ = {key: value for key, value in vars(optimizer).items() if key != "step"}
            self.__class__ = type(
                "Wrapped" + type(optimizer).__name__, (type(self), type(optimizer)), {}
            )
            self._optimizer = optimizer

        def step(self, closure):
            return self._optimizer.step(closure=closure)

    class Asking:
        def __init__(self, optimizer):
            self._optimizer = optimizer
            self.__class__ = type(
                "Wrapped" + type(optimizer).__name__, (type(self), type(optimizer)), {}
            )

        def __getattr__(self, name):
            return getattr(self._optimizer, name)

        step = Copied.step

    twin = object.__new__(type(optimizer))
    twin.__dict__ = optimizer.__dict__
    return Copied(optimizer), Asking(optimizer), twin


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("asked", ["compression", "wrapper", "not"])
def test_an_optimizer_around_horovods(kind, bound, asked):
    models = [model_of(), model_of()]
    for model, spec in zip(models, (None, DENSE)):
        optimizer = sgd(model, weight_decay=0.1)
        compression = made(spec, (optimizer, model) if bound else None)
        wrapped = wrap(model, optimizer, compression)
        wrapper = wrappers_of(wrapped)[kind]
        wrapped.load_state_dict(wrapped.state_dict())
        if spec and asked != "not":
            assert (hvdc.compression_of(wrapper) if asked == "wrapper" else compression).stats()[
                "steps"
            ] == 0
        for loss in losses(model):
            with wrapped.skip_synchronize():
                wrapper.step(synchronizing(wrapped, loss))
    assert_close(*models)
    assert compression.stats()["steps"] == hvdc.compression_of(wrapper).stats()["steps"] == 4


@pytest.fixture
def hidden_from_the_collector():
    yield
    gc.unfreeze()
    gc.enable()


def test_objects_that_the_collector_was_told_to_leave(hidden_from_the_collector):
    model, kept = model_of(), {}

    def waiting():
        optimizer = sgd(model, lr=0.125)
        yield optimizer

    generator = waiting()
    next(generator)
    kept["in a list"] = [sgd(model, lr=0.125)]
    found = [o for o in objects_of(torch.optim.SGD) if o.defaults["lr"] == 0.125]
    gc.freeze()
    later = sgd(model, lr=0.125)
    again = [o for o in objects_of(torch.optim.SGD) if o.defaults["lr"] == 0.125]
    assert len(found) == 2 and set(map(id, again)) == {*map(id, found), id(later)}
    assert any(module is model for module in objects_of(nn.Module))


def test_a_search_keeps_nothing_of_running_functions(hidden_from_the_collector):
    """Where nobody collects cycles, as in training loops that do so by themselves."""
    gc.freeze()
    gc.disable()

    def searching():
        batch = nn.Identity()
        objects_of(torch.optim.SGD)
        return weakref.ref(batch)

    assert searching()() is None


def test_nothing_is_searched_where_horovod_has_made_no_optimizer(monkeypatch):
    class Derived(torch.optim.SGD):
        pass

    class Further(Derived):
        pass

    assert {Derived, Further, torch.optim.Adam} <= set(subclasses_of(torch.optim.Optimizer))
    monkeypatch.setattr(gc, "get_objects", None)
    monkeypatch.setattr(horovod_internals, "subclasses_of", lambda _: [Derived, Further])
    with pytest.raises(RuntimeError, match="no optimizer has this compression yet"):
        made("topk").stats()


def test_questions_after_gc_freeze(hidden_from_the_collector):
    models = [model_of(), model_of()]
    for model, spec in zip(models, (None, "variance:moments=per_sample,min_numel=0")):
        compression = made(spec)
        wrapped = wrap(model, sgd(model), compression)
        gc.freeze()
        if spec:
            assert compression.stats()["steps"] == 0
        train(model, wrapped)
    assert_close(*models)


def test_auto_has_the_arguments_of_any_compression(monkeypatch):
    monkeypatch.delenv("HOROVOD_ELASTIC")
    model = model_of()
    optimizer, named, everyone = sgd(model), model.named_parameters(), hvd.global_process_set
    bound = hvdc.Compression.from_spec(
        "auto", optimizer, named_parameters=named, process_set=everyone, discardable=True
    )
    assert isinstance(bound, hvdc.BoundCompression) and bound._session.discardable
    assert list(bound.plan["candidates"])[2].startswith("dgc") and bound.plan["spec"] is None
    wrapped = wrap(model, optimizer, bound)
    assert hvdc.compression_of(wrapped) is bound
    for make in (
        hvdc.Compression.from_spec,
        lambda *_, **options: hvdc.Compression.auto(**options),
    ):
        with pytest.raises(TypeError, match="process_set must be one of Horovod's"):
            make("auto", process_set="another").bind(wrapped)


@pytest.mark.parametrize("bound", [True, False])
def test_a_switch_sees_the_momentum_that_was_loaded(bound):
    models = [model_of(), model_of()]
    for model, spec in zip(models, (None, DENSE)):
        optimizer = sgd(model, momentum=0.5)
        compression = made(spec, (optimizer, model) if bound and spec else None)
        wrapped = wrap(model, optimizer, compression)
        saved = wrapped.state_dict()
        saved["param_groups"][0]["momentum"] = 0.9
        wrapped.load_state_dict(saved)
        train(model, wrapped)
        if spec:
            compression.switch("none")
        train(model, wrapped, seed=1)
    assert_close(*models)


def test_a_compression_cannot_be_copied():
    model, other = model_of(), model_of()
    optimizer = sgd(model)
    bound, unbound = made(DENSE, (optimizer, model)), made("topk")
    copies = copy.copy, copy.deepcopy, pickle.dumps
    for copied in copies:
        assert copied(unbound)
    train(other, wrap(other, sgd(other), unbound))
    for compression in (bound, unbound, hvdc.compression_of(wrap(model, optimizer, bound))):
        for copied in copies:
            with pytest.raises(
                TypeError, match=r"cannot be copied or pickled: save its state_dict\(\)"
            ):
                copied(compression)


def test_a_state_with_other_prefixes_fits_layers_that_were_thawed_before_wrapping():
    def trained(prefix, state=None, frozen=False):
        model = model_of()
        base, named = sgd(model), [(prefix + n, p) for n, p in model.named_parameters()]
        model[0].requires_grad_(not frozen)
        compression = hvdc.Compression.from_spec(
            "topk:ratio=0.1,min_numel=0", base, named_parameters=named
        )
        model[0].requires_grad_(True)
        wrapped = hvd.DistributedOptimizer(base, named_parameters=named, compression=compression)
        if state is not None:
            compression.load_state_dict(state)
        model(torch.ones(3, 8)).sum().backward()
        wrapped.step()
        return compression.state_dict()

    state = trained("", trained("_orig_mod."), frozen=True)
    assert state["step"] == 2 and "0.weight" in state["tensors"]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("mended", [False, True])
def test_a_step_that_uses_what_was_undone_is_told_of(scaled, mended):
    """And one that a GradScaler skips, in a fused step too, is not."""
    model, scaler = model_of(), torch.amp.GradScaler("cpu", enabled=scaled)
    base = sgd(model, momentum=0, fused=True)
    options = {"grad_scaler": scaler} if scaled else {}
    compression = made("topk:ratio=0.1,min_numel=0", (base, model), **options)
    optimizer = wrap(model, base, compression)
    model[2].weight.register_hook(lambda grad: grad / 0)
    scaler.scale(next(losses(model))()).backward()
    optimizer.synchronize()
    for param in model.parameters() if mended else ():
        param.grad.nan_to_num_(0, 0, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
    assert compression.stats()["steps_undone"] == 1
    told = [str(each.message) for each in caught if "a second time later" in str(each.message)]
    assert len(told) == (mended or not scaled)


def test_a_compression_that_no_optimizer_got_is_gone_at_once():
    model = model_of()
    compression = made("topk:min_numel=0", (None, model), discardable=True)
    compression.stats()
    left = weakref.ref(compression), weakref.ref(compression._session.exchange)
    gc.disable()
    try:
        del compression
        assert [each() for each in left] == [None, None]
    finally:
        gc.enable()
