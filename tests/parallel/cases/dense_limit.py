"""The dense limit: where everything is sent, parameters are those of plain Horovod."""

import horovod.torch as hvd
import torch
from checks import registry
from torch import nn

import horovod_compress.torch as hvdc

from .training import (
    DENSE,
    assert_close,
    assert_replicas_identical,
    batches,
    compressed,
    model_of,
    sgd,
    train,
    wrap,
)

CASES, case = registry()


@case(2, 3)
def dense_limit():
    for nesterov in (False, True):
        for weight_decay in (0, 0.01):
            for spec in (DENSE, DENSE + ",min_numel=0"):
                options = {"nesterov": nesterov, "weight_decay": weight_decay}
                reference, model = model_of(), model_of()
                train(
                    reference,
                    wrap(reference, sgd(reference, **options), hvd.Compression.none),
                    batches(20),
                )
                compressed(model, sgd(model, **options), steps=20, spec=spec)
                assert_close(model, reference)
                assert_replicas_identical(model)


@case(2)
def dense_limit_through_gathered_payloads():
    """At 16-bit values a full density still moves less than dense on 2 ranks, so it is gathered.
    Gradients of few significant bits survive that exactly."""
    reference, model = nn.Linear(40, 40, bias=False), nn.Linear(40, 40, bias=False)
    model.load_state_dict(reference.state_dict())
    for net, spec in (
        (reference, None),
        (model, "dgc:ratio=1,masking=false,momentum=0,values=bf16"),
    ):
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
            lr=0.05,
            momentum=0.9,
            weight_decay=0.01,
        )

    models = model_of(), model_of()
    for model, spec in zip(models, (None, DENSE)):
        optimizer = optimizer_of(model)
        compression = (
            hvdc.Compression.from_spec(spec, optimizer, named_parameters=model.named_parameters())
            if spec
            else hvd.Compression.none
        )
        wrapped = wrap(model, optimizer, compression)
        for step, batch in enumerate(batches(20)):
            if step == 10:
                wrapped.param_groups[0]["momentum"] = 0.7
            train(model, wrapped, [batch])
    assert_close(models[1], models[0])
    assert [group["momentum"] for group in wrapped.param_groups] == [0.7, 0, 0.9]
