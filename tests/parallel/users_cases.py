"""What users do beside the plain training loop, on real ranks: it works as without compression, or
an error says why not.

run_cases.py runs the cases, test_users.py asks.
"""

import contextlib
import functools
import itertools
import os
import signal
import threading
import time
import warnings

import horovod.torch as hvd
import torch
from cases.samples import NEVER_SENT, assert_variances_are, sums_of_squares
from cases.training import (  # noqa: F401
    DENSE,
    assert_close,
    assert_replicas_identical,
    batches,
    flat,
    model_of,
    sgd,
    start,
    train,
    wrap,
)
from checks import raises, registry
from torch import nn

import horovod_compress.torch as hvdc
from horovod_compress import MismatchError
from horovod_compress.protocol import handshake
from horovod_compress.session import notices

CASES, case = registry()


@contextlib.contextmanager
def all_warnings():
    """Records warnings, those too that other cases had before."""
    notices._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def warned_of(caught, *words):
    return any(all(word in str(warning.message) for word in words) for warning in caught)


@case(2)
def a_compiled_step_keeps_momentum_and_weight_decay():
    reference, model = model_of(), model_of()
    train(
        reference,
        wrap(reference, sgd(reference, weight_decay=0.01), hvd.Compression.none),
        batches(10),
    )
    optimizer = sgd(model, weight_decay=0.01)
    wrapped = wrap(
        model,
        optimizer,
        hvdc.Compression.from_spec(DENSE, optimizer, named_parameters=model.named_parameters()),
    )
    wrapped.step = torch.compile(wrapped.step, backend="eager")  # what matters is what is traced
    train(model, wrapped, batches(10))
    saved = wrapped.state_dict()["param_groups"][0]
    assert (saved["momentum"], saved["weight_decay"]) == (0.9, 0.01), saved
    x, y = next(batches(1, seed=5))
    losses = [nn.functional.cross_entropy(net(x), y).item() for net in (reference, model)]
    assert abs(losses[1] - losses[0]) < 1e-5 * losses[0], losses
    assert_close(model, reference)


@case(2)
def a_step_that_is_compiled_with_its_backward_pass():
    models = []
    for compression in (hvd.Compression.none, *map(hvdc.Compression.from_spec, ("none", DENSE))):
        # With the layers of Net, Horovod itself fails here.
        model = model_of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Linear(32, 10)))
        optimizer = wrap(model, sgd(model), compression)

        def step(x, y, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        torch._dynamo.reset()  # else it may have given up at functions of the one before
        compiled = torch.compile(step, backend="eager")
        for x, y in batches(4):
            compiled(x, y)
        models.append(model)
    assert torch.equal(flat(models[1]), flat(models[0]))
    assert_close(models[2], models[0])


@case(2)
def a_compiled_step_exchanges_parameters():
    """As one that is not compiled."""
    kinds = (
        functools.partial(hvdc.UpdateOptimizer, compression="topk:min_numel=0,ratio=0.1"),
        functools.partial(hvdc.DecentralizedOptimizer, compression="qsgd"),
    )
    for kind in kinds:
        models = [model_of(), model_of()]
        for model, compiles in zip(models, (False, True)):
            optimizer = kind(sgd(model), named_parameters=model.named_parameters(), every=2)
            if compiles:
                optimizer.step = torch.compile(optimizer.step, backend="eager")
            train(model, optimizer, batches(4))
            assert optimizer.local_steps == 0
        assert torch.equal(*map(flat, models))


class Decoupled(torch.optim.SGD):
    """SGDW: weight decay beside momentum, in a step() of its own."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(buffer, alpha=group["lr"])


class Renamed(torch.optim.SGD):
    """SGD by another name."""


@case(2)
def momentum_of_an_sgd_with_a_step_of_its_own_stays_with_it():
    models = model_of(), model_of()
    with raises(ValueError, "Decoupled has a step() of its own", "momentum=0"):
        hvdc.Compression.dgc(
            Decoupled(models[1].parameters(), lr=0.05, momentum=0.9),
            named_parameters=models[1].named_parameters(),
        )
    for model, spec in zip(models, (None, "dgc:ratio=1,momentum=0")):
        optimizer = Decoupled(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        compression = (
            hvdc.Compression.from_spec(spec, optimizer, named_parameters=model.named_parameters())
            if spec
            else hvd.Compression.none
        )
        train(model, wrap(model, optimizer, compression), batches(10))
    assert_close(models[1], models[0])
    reference, model = model_of(), model_of()
    train(reference, wrap(reference, sgd(reference), hvd.Compression.none), batches(10))
    optimizer = Renamed(model.parameters(), lr=0.05, momentum=0.9)
    train(
        model,
        wrap(
            model,
            optimizer,
            hvdc.Compression.from_spec(DENSE, optimizer, named_parameters=model.named_parameters()),
        ),
        batches(10),
    )
    assert_close(model, reference)


@case(2)
def two_optimizers_in_two_threads():
    """In the middle of each step of the first, another thread takes a step of the second."""
    trained = []
    for spec in (None, DENSE):
        models, optimizers = [model_of(seed=seed) for seed in (0, 1)], []
        for model in models:
            optimizer = sgd(model, weight_decay=0.01)
            compression = (
                hvdc.Compression.from_spec(
                    spec, optimizer, named_parameters=model.named_parameters()
                )
                if spec
                else hvd.Compression.none
            )
            optimizers.append(wrap(model, optimizer, compression))
        train(models[0], optimizers[0], batches(1))
        calls = itertools.count()

        def step_of_the_other(*_, models=models, optimizers=optimizers, calls=calls):
            if next(calls) % 2:  # Horovod's step, and in it SGD's
                thread = threading.Thread(target=train, args=(models[1], optimizers[1], batches(1)))
                thread.start()
                thread.join()

        optimizers[0].register_step_pre_hook(step_of_the_other)
        train(models[0], optimizers[0], batches(10))
        assert next(calls) == 20
        trained.append(models)
    for model, reference in zip(trained[1], trained[0]):
        assert_close(model, reference, 1e-5)
        assert_replicas_identical(model)


# -- steps that nobody uses


def ones(
    spec,
    wrapped_of=lambda model, optimizer, compression: wrap(model, optimizer, compression),
    **options,
):
    """(weight, compression, Horovod's optimizer) of 64 · 64 parameters under plain SGD with a
    learning rate of 1."""
    model = nn.Linear(64, 64, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    compression = hvdc.Compression.from_spec(
        spec, optimizer, named_parameters=model.named_parameters(), **options
    )
    return model.weight, compression, wrapped_of(model, optimizer, compression)


def moved(weight, compression):
    """How far parameters have gone, and will go by what is kept: the mean over elements and
    ranks."""
    kept = 0.0
    for arrays in compression.state_dict()["tensors"].values():
        kept += sum(
            array.mean().item() for key, array in arrays.items() if key in ("residual", "v", "r")
        )
    return -weight.detach().mean().item() + hvd.allreduce(torch.tensor(kept), name="kept").item()


@case(2)
def steps_that_a_grad_scaler_skips_are_not_replayed():
    """60 steps of gradient 1, of which 6 overflow, in one element on one rank, while the scale
    halves."""
    for spec in ("none", "powersgd:min_numel=0", "topk:ratio=0.1", "dgc:ratio=0.1", "adacomp"):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=25)
        weight, compression, optimizer = ones(spec, grad_scaler=scaler)
        for step in range(60):
            optimizer.zero_grad()
            gradient = torch.ones(64, 64)
            if step % 10 == 9 and hvd.rank() == 1:
                gradient[3, 7] = float("inf")
            scaler.scale((weight * gradient).sum()).backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**4
        assert compression.stats()["steps_undone"] == 6
        distance = moved(weight, compression)
        assert abs(distance - 54) < 1e-3, f"{spec}: moved by {distance}"


@case(2)
def a_change_of_scale_changes_nothing():
    """Powers of two: bit for bit what training without a scaler gives, state included, and after
    loading too."""
    for spec in (
        "dgc:ratio=0.02,clip_norm=0.5",
        "adacomp",
        "powersgd:rank=2",
        "variance:tau=0.001",
    ):
        trained = []
        for scale in (None, 2.0**4):
            model = model_of()
            optimizer = sgd(model)
            scaler = scale and torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
            make = functools.partial(
                hvdc.Compression.from_spec,
                spec,
                optimizer,
                named_parameters=model.named_parameters(),
                grad_scaler=scaler,
            )
            compression = make()
            wrapped = wrap(model, optimizer, compression)
            for x, y in batches(10):
                wrapped.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                (scaler.scale(loss) if scaler else loss).backward()
                wrapped.synchronize()
                with wrapped.skip_synchronize():
                    scaler.step(wrapped) if scaler else wrapped.step()
                scaler and scaler.update()
            trained.append(
                (
                    flat(model),
                    compression.state_dict()["tensors"],
                    compression.stats()["residual_norm"],
                )
            )
        assert scaler.get_scale() == 2.0**7
        (expected, state, norm), (found, its, its_norm) = trained
        assert torch.equal(found, expected), (
            f"{spec}: parameters differ by {(found - expected).abs().max()}"
        )
        for name, arrays in state.items():
            for key, array in arrays.items():
                assert torch.equal(its[name][key], array), (spec, name, key)
        assert abs(its_norm - norm) <= 1e-6 * norm
        again = make()
        again.load_state_dict(compression.state_dict())
        for name, arrays in again.state_dict()["tensors"].items():
            for key, array in arrays.items():
                assert torch.equal(array, state[name][key]), (spec, name, key)


@case(2)
def a_scaler_that_the_compression_does_not_know_is_named():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for spec, keeps in (("fp16", False), ("topk", True)):
        weight, _, optimizer = ones(spec)
        scaler.scale(weight.sum()).backward()
        optimizer.synchronize()
        with all_warnings() as caught, optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        assert warned_of(caught, "grad_scaler=") == keeps, spec
    with raises(TypeError, "grad_scaler must be"):
        ones("topk", grad_scaler=4.0)


@case(2)
def discarded_gradients_do_not_come_back():
    """backward(), synchronize(), zero_grad(): a bad batch, or a GAN's generator pass. Bit for bit
    as if it had never been."""
    nesterov = "dgc:sample_ratio=1,nesterov=true,momentum=0.9,dense=fp16"
    for spec in (
        "topk:sample_ratio=1",
        "dgc:sample_ratio=1",
        nesterov,
        "adacomp",
        "powersgd:rank=2",
    ):
        trained = []
        for bad in (False, True):
            model = model_of()
            optimizer = sgd(model, weight_decay=0.01)
            compression = hvdc.Compression.from_spec(
                spec, optimizer, named_parameters=model.named_parameters(), discardable=True
            )
            wrapped = wrap(model, optimizer, compression)
            for step, (x, y) in enumerate(batches(6)):
                if bad and step % 2:
                    (nn.functional.cross_entropy(model(x), y) * 1e6).backward()
                    wrapped.synchronize()
                    wrapped.zero_grad()
                    if step == 3:
                        # Ends the step before it is known what becomes of it.
                        compression.stats()
                    if step == 5:
                        compression.discard()
                train(model, wrapped, [(x, y)])
            trained.append((flat(model), compression.state_dict()["tensors"]))
            assert compression.stats()["steps_undone"] == (3 if bad else 0)
        for name, arrays in trained[0][1].items():
            for key, array in arrays.items():
                assert torch.equal(trained[1][1][name][key], array), (spec, name, key)
        assert torch.equal(trained[0][0], trained[1][0]), spec
        assert_replicas_identical(model)


@case(2)
def discarded_gradients_that_are_kept_are_told():
    weight, compression, optimizer = ones("topk")
    with raises(RuntimeError, "discardable=True"):
        compression.discard()
    with all_warnings() as caught:
        for _ in range(2):
            weight.sum().backward()
            optimizer.synchronize()
            optimizer.zero_grad()
    assert warned_of(caught, "discardable=True")


@case(2)
def a_gradient_that_is_changed_while_it_is_exchanged_is_an_error():
    for spec in ("maxnorm", "topk", "none"):
        weight, _, optimizer = ones(spec)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(weight.sum()).backward()
        with raises(RuntimeError, "optimizer.synchronize()", "skip_synchronize()"):
            scaler.step(optimizer)
        # What is under way comes to its end.
        optimizer.synchronize()
        weight, _, optimizer = ones(spec)
        weight.sum().backward()
        nn.utils.clip_grad_norm_([weight], 0.1)
        with raises(RuntimeError, "changed while it was exchanged", "optimizer.synchronize()"):
            optimizer.step()


# -- other ranks, and mistakes


@case(2)
def mistakes_in_elastic_jobs_are_named_and_other_ranks_are_noticed():
    alone = [hvd.add_process_set([rank]) for rank in range(2)]
    model, mine = model_of(), alone[hvd.rank()]
    optimizer = sgd(model)
    os.environ["HOROVOD_ELASTIC"] = "1"
    try:
        with raises(
            ValueError, "in an elastic job Horovod forgets process sets", "leave process_set out"
        ):
            hvdc.Compression.dgc(
                optimizer, named_parameters=model.named_parameters(), process_set=mine
            )
        weight, _, optimizer_without_state = ones("topk")
        with raises(RuntimeError, "hvd.elastic.TorchState(", "compression=compression"):
            weight.sum().backward()
            optimizer_without_state.step()
    finally:
        del os.environ["HOROVOD_ELASTIC"]
    compression = hvdc.Compression.dgc(
        optimizer, named_parameters=model.named_parameters(), process_set=mine
    )
    wrapped = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), compression, process_set=mine
    )
    train(model, wrapped, batches(2))
    for process_set in alone:
        hvd.remove_process_set(process_set)
    with raises(RuntimeError, "made for rank 0 of 1", "Make a new one after hvd.init()"):
        train(model, wrapped, batches(1))


@case(2)
def what_is_no_compression_says_so():
    for mistake in (hvdc.Compression.dgc, hvdc.Compression.from_spec, hvdc.Compression):
        model = model_of()
        wrapped = hvd.DistributedOptimizer(
            sgd(model), named_parameters=model.named_parameters(), compression=mistake
        )
        with raises(TypeError, "call it, as in compression="):
            train(model, wrapped, batches(1))
    model = model_of()
    for arguments in ((model,), (model.parameters(),), (hvd.DistributedOptimizer,)):
        with raises(
            TypeError, "bound to a torch optimizer, its first argument, not to an object of"
        ):
            hvdc.Compression.dgc(*arguments)
    for arguments in ((sgd(model), 0.01), (sgd(model), model.named_parameters(), 0.01)):
        with raises(TypeError, "0.01", "an option goes by its name: ratio=0.01"):
            hvdc.Compression.dgc(*arguments)


@case(2)
def one_generator_for_both_calls():
    reference, model = model_of(), model_of()
    train(reference, wrap(reference, sgd(reference), hvd.Compression.none), batches(3))
    optimizer, named = sgd(model), model.named_parameters()
    compression = hvdc.Compression.from_spec(DENSE, optimizer, named_parameters=named)
    train(
        model,
        hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression),
        batches(3),
    )
    assert_close(model, reference)
    with raises(ValueError, "used up", "model.named_parameters()"):
        hvdc.Compression.dgc(sgd(model), named_parameters=named)


@case(2)
def a_rank_that_does_not_come_is_waited_for_with_a_warning():
    handshake.STALLED, stalled = 0.5, handshake.STALLED
    try:
        with all_warnings() as caught:
            weight, _, optimizer = ones("topk")
            if hvd.rank() == 1:
                time.sleep(1.5)
            weight.sum().backward()
            optimizer.step()
            assert hvd.rank() == 1 or warned_of(
                caught,
                "not all 2 ranks have come to their first gradient with this compression yet",
            )
        with all_warnings() as caught:
            weight, compression, optimizer = ones("topk")
            if hvd.rank() == 0:
                time.sleep(1.5)
            compression.handshake()
            assert hvd.rank() == 0 or warned_of(
                caught, "come to their first gradient with this compression"
            )
            weight.sum().backward()
            optimizer.step()
    finally:
        handshake.STALLED = stalled


@case(2)
def a_rank_that_waits_leaves_the_processor():
    """Horovod's own wait is a loop that takes as much of a core as it gets."""
    parameter = nn.Parameter(torch.zeros(1000))
    updates = hvdc.UpdateOptimizer(
        torch.optim.SGD([parameter], lr=0.1),
        named_parameters=[("w", parameter)],
        compression="topk",
    )
    for weight, optimizer in (ones("topk")[::2], (parameter, updates)):
        for late in (False, True):
            optimizer.zero_grad()
            if late and hvd.rank() == 1:
                time.sleep(2)
            weight.sum().backward()
            began = time.thread_time()
            optimizer.step()
            assert hvd.rank() == 1 or time.thread_time() - began < 0.5


@case(2)
def an_error_of_a_signals_handler_comes_through_a_wait():
    """As a watchdog's does. The step can be taken again."""

    def raise_error(*_):
        raise ValueError("it takes too long")

    weight, _, optimizer = ones("topk")
    before = signal.signal(signal.SIGALRM, raise_error)
    try:
        for late in (False, True):
            optimizer.zero_grad()
            if late and hvd.rank() == 1:
                hvd.allreduce(torch.zeros(1), name="rank 0 has waited")
            weight.sum().backward()
            if late and hvd.rank() == 0:
                signal.setitimer(signal.ITIMER_REAL, 0.5)
                with raises(ValueError, "it takes too long"):
                    optimizer.step()
                hvd.allreduce(torch.zeros(1), name="rank 0 has waited")
            optimizer.step()
    finally:
        signal.signal(signal.SIGALRM, before)
    weights = hvd.allgather(weight.detach()[None], name="weights")
    assert torch.equal(weights[0], weights[1])


@case(2)
def a_step_before_its_results_is_refused():
    """On all ranks alike, and training goes on."""
    weight, _, optimizer = ones("topk")
    for early in (False, True, False):
        optimizer.zero_grad()
        weight.sum().backward()
        if early:
            with (
                raises(RuntimeError, "a step came before its results"),
                optimizer.skip_synchronize(),
            ):
                optimizer.step()
        else:
            optimizer.step()


@case(2)
def a_scalers_step_that_comes_too_early_is_refused_before_it_waits():
    """Rank 0 skips the step, because its gradients overflow, and does not hand over what rank 1 has
    handed over first."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = sgd(model)
    optimizer = wrap(
        model,
        optimizer,
        hvdc.Compression.topk(
            optimizer, named_parameters=model.named_parameters(), grad_scaler=scaler
        ),
    )
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    if hvd.rank() == 1:
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        with raises(RuntimeError, "GradScaler.step() came before"):
            scaler.step(optimizer)
    # Else rank 0's infinities might be in rank 1's gradients already, and it skipped its step, too.
    hvd.allreduce(torch.zeros(1), name="rank 1 was refused")
    if hvd.rank() == 0:
        scaler.scale(model[0](torch.ones(2, 4)).sum() * float("inf")).backward()
        scaler.step(optimizer)
    optimizer.synchronize()
    assert not torch.isfinite(model[0].weight.grad).all()


@case(2)
def options_that_were_not_broadcast_say_so():
    model = model_of()
    optimizer = sgd(model, lr=0.1 if hvd.rank() == 0 else 0.2)
    compression = hvdc.Compression.dgc(optimizer, named_parameters=model.named_parameters())
    wrapped = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    with raises(
        MismatchError,
        "parameter group 0.lr",
        "hvd.broadcast_optimizer_state(optimizer, root_rank=0)",
    ):
        train(model, wrapped, batches(1))


@case(2)
def a_compression_that_is_not_used_is_told_at_the_first_step():
    model = model_of()
    optimizer = sgd(model)
    compression = hvdc.Compression.topk(optimizer, named_parameters=model.named_parameters())
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    with all_warnings() as caught:
        train(model, wrapped, batches(1))
    assert warned_of(caught, repr(compression), "is not used", "compression=")
    with all_warnings() as caught:
        train(model, wrapped, batches(1))
        used = model_of()
        optimizer = sgd(used)
        train(
            used,
            wrap(
                used,
                optimizer,
                hvdc.Compression.topk(optimizer, named_parameters=used.named_parameters()),
            ),
            batches(2),
        )
    assert not warned_of(caught, "is not used")


@case(2)
def samples_of_a_compiled_model():
    """They are told apart at graph breaks; a model that is to be compiled without any is refused by
    torch.compile."""
    model, (x, y) = model_of(), next(batches(1))
    model.norm = nn.GroupNorm(2, 8)
    optimizer = sgd(model)
    compression = hvdc.Compression.from_spec(
        f"{NEVER_SENT},moments=per_sample", optimizer, named_parameters=model.named_parameters()
    )
    wrapped = wrap(model, optimizer, compression)
    with raises(Exception, "torch.compiler.disable"):
        torch.compile(model, backend="eager", fullgraph=True)(x)
    expected = sums_of_squares(model, [(x, y)], per_sample=True)
    nn.functional.cross_entropy(torch.compile(model, backend="eager")(x), y).backward()
    wrapped.step()
    assert_variances_are(compression, expected)
