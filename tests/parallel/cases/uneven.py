"""Ranks with different numbers of steps. What is expected comes from the same training without
`uneven`, where ranks that have no data compute gradients of zero themselves."""

import itertools

import horovod.torch as hvd
import torch
from checks import raises, registry
from torch import nn

import horovod_compress.torch as hvdc
from horovod_compress import MismatchError

from .training import assert_replicas_identical, batches, flat, model_of, sgd, train, wrap

CASES, case = registry()


def steps_of(rank, most=9):
    """The first rank has the most data; the last one has none."""
    return 0 if rank == hvd.size() - 1 else most - 2 * rank


def setup(spec, optimizer_of=sgd, wrap_options=None, **options):
    model = model_of()
    optimizer = optimizer_of(model)
    compression = hvdc.Compression.from_spec(
        spec, optimizer, named_parameters=model.named_parameters(), **options
    )
    return model, compression, wrap(model, optimizer, compression, **(wrap_options or {}))


def train_uneven(model, optimizer, data, *more, after=lambda: None):
    with hvdc.uneven(optimizer, *more):
        for batch in data:
            train(model, optimizer, [batch])
            after()


def train_with_zeros(model, optimizer, data, most, after=lambda: None):
    """The same steps without `uneven`: out of data, a rank takes them with gradients of zero."""
    data = list(data)
    for x, y in itertools.islice(itertools.chain(data, itertools.repeat((None, None))), most):
        if x is None:
            model.zero_grad()
            sum(0 * p.sum() for p in model.parameters()).backward()
            optimizer.step()
        else:
            train(model, optimizer, [(x, y)])
        after()


def residuals(compression):
    return torch.cat(
        [
            a.flatten()
            for arrays in compression.state_dict()["tensors"].values()
            for _, a in sorted(arrays.items())
        ]
        or [torch.zeros(1)]
    )


def assert_alike(found, expected, what):
    (model, compression, optimizer), (its_model, its_compression, its_optimizer) = found, expected
    pairs = [(flat(model), flat(its_model)), (residuals(compression), residuals(its_compression))]
    mine, theirs = (o.state_dict() for o in (optimizer, its_optimizer))
    assert mine["param_groups"] == theirs["param_groups"], what
    assert mine["state"].keys() == theirs["state"].keys(), what
    pairs += [
        (mine["state"][i][key], value)
        for i, state in theirs["state"].items()
        for key, value in state.items()
        if value is not None
    ]
    # On more than two ranks, what Horovod fuses, it adds in another order.
    for its, expects in pairs:
        tolerance = 0 if hvd.size() == 2 else 1e-5 * expects.abs().max()
        assert (its - expects).abs().max() <= tolerance, (
            f"{what}: they differ by {(its - expects).abs().max()}"
        )
    assert_replicas_identical(model)


def assert_answered_with_zeros(spec, backwards=False):
    """backwards: the last rank has the most data, and the first none."""
    found, expected = setup(spec), setup(spec)
    steps = steps_of(hvd.size() - 1 - hvd.rank() if backwards else hvd.rank())
    train_uneven(*found[::2], batches(steps), found[0])
    train_with_zeros(*expected[::2], batches(steps), 9)
    assert_alike(found, expected, spec)
    for model, _, optimizer in (found, expected):
        train(model, optimizer, batches(2, seed=1))
    assert_alike(found, expected, spec)


@case(2, 3)
def ranks_without_data_answer_with_zeros():
    """With both transports; hvd.join() after it."""
    for spec in (
        "dgc:ratio=0.02,clip_norm=0.5",
        "dgc:ratio=0.02,exchange=split",
        "maxnorm:min_numel=0",
    ):
        for transport in ("horovod", "mpi") if hvd.mpi_enabled() else ("horovod",):
            assert_answered_with_zeros(f"{spec},transport={transport}")
    assert_answered_with_zeros("dgc:ratio=0.02", backwards=True)
    hvd.join()


@case(2)
def every_family_of_algorithms_answers_with_zeros():
    for spec in (
        "efsignsgd:follow_lr=true",
        "adacomp",
        "variance:moments=microbatch",
        "powersgd:rank=2",
        "multiscale",
        "globalrandk",
        "none",
    ):
        assert_answered_with_zeros(spec)


@case(2)
def even_ranks_train_as_without_uneven():
    found, expected = setup("dgc:ratio=0.02"), setup("dgc:ratio=0.02")
    for seed in range(2):
        train_uneven(*found[::2], batches(3, seed))
        train(*expected[::2], batches(3, seed))
    assert_alike(found, expected, "even")
    assert found[1].stats_by_tensor() == expected[1].stats_by_tensor()


@case(2, 3)
def options_of_horovods_optimizer_in_uneven():
    for options in ({"groups": 2}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}):
        found, expected = (setup("dgc:ratio=0.02", wrap_options=options) for _ in range(2))
        train_uneven(*found[::2], batches(steps_of(hvd.rank(), 5)))
        train_with_zeros(*expected[::2], batches(steps_of(hvd.rank(), 5)), 5)
        assert_alike(found, expected, options)


@case(2)
def passes_that_no_step_followed_are_dropped():
    """With backward_passes_per_step=2, rank 1 has done one pass more than it has taken steps of;
    rank 0 has data for three steps more."""
    for spec in ("dgc:ratio=0.02", "variance:moments=microbatch"):
        for options in ({}, {"groups": 2}):
            found, expected = (
                setup(spec, wrap_options={"backward_passes_per_step": 2, **options})
                for _ in range(2)
            )
            for index, (model, _, optimizer) in enumerate((found, expected)):
                passes = list(batches(10 if hvd.rank() == 0 else 5 - index))
                with hvdc.uneven(optimizer):
                    for i, (x, y) in enumerate(passes):
                        nn.functional.cross_entropy(model(x), y).backward()
                        if i % 2:
                            optimizer.step()
                            optimizer.zero_grad()
            assert_alike(found, expected, (spec, options))


@case(2)
def a_step_that_was_begun_is_answered():
    """Rank 1 leaves after backward(): that gradient has its part in the step of the others."""
    found, expected = setup("dgc:ratio=0.02"), setup("dgc:ratio=0.02")
    data = list(batches(6))
    for index, (model, _, optimizer) in enumerate((found, expected)):
        with hvdc.uneven(optimizer):
            for i, (x, y) in enumerate(data if hvd.rank() == 0 else data[:3]):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                if index or hvd.rank() == 0 or i < 2:
                    optimizer.step()
    assert_alike(found, expected, "begun")


def scheduled(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)


@case(2, 3)
def a_schedule_that_counts_steps_goes_on_from_the_last_rank():
    """Residuals follow the learning rate, and the rate that they were meant for is alike on all
    ranks."""
    for spec, plain in (("efsignsgd", {"momentum": 0}), ("dgc:ratio=0.02", {})):
        # A scheduler of the optimizer that was wrapped shares its groups.
        for inner in (False, True):
            found, expected = (setup(spec, lambda model: sgd(model, **plain)) for _ in range(2))
            schedules = [
                scheduled(torch.optim.SGD(run[2].param_groups, lr=1) if inner else run[2])
                for run in (found, expected)
            ]
            train_uneven(
                *found[::2], batches(steps_of(hvd.rank())), schedules[0], after=schedules[0].step
            )
            train_with_zeros(
                *expected[::2], batches(steps_of(hvd.rank())), 9, after=schedules[1].step
            )
            assert_alike(found, expected, spec)
            for (model, _, optimizer), schedule in zip((found, expected), schedules):
                schedule.step()
                train(model, optimizer, batches(2, seed=1))
            assert abs(found[2].param_groups[0]["lr"] - 0.05 * 0.8**10) < 1e-9
            assert_alike(found, expected, spec)


@case(2)
def a_momentum_that_changes_is_followed():
    """Momentum of tensors that go dense is alike on all ranks."""
    found, expected = setup("dgc:ratio=0.02"), setup("dgc:ratio=0.02")
    for (model, _, optimizer), run in zip((found, expected), (train_uneven, train_with_zeros)):

        def change(optimizer=optimizer):
            optimizer.param_groups[0]["momentum"] *= 0.9

        run(
            model,
            optimizer,
            batches(steps_of(hvd.rank())),
            *([9] if run is train_with_zeros else []),
            after=change,
        )
        train(model, optimizer, batches(2, seed=1))
    assert_alike(found, expected, "momentum")


def scaled_step(optimizer, scaler, gradient_of, poison):
    optimizer.zero_grad()
    scaler.scale(gradient_of() * (float("inf") if poison else 1)).backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()


@case(2)
def loss_scales_and_skipped_steps_are_followed():
    """The scale grows every second step; in two steps after rank 1 has left, rank 0's gradients
    overflow."""
    for spec in ("dgc:ratio=0.02", "powersgd:rank=2", "efsignsgd:follow_lr=true"):
        runs = []
        for answered in (True, False):
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
            run = setup(spec, grad_scaler=scaler)
            model, _, optimizer = run
            data = list(batches(12 if hvd.rank() == 0 else 4))
            if answered:
                with hvdc.uneven(optimizer):
                    for step, (x, y) in enumerate(data):
                        scaled_step(
                            optimizer,
                            scaler,
                            lambda: nn.functional.cross_entropy(model(x), y),
                            step in (7, 10),
                        )
            else:
                for step in range(12):
                    x, y = data[min(step, len(data) - 1)]
                    of_data = lambda: nn.functional.cross_entropy(model(x), y)  # noqa: E731
                    of_zeros = lambda: sum(0 * p.sum() for p in model.parameters())  # noqa: E731
                    scaled_step(
                        optimizer,
                        scaler,
                        of_data if step < len(data) else of_zeros,
                        hvd.rank() == 0 and step in (7, 10),
                    )
            runs.append((run, scaler.state_dict()))
        assert runs[0][1] == runs[1][1], (spec, runs[0][1], runs[1][1])
        assert_alike(runs[0][0], runs[1][0], spec)


@case(2)
def steps_that_a_rank_discards_are_discarded_by_those_that_answer():
    """The last one too, and by discard() itself."""
    for spec in ("dgc:ratio=0.02,sample_ratio=1", "powersgd:rank=2,min_numel=0", "adacomp"):
        for by_hand in (False, True):
            runs = []
            for bad in (True, False):
                run = model, compression, optimizer = setup(spec, discardable=True)
                with hvdc.uneven(optimizer):
                    for step, (x, y) in enumerate(batches(8 if hvd.rank() == 0 else 3)):
                        if bad and step in (4, 7):
                            (nn.functional.cross_entropy(model(x), y) * 100).backward()
                            optimizer.synchronize()
                            optimizer.zero_grad()
                            if by_hand:
                                compression.discard()
                        if step != 7:
                            train(model, optimizer, [(x, y)])
                train(model, optimizer, batches(1, seed=1))
                runs.append(run)
            assert_alike(*runs, (spec, by_hand))


@case(2)
def two_optimizers_that_step_in_turn():
    """As a GAN's: rank 0 has more data, and takes two steps of the second for one of the first."""
    runs = []
    for answered in (True, False):
        run = first, second = [setup(spec) for spec in ("dgc:ratio=0.02", "maxnorm")]
        data = list(batches(9 if hvd.rank() == 0 else 3))
        if answered:
            with hvdc.uneven(first[2], second[2]):
                for step, batch in enumerate(data):
                    train(*(first if step % 3 == 0 else second)[::2], [batch])
        else:
            for step in range(9):
                train_with_zeros(
                    *(first if step % 3 == 0 else second)[::2], data[step : step + 1], 1
                )
        runs.append(run)
    for found, expected in zip(*runs):
        assert_alike(found, expected, "two optimizers")


@case(2)
def two_optimizers_of_one_backward_pass():
    """They step in either order, and rank 1 runs out of data."""
    data = list(batches(9 if hvd.rank() == 0 else 3))
    for order in (0, 1), (1, 0):
        found, expected = (
            [
                setup(spec, wrap_options={"prefix": spec})
                for spec in ("dgc:ratio=0.02", "efsignsgd:follow_lr=true")
            ]
            for _ in range(2)
        )
        with hvdc.uneven(*(optimizer for _, _, optimizer in found)):
            for x, y in data:
                for model, _, _ in found:
                    model.zero_grad()
                sum(nn.functional.cross_entropy(model(x), y) for model, _, _ in found).backward()
                for i in order:
                    found[i][2].step()
        for its, reference in zip(found, expected):
            train_with_zeros(*reference[::2], data, 9)
            assert_alike(its, reference, f"steps in the order {order}")


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, 64, sparse=True)
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        return self.out(self.words((x.flatten(1)[:, :3].abs() * 9).long().clamp(max=39)).mean(1))


@case(2)
def sparse_gradients_in_uneven():
    # Times a power of two, because PyTorch rounds otherwise where it adds a sparse gradient.
    plain = lambda model: sgd(model, momentum=0, lr=2.0**-4)  # noqa: E731
    runs = []
    for answered in (True, False):
        model = model_of(Words)
        optimizer = plain(model)
        compression = hvdc.Compression.topk(
            optimizer, named_parameters=model.named_parameters(), ratio=0.1
        )
        run = model, compression, wrap(model, optimizer, compression, sparse_as_dense=True)
        if answered:
            train_uneven(*run[::2], batches(5 if hvd.rank() == 0 else 2))
        else:
            train(*run[::2], batches(2))
            train_with_zeros(*run[::2], list(batches(5))[2:] if hvd.rank() == 0 else [], 3)
        runs.append(run)
    assert torch.equal(flat(runs[0][0]), flat(runs[1][0]))
    assert_replicas_identical(runs[0][0])
    model = model_of(Words)
    optimizer = plain(model)
    wrapped = wrap(
        model,
        optimizer,
        hvdc.Compression.topk(optimizer, named_parameters=model.named_parameters()),
    )
    with raises(ValueError, "sparse_as_dense=True"):
        train_uneven(model, wrapped, batches(1))


@case(3)
def a_process_set_in_uneven():
    members = hvd.add_process_set([0, 2])
    found, expected = (
        setup("dgc:ratio=0.02", wrap_options={"process_set": members}, process_set=members)
        for _ in range(2)
    )
    train_uneven(*found[::2], batches(5 if hvd.rank() == 2 else 2), found[0])
    if members.included():
        train_with_zeros(*expected[::2], batches(5 if hvd.rank() == 2 else 2), 5)
        assert torch.equal(flat(found[0]), flat(expected[0]))
        assert_replicas_identical(found[0], members)
    hvd.barrier()


@case(2)
def mistakes_with_uneven_are_named():
    model, compression, optimizer = setup("topk")
    for wrong, words in (
        ([optimizer, compression], "takes no compressions"),
        ([sgd(model)], "needs the optimizer that hvd.DistributedOptimizer"),
        ([optimizer, 3], "not an object of <class 'int'>"),
        ([], "needs"),
    ):
        with raises(TypeError, words), hvdc.uneven(*wrong):
            pass
    with raises(RuntimeError, "already"), hvdc.uneven(optimizer), hvdc.uneven(optimizer):
        pass
    with raises(RuntimeError, "save a portable state after the block"), hvdc.uneven(optimizer):
        compression.state_dict(portable=True)
    with (
        raises(MismatchError, "objects given to uneven()", "rank 1"),
        hvdc.uneven(optimizer, *([model] if hvd.rank() else [])),
    ):
        pass
    another = setup("topk" if hvd.rank() else "dgc")[2]
    with raises(MismatchError, "options.id"), hvdc.uneven(optimizer, another):
        pass
    # The first one's steps are not announced any more.
    with hvdc.uneven(optimizer):
        train(model, optimizer, batches(1))


@case(2)
def an_exception_on_all_ranks_passes_and_training_goes_on():
    found, expected = setup("dgc:ratio=0.02"), setup("dgc:ratio=0.02")
    model, _, optimizer = found
    with raises(KeyError, "spoilt"), hvdc.uneven(optimizer):
        train(model, optimizer, batches(3))
        raise KeyError("spoilt")
    train(*expected[::2], batches(3))
    train_uneven(model, optimizer, batches(steps_of(hvd.rank()), seed=1))
    train_with_zeros(*expected[::2], batches(steps_of(hvd.rank()), seed=1), 9)
    assert_alike(found, expected, "exception")


@case(2)
def an_exception_on_one_rank_passes_and_the_other_is_told():
    """The last case of its job, because Horovod has no collective more in which both take part."""
    model, _, optimizer = setup("dgc:ratio=0.02")
    if hvd.rank() == 1:
        with raises(KeyError, "spoilt"), hvdc.uneven(optimizer):
            train(model, optimizer, batches(1))
            raise KeyError("spoilt")
    else:
        with (
            raises(RuntimeError, "1 of 2 ranks have called hvd.join() (rank 1)", "uneven"),
            hvdc.uneven(optimizer),
        ):
            train(model, optimizer, batches(3))
    hvd.join()


@case(1)
def one_rank_trains_as_without_uneven():
    found, expected = setup("dgc:ratio=0.02"), setup("dgc:ratio=0.02")
    train_uneven(*found[::2], batches(3), found[0])
    train(*expected[::2], batches(3))
    assert torch.equal(flat(found[0]), flat(expected[0]))
