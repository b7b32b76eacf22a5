"""A state resumes bit for bit, and gradients that are not finite lose nothing."""

import copy
import os
import tempfile

import horovod.torch as hvd
import torch
from checks import raises, registry
from torch import nn

import horovod_compress.torch as hvdc

from .training import assert_replicas_identical, batches, flat, model_of, sgd, train, wrap

CASES, case = registry()


@case(2)
def resume_is_bit_for_bit():
    for spec in (
        "dgc:ratio=0.01,values=fp16",
        "dgc:ratio=0.01,warmup_steps=12",
        "dgc:ratio=0.01,momentum=0",
        "dgc:ratio=0.01,exchange=split",
    ):

        def start(seed):
            model = model_of(seed=seed)
            optimizer = sgd(model, nesterov=True, weight_decay=0.01)
            compression = hvdc.Compression.from_spec(
                spec, optimizer, named_parameters=model.named_parameters()
            )
            return model, compression, wrap(model, optimizer, compression)

        model, compression, optimizer = start(seed=0)
        train(model, optimizer, batches(10))
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, f"rank{hvd.rank()}.pt")
            torch.save([model.state_dict(), optimizer.state_dict(), compression.state_dict()], path)
            train(model, optimizer, batches(10, seed=1))
            again, its_compression, its_optimizer = start(seed=7)
            loaded = torch.load(path, weights_only=True)
        again.load_state_dict(loaded[0])
        its_optimizer.load_state_dict(loaded[1])
        its_compression.load_state_dict(loaded[2])
        train(again, its_optimizer, batches(10, seed=1))
        assert torch.equal(flat(again), flat(model)), spec
        mine, its = compression.state_dict(), its_compression.state_dict()
        assert mine["step"] == its["step"] == 20
        for name, arrays in mine["tensors"].items():
            for key, array in arrays.items():
                assert torch.equal(array, its["tensors"][name][key]), (name, key)

        foreign = hvd.allgather_object(loaded[2])[1 - hvd.rank()]
        with raises(ValueError, "rank"):
            its_compression.load_state_dict(foreign)


@case(2)
def not_finite_gradients_lose_nothing():
    for spec in (
        "dgc:ratio=0.01",
        "dgc:ratio=0.01,momentum=0,values=fp16",
        "dgc:ratio=1,masking=false",
        "dgc:ratio=0.01,momentum=0,exchange=split",
    ):
        for poison in (float("nan"), float("inf")):
            # A compressed tensor, and one that goes dense.
            for layer in ("shared", "norm"):
                model = model_of()
                optimizer = sgd(model)
                compression = hvdc.Compression.from_spec(
                    spec, optimizer, named_parameters=model.named_parameters()
                )
                wrapped = wrap(model, optimizer, compression)
                train(model, wrapped, batches(3))
                x, y = next(batches(1))
                before = compression.state_dict()["tensors"]
                wrapped.zero_grad()
                handle = getattr(model, layer).weight.register_hook(
                    lambda g: torch.full_like(g, poison) if hvd.rank() == 1 else g
                )
                local = {}
                watch = [
                    p.register_hook(lambda g, n=n: local.__setitem__(n, g.clone()))
                    for n, p in model.named_parameters()
                    if p.requires_grad
                ]
                nn.functional.cross_entropy(model(x), y).backward()
                wrapped.synchronize()
                bad = not torch.isfinite(getattr(model, layer).weight.grad).all()
                assert bad, "this rank does not see the other's poison"
                handle.remove()
                [w.remove() for w in watch]
                # A GradScaler skips the step here.
                after = compression.state_dict()["tensors"]
                for name, arrays in after.items():
                    for key, array in arrays.items():
                        assert torch.isfinite(array).all(), (spec, name, key)
                    # v holds all it had, and the finite part of this gradient.
                    if "v" in arrays and "momentum=0" in spec:
                        g = torch.nan_to_num(local[name].flatten(), 0, 0, 0)
                        torch.testing.assert_close(
                            arrays["v"], before[name]["v"] + g, rtol=1e-5, atol=1e-7
                        )
                wrapped.zero_grad()
                train(model, wrapped, batches(5, seed=2))
                assert_replicas_identical(model)
                assert compression.stats()["steps_undone"] == 1


@case(2)
def dynamic_loss_scaling():
    """A GradScaler that overflows on one rank skips the step on both, and training goes on."""
    model = model_of()
    optimizer = sgd(model, momentum=0)
    compression = hvdc.Compression.dgc(
        optimizer, named_parameters=model.named_parameters(), ratio=0.01
    )
    wrapped = wrap(model, optimizer, compression)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step, (x, y) in enumerate(batches(8)):
        before = flat(model).clone()
        wrapped.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if step == 4 and hvd.rank() == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        wrapped.synchronize()
        with wrapped.skip_synchronize():
            scaler.step(wrapped)
        scaler.update()
        assert torch.equal(flat(model), before) == (step == 4)
    assert scaler.get_scale() == 1.0
    assert_replicas_identical(model)


@case(2)
def a_scale_that_doubles_under_autocast_changes_nothing():
    """Every 20 steps, against one that stays: parameters to 1e-5. In half precision results differ
    where gradients come below its smallest number."""
    for dtype, spec in (
        (torch.float16, "dgc:ratio=0.01"),
        (torch.float16, "powersgd:rank=2"),
        (torch.bfloat16, "adacomp"),
        (torch.bfloat16, "variance"),
        (torch.bfloat16, "topk:ratio=0.01"),
    ):
        fixed, doubled = (trained_under_autocast(spec, dtype, interval) for interval in (10**6, 20))
        error = ((doubled - fixed).abs().max() / fixed.abs().max()).item()
        assert error <= 1e-5, f"{dtype}, {spec}: parameters differ by {error:.1e}"


def trained_under_autocast(spec, dtype, interval):
    """The parameters after 60 steps with a GradScaler that doubles its scale so often."""
    model = model_of()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=interval)
    compression = hvdc.Compression.from_spec(
        spec, optimizer, named_parameters=model.named_parameters(), grad_scaler=scaler
    )
    wrapped = wrap(model, optimizer, compression)
    for x, y in batches(60):
        wrapped.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        wrapped.synchronize()
        with wrapped.skip_synchronize():
            scaler.step(wrapped)
        scaler.update()
    assert scaler.get_scale() == 2.0 ** (10 + 60 // interval)
    assert_replicas_identical(model)
    return flat(model)


def under_names(prefix, model, on_updates):
    """(optimizer, what keeps the state) of a model whose parameters' names begin with `prefix`."""
    parameters = [(prefix + name, p) for name, p in model.named_parameters()]
    if on_updates:
        outer = hvdc.Nesterov()
        return 2 * (
            hvdc.UpdateOptimizer(
                sgd(model), named_parameters=parameters, compression="topk:min_numel=0", outer=outer
            ),
        )
    base = sgd(model)
    compression = hvdc.Compression.dgc(base, named_parameters=parameters, ratio=0.05, min_numel=100)
    return hvd.DistributedOptimizer(base, parameters, compression=compression), compression


def values_of(state):
    """All tensors by parameter that a state keeps, in the order of their names."""
    kept = state.get("updates", {"compression": state, "momentum": {}})
    named = [arrays for _, arrays in sorted(kept["compression"]["tensors"].items())]
    momentum = [array for _, array in sorted(kept["momentum"].items())]
    return [array for arrays in named for _, array in sorted(arrays.items())] + momentum


@case(2)
def states_find_their_parameters_where_wrappers_come_and_go():
    names = (("", "_orig_mod."), ("module._orig_mod.", ""), ("module.", "_orig_mod."))
    for on_updates in (False, True):
        for portable in (False, True):
            for before, after in names:
                model, again = model_of(), model_of(seed=7)
                optimizer, keeper = under_names(before, model, on_updates)
                train(model, optimizer, batches(3))
                state = keeper.state_dict(portable=portable)
                optimizer, keeper = under_names(after, again, on_updates)
                again.load_state_dict(model.state_dict())
                keeper.load_state_dict(state)
                loaded = values_of(keeper.state_dict())
                assert len(loaded) > 8, len(loaded)
                assert all(map(torch.equal, loaded, values_of(state))), (on_updates, before, after)
                train(again, optimizer, batches(1))
                assert_replicas_identical(again)


@case(1)
def states_of_updates_that_are_damaged_are_refused():
    model = model_of()
    outer = hvdc.Nesterov()
    optimizer = hvdc.UpdateOptimizer(
        sgd(model), named_parameters=model.named_parameters(), outer=outer, every=2
    )
    train(model, optimizer, batches(3))
    state = optimizer.state_dict()
    for part in ("momentum", "shared"):
        for value in (float("nan"), float("inf")):
            damaged = copy.deepcopy(state)
            damaged["updates"][part]["out.bias"][3] = value
            with raises(ValueError, f"the {part} values of out.bias are not finite"):
                optimizer.load_state_dict(damaged)
    with raises(ValueError, "local_steps is '1' in it and a whole number here"):
        optimizer.load_state_dict({**state, "updates": {**state["updates"], "local_steps": "1"}})
    for part in state["updates"]:
        left = {key: value for key, value in state["updates"].items() if key != part}
        with raises(ValueError, f"not a state_dict of an UpdateOptimizer: KeyError('{part}')"):
            optimizer.load_state_dict({**state, "updates": left})
    optimizer.load_state_dict(state)


@case(3)
def states_go_on_at_three_ranks_and_back_at_two():
    """On the ranks 0 and 1, then on all three, then on two again, from the list of all states and
    from a portable one; in files, as users have."""
    pair = hvd.add_process_set([0, 1])
    try:
        for spec in (
            "dgc:ratio=0.01,min_numel=100",
            "powersgd:min_numel=100",
            "variance:min_numel=100",
        ):
            with tempfile.TemporaryDirectory() as folder:
                folder = hvd.broadcast_object(folder, name="folder")
                first = model_and_compression(spec, pair)
                train_on(pair, *first, 6)
                leave_states(folder, pair, *first)
                wider = model_and_compression(spec, None)
                owed = hvd.broadcast_object(load_states(folder, *wider), name="owed")
                assert_owed(wider[2], owed)
                train_on(None, *wider, 6)
                leave_states(folder, None, *wider)
                back = model_and_compression(spec, pair)
                if pair.included():
                    assert_owed(back[2], load_states(folder, *back))
                    assert back[2].state_dict()["step"] == 12
                train_on(pair, *back, 6)
                hvd.barrier()
    finally:
        hvd.remove_process_set(pair)


@case(1)
def what_cannot_be_applied_is_not_loaded():
    """One rank compresses nothing; states of its own are empty."""
    _, _, compression = model_and_compression("dgc:ratio=0.01", None)
    state = compression.state_dict(portable=True)
    for given in (compression.state_dict(), [compression.state_dict()], state):
        compression.load_state_dict(given)
    with raises(ValueError, "on one rank Horovod reduces nothing", "--min-np 1"):
        compression.load_state_dict(
            {**state, "size": 2, "tensors": {"conv.weight": {"v": torch.zeros(72)}}}
        )


def model_and_compression(spec, process_set):
    model = model_of()
    optimizer = sgd(model)
    compression = hvdc.Compression.from_spec(
        spec, optimizer, named_parameters=model.named_parameters(), process_set=process_set
    )
    options = {} if process_set is None else {"process_set": process_set}
    wrapped = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression, **options
    )
    return model, wrapped, compression


def train_on(process_set, model, optimizer, compression, steps):
    if process_set is None or process_set.included():
        train(model, optimizer, batches(steps))
        if process_set is None:
            assert_replicas_identical(model)


def leave_states(folder, process_set, model, optimizer, compression):
    """Each rank's own, and a portable one, which is the same on all ranks."""
    if process_set is None or process_set.included():
        torch.save(compression.state_dict(), os.path.join(folder, f"{hvd.rank()}.pt"))
        portable = compression.state_dict(portable=True)
        torch.save(portable, os.path.join(folder, f"portable.{hvd.rank()}.pt"))
    hvd.barrier()


def load_states(folder, model, optimizer, compression):
    """{name: {key: mean over ranks}} of the states in the folder. Loads their list, and then the
    portable state of a rank, which must be the same."""
    files = [os.path.join(folder, f"{rank}.pt") for rank in range(3)]
    states = [torch.load(file, weights_only=True) for file in files if os.path.exists(file)]
    compression.load_state_dict(states)
    means = compression.state_dict()["tensors"]
    for rank in range(len(states)):
        compression.load_state_dict(
            torch.load(os.path.join(folder, f"portable.{rank}.pt"), weights_only=True)
        )
        for name, arrays in compression.state_dict()["tensors"].items():
            for key, array in arrays.items():
                torch.testing.assert_close(
                    array,
                    means[name][key],
                    rtol=1e-6,
                    atol=1e-6 * means[name][key].abs().max().item(),
                )
    return {
        name: {
            key: torch.stack([state["tensors"][name][key].double() for state in states]).mean(0)
            for key in arrays
        }
        for name, arrays in states[0]["tensors"].items()
    }


def assert_owed(compression, owed):
    """What ranks have not sent is kept on average, on every rank here."""
    for name, arrays in compression.state_dict()["tensors"].items():
        for key, array in arrays.items():
            torch.testing.assert_close(
                array.double(),
                owed[name][key],
                rtol=1e-6,
                atol=1e-6 * owed[name][key].abs().max().item(),
            )


@case(1, 2)
def an_elastic_state_goes_back_to_one_commit_twice():
    """PyTorch's optimizers go on in the tensors that load_state_dict gives them, so what was
    committed must be given as a copy."""
    spec = "topk:ratio=0.1,min_numel=0"
    for on_updates in (False, True):
        model = model_of()
        adam = torch.optim.Adam(model.parameters(), lr=0.1)
        if on_updates:
            optimizer, parts = (
                hvdc.UpdateOptimizer(
                    adam, named_parameters=model.named_parameters(), compression=spec
                ),
                {},
            )
        else:
            compression = hvdc.Compression.from_spec(
                spec, adam, named_parameters=model.named_parameters()
            )
            optimizer, parts = wrap(model, adam, compression), {"compression": compression}
        train(model, optimizer, batches(2))
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, **parts)
        ends = []
        for _ in range(3):
            train(model, optimizer, batches(3))
            ends.append(flat(model))
            state.restore()
        assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2]), on_updates
