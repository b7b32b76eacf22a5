"""Replicas stay identical, and nothing is scaled wrongly, under every option of
hvd.DistributedOptimizer."""

import alike
import horovod.torch as hvd
import torch
from checks import raises, registry
from torch import nn

import horovod_compress.torch as hvdc

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


@case(2, 3, 4)
def replicas_identical_after_100_steps():
    model = model_of()
    compression = compressed(
        model, sgd(model, nesterov=True, weight_decay=1e-4), 100, "dgc:ratio=0.001"
    )
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
                train(
                    reference,
                    wrap(reference, sgd(reference, lr=0.01), hvd.Compression.none, **options),
                    batches(10),
                )
                assert_close(model, reference)


@case(2, 4, 8)
def clip_norm_limits_the_update_as_clip_grad_norm_does():
    """Where the ranks' gradients are independent and far above the limit, the update has the norm
    that vanilla clipping gives it."""
    for options in ({}, {"op": hvd.Sum}, {"gradient_predivide_factor": 4.0}):
        for spec in (
            None,
            "dgc:ratio=1,momentum=0,clip_norm=1,min_numel=0",
            "dgc:ratio=0.5,momentum=0,clip_norm=1",
        ):
            torch.manual_seed(hvd.rank())
            noise = {"matrix": torch.randn(80, 100), "bias": torch.randn(900)}
            norm = torch.cat([tensor.flatten() for tensor in noise.values()]).norm()
            params = {
                name: nn.Parameter(torch.zeros_like(tensor)) for name, tensor in noise.items()
            }
            optimizer = torch.optim.SGD(params.values(), lr=1.0)
            compression = (
                hvdc.Compression.from_spec(spec, optimizer, named_parameters=params.items())
                if spec
                else hvd.Compression.none
            )
            optimizer = hvd.DistributedOptimizer(
                optimizer, named_parameters=params.items(), compression=compression, **options
            )
            sum(
                (10 * hvd.size() / norm * noise[name] * param).sum()
                for name, param in params.items()
            ).backward()
            optimizer.synchronize()
            if spec is None:
                nn.utils.clip_grad_norm_(params.values(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
            update = torch.cat([param.detach().flatten() for param in params.values()])
            # What was not sent yet is in the residual, and no part of the limit.
            if spec and "0.5" in spec:
                assert update.norm() < 1.1, f"{options}, {spec}: {update.norm()}"
            else:
                assert 0.9 < update.norm() < 1.1, f"{options}, {spec}: {update.norm()}"


@case(3)
def payloads_that_would_move_more_than_dense_ones_go_dense():
    """29 bits an element from 3 ranks move more than a ring allreduce of 32: the mean is plain
    Horovod's, and so are the bytes."""
    reference, model = model_of(), model_of()
    train(reference, wrap(reference, sgd(reference, momentum=0), hvd.Compression.none), batches(5))
    optimizer = sgd(model, momentum=0)
    compression = hvdc.Compression.randomk(
        optimizer, named_parameters=model.named_parameters(), ratio=0.9
    )
    train(model, wrap(model, optimizer, compression), batches(5))
    assert_close(model, reference)
    assert_replicas_identical(model)
    dense = compression.stats()["dense_bytes"]
    assert alike.sent_of_tensors(compression) == dense, compression.stats()


@case(2)
def average_sum_and_predivide_scale_gathered_payloads_alike():
    """The same gathered entries: Sum is twice Average on 2 ranks, a predivide factor changes
    nothing."""
    updates = {}
    for label, options in (
        ("average", {}),
        ("predivide", {"gradient_predivide_factor": 4.0}),
        ("sum", {"op": hvd.Sum}),
    ):
        model = nn.Linear(64, 64, bias=False)
        nn.init.zeros_(model.weight)
        compressed_optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        compression = hvdc.Compression.dgc(
            compressed_optimizer, named_parameters=model.named_parameters(), ratio=0.05
        )
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
        compression = (
            hvdc.Compression.from_spec(spec, optimizer, named_parameters=model.named_parameters())
            if spec
            else hvd.Compression.none
        )
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
    compression = hvdc.Compression.from_spec(
        DENSE, optimizer, named_parameters=model.named_parameters(), process_set=pair
    )
    plain = hvd.DistributedOptimizer(
        sgd(reference, weight_decay=0.01),
        named_parameters=reference.named_parameters(),
        process_set=pair,
    )
    wrapped = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        process_set=pair,
    )
    train(reference, plain, batches(10))
    train(model, wrapped, batches(10))
    # On rank 1, which is outside, too: there nothing was taken over.
    assert_close(model, reference)
    sparse = model_of()
    optimizer = sgd(sparse)
    compression = hvdc.Compression.dgc(
        optimizer, named_parameters=sparse.named_parameters(), process_set=pair, ratio=0.01
    )
    wrapped = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=sparse.named_parameters(),
        compression=compression,
        process_set=pair,
    )
    train(sparse, wrapped, batches(10))
    if hvd.rank() != 1:
        assert_replicas_identical(sparse, pair)
        assert compression.stats()["steps"] == 10
    else:
        assert compression.stats()["steps"] == 0
    for its, reducing in ((hvd.global_process_set, pair), (pair, hvd.global_process_set)):
        model = model_of()
        compression = hvdc.Compression.topk(
            sgd(model), named_parameters=model.named_parameters(), process_set=its
        )
        wrapped = hvd.DistributedOptimizer(
            sgd(model), model.named_parameters(), compression, process_set=reducing
        )
        if reducing.included():
            with raises(ValueError, "is for the process set", "give both the same process_set"):
                train(model, wrapped, batches(1))
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
        compression = hvdc.Compression.dgc(
            optimizer, named_parameters=model.named_parameters(), ratio=0.01
        )
        wrapped = wrap(model, optimizer, compression)
        for step, (x, y) in enumerate(batches(20)):
            # Different branches on different ranks.
            model.train((step + hvd.rank()) % 3 != 0)
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
            yield (
                torch.randint(0, 100, (8, 4), generator=generator),
                torch.randint(0, 10, (8,), generator=generator),
            )

    reference, model = model_of(Embeddings), model_of(Embeddings)
    for net, spec in ((reference, None), (model, DENSE)):
        optimizer = sgd(net, momentum=0)
        compression = (
            hvdc.Compression.from_spec(spec, optimizer, named_parameters=net.named_parameters())
            if spec
            else hvd.Compression.none
        )
        train(net, wrap(net, optimizer, compression, sparse_as_dense=True), words(10))
    assert_close(model, reference)

    model = model_of(Embeddings)
    optimizer = sgd(model)
    compression = hvdc.Compression.dgc(
        optimizer, named_parameters=model.named_parameters(), ratio=0.01
    )
    train(model, wrap(model, optimizer, compression, sparse_as_dense=True), words(10))
    assert_replicas_identical(model)
    assert compression.stats()["steps"] == 10

    # Two gradients of one shape that are both zero, on one rank; the second one comes first.
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = (nn.Embedding(100, 32, sparse=True) for _ in range(2))

        def forward(self, words):
            return (self.left(words) * self.right(99 - words)).sum(2)

    model = model_of(Product)
    optimizer = sgd(model, momentum=0)
    compression = hvdc.Compression.topk(optimizer, named_parameters=model.named_parameters())
    wrapped = wrap(model, optimizer, compression, sparse_as_dense=True)
    # Dense zeros of the broadcast.
    model.zero_grad()
    for step, (x, _) in enumerate(words(5)):
        model.zero_grad(set_to_none=False)
        weight = 0 if hvd.rank() == 1 and step == 2 else 1
        (model(x).square().mean() * weight).backward()
        wrapped.step()
    assert_replicas_identical(model)

    # Horovod's own sparse path: fine without momentum, an error with it.
    model = model_of(Embeddings)
    optimizer = sgd(model, momentum=0)
    compression = hvdc.Compression.dgc(
        optimizer, named_parameters=model.named_parameters(), ratio=0.01
    )
    wrapped = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    train(model, wrapped, words(3))
    assert_replicas_identical(model)
    model = model_of(Embeddings)
    optimizer = sgd(model)
    compression = hvdc.Compression.dgc(
        optimizer, named_parameters=model.named_parameters(), ratio=0.01
    )
    wrapped = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
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
                model = convert(
                    nn.Sequential(
                        nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(256, 10)
                    )
                )
                optimizer = sgd(model, lr=0.01, weight_decay=0.01)
                compression = hvdc.Compression.from_spec(
                    spec, optimizer, named_parameters=model.named_parameters()
                )
                # Horovod 0.28.1 broadcasts neither bfloat16 nor channels_last.
                for p in model.parameters():
                    p.data.copy_(hvd.broadcast(p.detach().float().contiguous(), 0))
                wrapped = hvd.DistributedOptimizer(
                    optimizer,
                    named_parameters=model.named_parameters(),
                    compression=compression,
                    groups=groups,
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
        compression = (
            hvdc.Compression.from_spec(spec, optimizer, named_parameters=model.named_parameters())
            if spec
            else hvd.Compression.none
        )
        wrapped = wrap(model, optimizer, compression)
        for x, y in batches(10):
            wrapped.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            wrapped.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with wrapped.skip_synchronize():
                wrapped.step()
    assert_close(models[1], models[0])

    # Weight decay once a step, whether the user synchronizes or step() does.
    model = model_of()
    reference = model_of()
    for net, manual in ((reference, False), (model, True)):
        optimizer = sgd(net, weight_decay=0.1)
        compression = hvdc.Compression.dgc(
            optimizer, named_parameters=net.named_parameters(), ratio=0.01
        )
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
