"""What users do beside the plain training loop, on real ranks: it works as without compression, or an error says why not.

run_cases.py runs the cases, test_users.py asks.
"""
import itertools
import threading

import horovod.torch as hvd
import torch
from cases import DENSE, Net, assert_close, assert_replicas_identical, batches, model_of, sgd, start, train, wrap  # noqa: F401
from checks import raises, registry
from torch import nn

import horovod_compress.torch as hvdc

CASES, case = registry()


@case(2)
def a_compiled_step_keeps_momentum_and_weight_decay():
    reference, model = model_of(), model_of()
    train(reference, wrap(reference, sgd(reference, weight_decay=0.01), hvd.Compression.none), batches(10))
    optimizer = sgd(model, weight_decay=0.01)
    wrapped = wrap(model, optimizer, hvdc.Compression.from_spec(DENSE, optimizer, model.named_parameters()))
    wrapped.step = torch.compile(wrapped.step, backend="eager")  # what matters is what is traced
    train(model, wrapped, batches(10))
    saved = wrapped.state_dict()["param_groups"][0]
    assert (saved["momentum"], saved["weight_decay"]) == (0.9, 0.01), saved
    x, y = next(batches(1, seed=5))
    losses = [nn.functional.cross_entropy(net(x), y).item() for net in (reference, model)]
    assert abs(losses[1] - losses[0]) < 1e-5 * losses[0], losses
    assert_close(model, reference)


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
        hvdc.Compression.dgc(Decoupled(models[1].parameters(), lr=0.05, momentum=0.9), models[1].named_parameters())
    for model, spec in zip(models, (None, "dgc:ratio=1,momentum=0")):
        optimizer = Decoupled(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        compression = hvdc.Compression.from_spec(spec, optimizer, model.named_parameters()) if spec else hvd.Compression.none
        train(model, wrap(model, optimizer, compression), batches(10))
    assert_close(models[1], models[0])
    reference, model = model_of(), model_of()
    train(reference, wrap(reference, sgd(reference), hvd.Compression.none), batches(10))
    optimizer = Renamed(model.parameters(), lr=0.05, momentum=0.9)
    train(model, wrap(model, optimizer, hvdc.Compression.from_spec(DENSE, optimizer, model.named_parameters())), batches(10))
    assert_close(model, reference)


@case(2)
def two_optimizers_in_two_threads():
    """In the middle of each step of the first, another thread takes a step of the second."""
    trained = []
    for spec in (None, DENSE):
        models, optimizers = [model_of(seed=seed) for seed in (0, 1)], []
        for model in models:
            optimizer = sgd(model, weight_decay=0.01)
            compression = hvdc.Compression.from_spec(spec, optimizer, model.named_parameters()) if spec else hvd.Compression.none
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
