"""Compressions that are given to Horovod's optimizer as the only argument, and find out the
rest."""

import copy
import io
import os
import pickle
import tempfile

import horovod.torch as hvd
import torch
from checks import raises, registry
from torch import nn

import horovod_compress.torch as hvdc
from horovod_compress import available

from .training import (
    DENSE,
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


def trained(make, spec, bound, model_cls=None, steps=6, optimizer_of=sgd, **options):
    """(model, compression) after some steps with a compression of either form; options: for
    hvd.DistributedOptimizer."""
    model = model_of(model_cls) if model_cls else model_of()
    optimizer = optimizer_of(model)
    compression = (
        make(spec, optimizer, model)
        if bound
        else pickle.loads(pickle.dumps(hvdc.Compression.from_spec(spec)))
    )
    wrapped = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression, **options
    )
    hvd.broadcast_optimizer_state(wrapped, root_rank=0)
    train(model, wrapped, batches(steps))
    return model, compression


def from_spec(spec, optimizer, model, **options):
    return hvdc.Compression.from_spec(
        spec, optimizer, named_parameters=model.named_parameters(), **options
    )


def assert_as_bound(spec, **options):
    """Both forms train to the same parameters, and keep the same."""
    (model, bound), (again, unbound) = (
        trained(from_spec, spec, form, **options) for form in (True, False)
    )
    assert torch.equal(flat(model), flat(again)), spec
    assert repr(bound.state_dict()) == repr(unbound.state_dict()), spec
    assert (
        unbound.config == bound.config
        and unbound.stats()["bytes_sent"] == bound.stats()["bytes_sent"] > 0
    )


@case(2)
def an_unbound_compression_trains_as_a_bound_one():
    for id in available():
        assert_as_bound(f"{id}:min_numel=0" if "min_numel" in available()[id]["options"] else id)


@case(2)
def an_unbound_compression_finds_the_options_of_optimizers():
    decayed = lambda model: sgd(model, weight_decay=0.01, nesterov=True)  # noqa: E731
    adam = lambda model: torch.optim.AdamW(model.parameters(), 1e-3)  # noqa: E731
    groups = lambda model: torch.optim.SGD(  # noqa: E731
        [
            {"params": model.conv.parameters(), "momentum": 0.5},
            {"params": [*model.shared.parameters(), *model.out.parameters()]},
        ],
        0.05,
        0.9,
    )
    for optimizer_of in (decayed, adam):
        assert_as_bound("dgc:ratio=0.01", optimizer_of=optimizer_of)
    for spec in ("dgc:ratio=0.01,clip_norm=0.1", "efsignsgd"):
        assert_as_bound(spec, optimizer_of=lambda model: sgd(model, momentum=0))
    for options in (
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
        {"backward_passes_per_step": 1},
    ):
        assert_as_bound("dgc:ratio=0.01,clip_norm=0.1", **options)

    models = []
    # Names are the compression's own where Horovod was given none, as they are on ranks of all
    # kinds.
    for bound in (True, False):
        model = model_of()
        model.norm.requires_grad_(False)
        optimizer = groups(model)
        compression = (
            hvdc.Compression.randomk(optimizer, ratio=0.1)
            if bound
            else hvdc.Compression.randomk(ratio=0.1)
        )
        train(model, hvd.DistributedOptimizer(optimizer, compression=compression), batches(5))
        models.append(model)
    assert torch.equal(*map(flat, models))

    # Momentum and weight decay are counted once.
    reference, model = model_of(), model_of()
    train(reference, wrap(reference, decayed(reference), hvd.Compression.none), batches(10))
    train(model, wrap(model, decayed(model), hvdc.Compression.from_spec(DENSE)), batches(10))
    assert_close(model, reference)


@case(2)
def horovods_own_compressions_by_spec():
    for spec, own in (("none", hvd.Compression.none), ("fp16", hvd.Compression.fp16)):
        models = [model_of(), model_of()]
        for model, compression in zip(models, (own, hvdc.Compression.from_spec(spec))):
            train(model, wrap(model, sgd(model), compression), batches(8))
        assert_close(*models, tolerance=0 if spec == "none" else 1e-3)


@case(3)
def an_unbound_compression_on_a_process_set():
    pair = hvd.add_process_set([1, 2])
    model = model_of()
    compression = hvdc.Compression.dgc(ratio=0.01)
    wrapped = hvd.DistributedOptimizer(
        sgd(model), model.named_parameters(), compression, process_set=pair
    )
    train(model, wrapped, batches(5))
    if pair.included():
        assert_replicas_identical(model, pair)
    assert compression.stats()["steps"] == (5 if pair.included() else 0)
    hvd.remove_process_set(pair)


class Generator(nn.Sequential):
    """Noise to images."""

    def __init__(self):
        super().__init__(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64))


class Discriminator(nn.Sequential):
    """Images to a score."""

    def __init__(self):
        # Other names: Horovod allows each only once at a time.
        super().__init__(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def step(loss, optimizer, reached):
    """One optimizer's step; reached: those whose parameters get gradients."""
    for each in reached:
        each.zero_grad()
    loss.backward()
    for each in reached:
        each.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()


def adversarial(compressions, steps=8):
    """The networks of a GAN, each trained by an optimizer of its own, and these."""
    nets = [model_of(Generator), model_of(Discriminator)]
    optimizers = []
    for net, compression in zip(nets, compressions):
        optimizer = sgd(net)
        compression = compression(optimizer, net) if callable(compression) else compression
        optimizers.append(wrap(net, optimizer, compression))
    generator, discriminator = nets
    noise = torch.Generator().manual_seed(hvd.rank())
    for x, _ in batches(steps):
        made = generator(torch.randn(8, 16, generator=noise))
        step(
            discriminator(made.detach()).mean() - discriminator(x).mean(),
            optimizers[1],
            optimizers[1:],
        )
        step(-discriminator(made).mean(), optimizers[0], optimizers)
    return nets, optimizers


@case(2)
def one_object_for_two_optimizers():
    spec = "dgc:ratio=0.05,min_numel=0"
    bound, _ = adversarial([lambda optimizer, net: from_spec(spec, optimizer, net)] * 2)
    both = hvdc.Compression.from_spec(spec)
    nets, optimizers = adversarial([both, both])
    for net, same in zip(nets, bound):
        assert torch.equal(flat(net), flat(same))
        assert_replicas_identical(net)
    first, second = map(hvdc.compression_of, optimizers)
    assert (first.stats()["steps"], second.stats()["steps"]) == (8, 16)
    with raises(RuntimeError, "several optimizers", "hvdc.compression_of(optimizer)"):
        both.state_dict()
    assert hvdc.compression_of(sgd(nets[0])) is None


@case(2)
def a_state_is_loaded_before_the_first_gradient():
    def start(seed):
        model = model_of(seed=seed)
        compression = hvdc.Compression.dgc(ratio=0.01, warmup_steps=12)
        with raises(
            RuntimeError,
            "no optimizer has this compression yet",
            "hvd.DistributedOptimizer(compression=…)",
        ):
            compression.stats()
        return model, compression, wrap(model, sgd(model), compression)

    model, compression, optimizer = start(seed=0)
    compression.handshake()
    train(model, optimizer, batches(5))
    saved = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), compression.state_dict()], saved)
    train(model, optimizer, batches(5, seed=1))
    again, its_compression, its_optimizer = start(seed=7)
    saved.seek(0)
    for each, state in zip(
        (again, its_optimizer, its_compression), torch.load(saved, weights_only=True)
    ):
        each.load_state_dict(state)
    train(again, its_optimizer, batches(5, seed=1))
    assert torch.equal(flat(again), flat(model))


@case(2)
def moments_of_samples_need_no_optimizer_either():
    class Plain(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    for moments in ("per_sample", "microbatch"):
        assert_as_bound(f"variance:alpha=1,moments={moments}", model_cls=Plain)
    model = model_of(Plain)
    compression = hvdc.Compression.variance(moments="per_sample")
    x, y = next(batches(1))
    loss = nn.functional.cross_entropy(model(x), y)  # before the optimizer is made
    hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression)
    with raises(
        RuntimeError,
        "moments=per_sample begins with a forward pass",
        "hvdc.Compression.variance(optimizer, named_parameters=model.named_parameters(), …)",
    ):
        loss.backward()


@case(2)
def a_rank_without_data_binds_too():
    model = model_of()
    compression = hvdc.Compression.dgc(ratio=0.02)
    optimizer = wrap(model, sgd(model), compression)
    with hvdc.uneven(optimizer, model):
        train(model, optimizer, batches(0 if hvd.rank() else 5))
    assert_replicas_identical(model)
    assert compression.stats()["steps"] == 5


@case(2)
def what_an_unbound_compression_refuses():
    with raises(ValueError, "no option 'ration'"):
        hvdc.Compression.dgc(ration=0.1)
    with raises(RuntimeError, "no optimizer holds this compression", "hvd.Compression.fp16"):
        hvd.allreduce(torch.ones(4), compression=hvdc.Compression.topk())
    with raises(AttributeError, "no attribute 'stat'"):
        hvdc.Compression.topk().stat()
    compression = hvdc.Compression.topk(ratio=0.1)
    assert repr(copy.deepcopy(compression)) == repr(compression) and repr(compression).startswith(
        "<TopK("
    )
    mine, alone = model_of(), [hvd.add_process_set([rank]) for rank in range(2)]
    wrapped = hvd.DistributedOptimizer(
        sgd(mine), mine.named_parameters(), compression, process_set=alone[hvd.rank()]
    )
    with raises(ValueError, "is for the process set", "give both the same process_set"):
        hvdc.UnboundCompression("topk", process_set=alone[1 - hvd.rank()]).bind(wrapped)
    for process_set in alone:
        hvd.remove_process_set(process_set)
    late = sgd(mine.out)
    wrapped = hvd.DistributedOptimizer(late, mine.out.named_parameters(prefix="late"), compression)
    wrapped.add_param_group({"params": list(mine.conv.parameters())})
    with raises(ValueError, "add_param_group() came after hvd.DistributedOptimizer"):
        hvdc.compression_of(wrapped)


@case(1)
def an_unbound_compression_on_one_rank():
    model, reference = model_of(), model_of()
    compression = hvdc.Compression.dgc(ratio=0.01)
    wrapped = [
        wrap(net, sgd(net), each)
        for net, each in ((model, compression), (reference, hvd.Compression.none))
    ]
    for net, optimizer in zip((model, reference), wrapped):
        train(net, optimizer, batches(3))
    assert torch.equal(flat(model), flat(reference))
    assert compression.stats()["bytes_sent"] == 0
    with tempfile.TemporaryDirectory() as folder:
        torch.save(compression.state_dict(), os.path.join(folder, "compression.pt"))
