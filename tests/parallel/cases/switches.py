"""Another compression from one step to the next: nothing is lost, momentum counts once, and
replicas stay identical."""

import io

import horovod.torch as hvd
import numpy as np
import torch
from checks import raises, registry

import horovod_compress.torch as hvdc
from horovod_compress import MismatchError
from horovod_compress.engine.debt import DEBT, debt_of
from horovod_compress.session.elastic import Kept

from .training import (
    assert_close,
    assert_replicas_identical,
    batches,
    flat,
    model_of,
    sgd,
    train,
    wrap,
)

CASES, case = registry()


def owed(compression, names):
    """The mean over ranks of what results are still to bring, all tensors in one."""
    exchange = compression._session.exchange
    exchange.arrays()
    parts = []
    for tensor in map(exchange.tensors.__getitem__, names):
        found = [
            part
            for part in (
                debt_of(tensor.compressor, tensor.state),
                tensor.state.arrays.get(DEBT),
            )
            if part is not None
        ]
        parts.append(np.sum(found, axis=0) if found else np.zeros(tensor.numel, np.float32))
    return hvd.allreduce(torch.from_numpy(np.concatenate(parts)), name="owed")


@case(2, 3)
def nothing_is_lost_over_switches():
    """A loss that is linear in the parameters has the gradients that it is told, whatever the
    parameters are."""
    shapes = {"matrix": (40, 60), "bias": (60,)}
    model = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    compression = hvdc.Compression.topk(
        optimizer, named_parameters=model.named_parameters(), ratio=0.02
    )
    wrapped = wrap(model, optimizer, compression)
    generator, come = (
        torch.Generator().manual_seed(hvd.rank()),
        torch.zeros(40 * 60 + 60, dtype=torch.float64),
    )
    specs = (
        "topk:ratio=0.02",
        "adacomp",
        "maxnorm:bits=4",
        "none",
        "dgc:ratio=0.05",
        "powersgd:min_rate=1",
        "efsignsgd:follow_lr=true",
        "fp16",
        "topk:ratio=0.5",
        "topk:ratio=0.05,exchange=split",
        "dgc:ratio=0.05,exchange=split",
        "topk:ratio=0.02",
    )
    for spec in specs:
        compression.switch(spec)
        # Which drops what it rounds away, from its second step on.
        for _ in range(3 if spec != "maxnorm:bits=4" else 1):
            told = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
            come += torch.cat([gradient.flatten() for gradient in told.values()]).double()
            if spec == "fp16":
                come -= torch.cat(
                    [(gradient - gradient.half()).flatten() for gradient in told.values()]
                ).double()
            wrapped.zero_grad()
            sum((model[name] * gradient).sum() for name, gradient in told.items()).backward()
            wrapped.step()
    mean = hvd.allreduce(come, name="come").float()
    moved = -torch.cat([model[name].detach().flatten() for name in shapes])
    worst = (moved + owed(compression, shapes) - mean).abs().max() / mean.abs().max()
    assert worst < 2e-3, worst  # fp16 rounds sums as well
    assert_replicas_identical(model)
    assert compression.stats()["steps"] == 3 * len(specs) - 2


@case(2)
def momentum_counts_once_over_switches():
    """In the dense limit a run over several switches is plain Horovod's, with momentum and weight
    decay. (With Nesterov's momentum the same is to come, but in another order.)"""
    for options in ({"weight_decay": 0.01}, {}):
        reference, model = model_of(), model_of()
        plain = wrap(reference, sgd(reference, **options), hvd.Compression.none)
        compression = hvdc.Compression.from_spec("none")
        wrapped = wrap(model, sgd(model, **options), compression)
        for seed, spec in enumerate(
            (
                "dgc:ratio=1,masking=false",
                "none",
                "topk:ratio=1",
                "dgc:ratio=1,masking=false",
                "topk:ratio=1",
                "none",
            )
        ):
            compression.switch(spec)
            for net, optimizer in ((reference, plain), (model, wrapped)):
                train(net, optimizer, batches(4, seed))
            assert_close(model, reference, 3e-6)


@case(2, 3)
def momentum_counts_once_where_results_are_sums():
    """The momentum of tensors that dgc leaves dense is of sums already, and alike on all ranks."""
    reference, model = model_of(), model_of()
    plain = wrap(reference, sgd(reference, lr=0.01), hvd.Compression.none, op=hvd.Sum)
    compression = hvdc.Compression.from_spec("dgc:ratio=1,masking=false")
    wrapped = wrap(model, sgd(model, lr=0.01), compression, op=hvd.Sum)
    for seed, spec in enumerate(
        ("dgc:ratio=1,masking=false", "none", "dgc:ratio=1,masking=false", "topk:ratio=1")
    ):
        if seed:
            compression.switch(spec)
        for net, optimizer in ((reference, plain), (model, wrapped)):
            train(net, optimizer, batches(4, seed))
        assert_close(model, reference, 5e-6)


@case(2)
def momentum_of_sums_after_a_state_was_loaded():
    """Before the first gradient the optimizer says what Horovod's op is; where it has not been
    wrapped yet, that is found out, and refused, then."""
    reference, saved = model_of(), []
    plain = wrap(reference, sgd(reference, lr=0.01), hvd.Compression.none, op=hvd.Sum)
    model, compression = model_of(), hvdc.Compression.from_spec("dgc:ratio=1,masking=false")
    wrapped = wrap(model, sgd(model, lr=0.01), compression, op=hvd.Sum)
    for net, optimizer in ((reference, plain), (model, wrapped)):
        train(net, optimizer, batches(4))
    saved = [model.state_dict(), wrapped.state_dict(), compression.state_dict()]
    again, late = model_of(seed=3), model_of(seed=3)
    its, lates = hvdc.Compression.from_spec("dgc:ratio=1,masking=false"), sgd(late, lr=0.01)
    bound = hvdc.Compression.from_spec(
        "dgc:ratio=1,masking=false", lates, named_parameters=late.named_parameters()
    )
    for net, optimizer, each in (
        (again, wrap(again, sgd(again, lr=0.01), its, op=hvd.Sum), its),
        (late, lates, bound),
    ):
        for part, state in zip((net, optimizer, each), _loaded(saved)):
            part.load_state_dict(state)
        each.switch("topk:ratio=1")
        if net is again:
            for trained, its_optimizer in ((reference, plain), (again, optimizer)):
                train(trained, its_optimizer, batches(4, 1))
    assert_close(again, reference, 5e-6)
    with raises(RuntimeError, "does not average", "call switch() after the first step"):
        train(late, wrap(late, lates, bound, op=hvd.Sum), batches(1))
    # A state that is loaded afterwards is a new one, of which nothing was handed over.
    bound.switch("dgc:ratio=1,masking=false")
    bound.load_state_dict(_loaded(saved)[-1])
    bound._session.exchange.features.handover.check_host(2.0)


@case(2)
def what_the_optimizers_momentum_has_gathered_is_let_go_when_it_has_decayed():
    """It would become denormal numbers, which are slow, and never 0. Until then the trajectory is
    plain Horovod's, and afterwards, too."""
    reference, model = model_of(), model_of()
    plain = wrap(reference, sgd(reference, momentum=0.5), hvd.Compression.none)
    compression = hvdc.Compression.from_spec("none")
    wrapped = wrap(model, sgd(model, momentum=0.5), compression)
    for spec, held in (("none", True), ("dgc:ratio=1,masking=false", False), ("none", True)):
        compression.switch(spec)
        for net, optimizer in ((reference, plain), (model, wrapped)):
            train(net, optimizer, batches(130, seed=len(spec)))
        trained = [param for param in model.parameters() if param.requires_grad]
        assert all(
            (wrapped.state[param].get("momentum_buffer") is not None) == held for param in trained
        ), spec
    assert_close(model, reference, 1e-4)


@case(2)
def switches_by_step_resume():
    """What is to come at a step comes there, and after a state was loaded."""

    def start(seed):
        model = model_of(seed=seed)
        compression = hvdc.Compression.from_spec("topk:ratio=0.1")
        optimizer = wrap(model, sgd(model), compression)
        compression.switch("topk:ratio=0.01", at=8)
        compression.switch("dgc:ratio=0.05", at=4)
        return model, compression, optimizer

    expected = model_of()
    its = hvdc.Compression.from_spec("topk:ratio=0.1")
    optimizer = wrap(expected, sgd(expected), its)
    model, compression, wrapped = start(0)
    for step, batch in enumerate(batches(12)):
        if step in (4, 8):
            its.switch({4: "dgc:ratio=0.05", 8: "topk:ratio=0.01"}[step])
        train(expected, optimizer, [batch])
        train(model, wrapped, [batch])
        assert torch.equal(flat(model), flat(expected)), step
        if step == 5:
            saved = _loaded([model.state_dict(), wrapped.state_dict(), compression.state_dict()])
    again, its_compression, its_optimizer = start(3)
    for each, state in zip((again, its_optimizer, its_compression), saved):
        each.load_state_dict(state)
    train(again, its_optimizer, list(batches(12))[6:])
    assert torch.equal(flat(again), flat(model))
    assert its_compression.config["id"] == "topk" and its_compression.config["ratio"] == 0.01


def _loaded(objects):
    """What comes of these over a file."""
    file = io.BytesIO()
    torch.save(objects, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@case(2)
def what_cannot_be_switched_is_refused():
    model = model_of()
    optimizer = sgd(model)
    compression = hvdc.Compression.topk(optimizer, named_parameters=model.named_parameters())
    wrapped = wrap(model, optimizer, compression)
    train(model, wrapped, batches(2))
    with raises(ValueError, "unknown compressor 'gdc'"):
        compression.switch("gdc")
    with hvdc.uneven(wrapped), raises(RuntimeError, "inside `with uneven(…):`", "at=STEP"):
        compression.switch("adacomp")
    x, y = next(batches(1))
    torch.nn.functional.cross_entropy(model(x), y).backward()
    with raises(RuntimeError, "a step is under way"):
        compression.switch("adacomp")
    wrapped.step()
    train(model, wrapped, batches(2))
    for at in (-1, 2.5, "3", True):
        with raises(ValueError, "at must be a step, counted from 0"):
            compression.switch("adacomp", at=at)
    with raises(
        MismatchError, "rank 1 differs from rank 0 in options", "between the same two steps"
    ):
        compression.switch("adacomp" if hvd.rank() else "topk:ratio=0.5")


@case(2)
def a_switch_that_is_refused_changes_nothing():
    """Training goes on as plain Horovod's, and the next switch is one from what was in force."""
    reference, model = model_of(), model_of()
    plain = wrap(reference, sgd(reference), hvd.Compression.none)
    compression = hvdc.Compression.from_spec("dgc:ratio=1,masking=false")
    wrapped = wrap(model, sgd(model), compression)
    for seed, spec in enumerate(("topk:ratio=1" if hvd.rank() else "none", "topk:ratio=1", None)):
        for net, optimizer in ((reference, plain), (model, wrapped)):
            train(net, optimizer, batches(4, seed))
        assert_close(model, reference, 5e-6)
        if seed == 0:
            with raises(MismatchError, "rank 1 differs from rank 0"):
                compression.switch(spec)
            assert compression.config["id"] == "dgc"
        elif spec:
            compression.switch(spec)
    # Ranks are compared by what was in force: with what they want they might wait for each other.
    if hvd.mpi_built() and hvd.mpi_enabled():
        with raises(MismatchError, "rank 1 differs from rank 0 in options"):
            compression.switch("topk:ratio=1,transport=mpi" if hvd.rank() else "topk:ratio=0.5")


@case(2)
def a_scale_and_discarded_steps_over_switches():
    """A GradScaler's growth, and a step that it skips, right after a switch."""
    models = []
    for growth in (1e9, 2):
        model = model_of()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=int(growth))
        compression = hvdc.Compression.from_spec("topk:ratio=0.05", grad_scaler=scaler)
        wrapped = wrap(model, sgd(model), compression)
        for step, (x, y) in enumerate(batches(12)):
            if step in (3, 6, 9):
                compression.switch({3: "qsgd", 6: "dgc:ratio=0.05", 9: "topk:ratio=0.05"}[step])
            wrapped.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            scaler.scale(float("inf") * loss if step in (3, 6) else loss).backward()
            wrapped.synchronize()
            scaler.unscale_(wrapped)
            with wrapped.skip_synchronize():
                scaler.step(wrapped)
            scaler.update(scaler.get_scale() if step in (3, 6) else None)
        assert_replicas_identical(model)
        models.append(model)
    assert_close(*models, tolerance=1e-5)


@case(2)
def layers_freeze_and_thaw_over_switches():
    """Horovod reduces what had gradients when its optimizer was made, whatever is frozen later, and
    nothing else."""
    model = model_of()
    compression = hvdc.Compression.topk(ratio=0.1)
    wrapped = wrap(model, sgd(model), compression)
    train(model, wrapped, batches(3))
    model.shared.requires_grad_(False)
    compression.switch("dgc:ratio=0.1")
    train(model, wrapped, batches(3))
    model.shared.requires_grad_(True)
    compression.switch("topk:ratio=0.1")
    train(model, wrapped, batches(3))
    model.frozen.requires_grad_(True)
    compression.switch("dgc:ratio=0.1")
    model.frozen.requires_grad_(False)
    train(model, wrapped, batches(3))
    assert_replicas_identical(model)
    assert (
        "shared.weight" in compression.stats_by_tensor()
        and "frozen.weight" not in compression.stats_by_tensor()
    )


@case(2)
def the_optimizers_momentum_decides_what_is_owed():
    """Also where dgc has another, or a scheduler has changed it since the last step: in the end all
    that has come moves the parameters."""
    for told, changed in (
        ("dgc:ratio=0.05,masking=false,momentum=0.5,min_numel=0", 0.9),
        ("dgc:ratio=0.05,masking=false,min_numel=0", 0.5),
    ):
        weight = torch.nn.Parameter(torch.zeros(40, 60))
        optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
        compression = hvdc.Compression.from_spec(told)
        wrapped = hvd.DistributedOptimizer(
            optimizer, named_parameters=[("weight", weight)], compression=compression
        )
        gradient = torch.randn(40, 60, generator=torch.Generator().manual_seed(hvd.rank()))
        whole = 2.0 if "momentum=0.5" in told else 10.0
        expected = -whole * hvd.allreduce(gradient, name="come")
        for step in range(200):
            if step == 1:
                wrapped.param_groups[0]["momentum"] = changed
                compression.switch("none")
            wrapped.zero_grad()
            (weight * (gradient if step == 0 else torch.zeros_like(gradient))).sum().backward()
            wrapped.step()
        assert (weight - expected).abs().max() < 1e-3 * expected.abs().max(), told


@case(2)
def a_commit_keeps_the_switches_to_come():
    model = model_of()
    optimizer = sgd(model)
    compression = hvdc.Compression.topk(optimizer, named_parameters=model.named_parameters())
    wrapped = wrap(model, optimizer, compression)
    compression.switch("adacomp", at=4)
    train(model, wrapped, batches(2))
    kept = Kept(compression._session)
    committed = kept.entry()
    for _ in range(2):
        train(model, wrapped, batches(4))
        assert compression.config["id"] == "adacomp"
        # As an elastic state does after a failure.
        kept.go_back_to(committed)
        assert compression.config["id"] == "topk"


@case(2)
def samples_are_not_told_apart_from_the_middle_of_a_step():
    for moments in ("per_sample", "microbatch"):
        with raises(
            ValueError, f"moments={moments} cannot begin at a step's first gradient", "without at"
        ):
            hvdc.Compression.auto(candidates=["none", f"variance:moments={moments}"])
        model = model_of()
        optimizer = sgd(model)
        with raises(ValueError, f"moments={moments} cannot begin"):
            hvdc.Compression.topk(optimizer, named_parameters=model.named_parameters()).switch(
                f"variance:moments={moments}", at=3
            )
