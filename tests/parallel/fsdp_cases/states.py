"""States that are saved and loaded: each rank's own, and DTensors that other numbers of replicas
and shards go on from."""

import contextlib
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checks import raises, registry
from ddp_cases.states import copied
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from horovod_compress import fsdp

from .training import (
    REPLICAS,
    assert_replicas_identical,
    batches,
    difference,
    loss_of,
    sgd,
    sharded,
    train,
    trained,
    whole,
)
from .updates import updating as with_updates

CASES, case = registry()
SPECS = (
    "topk:ratio=0.05,min_numel=0",
    "dgc:ratio=0.05,min_numel=0",
    "adacomp:min_numel=0",
    "onebit:min_numel=0",
    "powersgd:min_numel=0",
    "powersgd:rank=1,min_numel=0",
    "maxnorm:min_numel=0",
    "none",
)
# Those that keep something.
CUT_ANEW = SPECS[:-2]


@contextlib.contextmanager
def a_folder():
    """All ranks are in one."""
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        yield folder[0]
        dist.barrier()


@case(4)
def a_ranks_own_state_resumes_bit_for_bit():
    for spec in SPECS[::2]:
        reference, _ = trained(spec, steps=6)
        model, optimizer, compression = sharded(spec)
        data = list(batches(6))
        train(model, optimizer, data[:3])
        saved = copied([model.state_dict(), optimizer.state_dict(), compression.state_dict()])
        again, its, compressing = sharded(spec)
        for each, state in zip((again, its, compressing), saved):
            each.load_state_dict(state)
        train(again, its, data[3:])
        assert torch.equal(whole(again), whole(reference)), spec


def mean_residuals(compression):
    """{parameter: {array: the mean over replicas, of all shards}}."""
    tensors = compression.state_dict(portable=True)["tensors"]
    return {
        name: {key: its.full_tensor() for key, its in arrays.items() if key != "lr"}
        for name, arrays in tensors.items()
    }


def saved_together(folder, model, optimizer, compression):
    """Saves as users do: all in one checkpoint."""
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.save({**state, "compression": compression.state_dict(portable=True)}, checkpoint_id=folder)


def loaded_together(folder, model, optimizer, compression):
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    state["compression"] = compression.state_dict(portable=True)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    compression.load_state_dict(state["compression"])


@case(4, 8)
def a_portable_state_is_cut_anew():
    """From as many replicas of as many shards to others, through torch.distributed.checkpoint: the
    mean of what waits, to the last bit."""
    size = dist.get_world_size()
    for spec in CUT_ANEW if size == 4 else SPECS[:2]:
        with a_folder() as folder:
            model, optimizer, compression = sharded(spec)
            train(model, optimizer, batches(3))
            saved_together(folder, model, optimizer, compression)
            means, values = mean_residuals(compression), whole(model)
            for replicas in sorted({REPLICAS, size, max(size // 2, REPLICAS)}):
                again, its, compressing = sharded(spec, replicas=replicas)
                loaded_together(folder, again, its, compressing)
                assert torch.equal(whole(again), values)
                found = mean_residuals(compressing)
                for name, arrays in means.items():
                    assert found[name].keys() == arrays.keys()
                    for key, array in arrays.items():
                        assert torch.equal(found[name][key], array), (spec, replicas, name, key)
                train(again, its, batches(2))
                assert_replicas_identical(again)
                assert compressing.stats()["steps"] == 2
                assert compressing.state_dict()["step"] == 5


@case(4)
def one_replica_alone_refuses_what_several_had_to_send():
    model, optimizer, compression = sharded(SPECS[0])
    train(model, optimizer, batches(2))
    with a_folder() as folder:
        saved_together(folder, model, optimizer, compression)
        alone = sharded(SPECS[0], replicas=1)
        with raises(ValueError, "on one rank nothing is exchanged"):
            loaded_together(folder, *alone)
        # What keeps nothing goes on.
        model, optimizer, compression = sharded("none")
        train(model, optimizer, batches(2))
        saved_together(folder, model, optimizer, compression)
        loaded_together(folder, *sharded("none", replicas=1))


@case(4)
def states_of_other_shards_are_refused():
    model, optimizer, compression = sharded(SPECS[0])
    train(model, optimizer, batches(2))
    own = compression.state_dict()
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    rank = dist.get_rank()
    # Rank r has shard r % 2 of replica r // 2.
    with raises(ValueError, "this state is of shard", "portable=True"):
        compression.load_state_dict(everyones[rank ^ 1])
    with raises(ValueError, "rank"):
        compression.load_state_dict(everyones[rank ^ 2])
    with raises(ValueError, "none of these 2 states"):
        compression.load_state_dict([everyones[1 - rank % 2], everyones[3 - rank % 2]])
    # Of all ranks' each takes its own.
    again, its, compressing = sharded(SPECS[0])
    compressing.load_state_dict(everyones)
    for name, arrays in own["tensors"].items():
        for key, array in arrays.items():
            assert torch.equal(compressing.state_dict()["tensors"][name][key], array)
    other, its, cut_anew = sharded(SPECS[0], replicas=4)
    with raises(ValueError, "torch.distributed.checkpoint.load"):
        cut_anew.load_state_dict(compression.state_dict(portable=True))
    with raises(ValueError, "this state is of shard"):
        cut_anew.load_state_dict(own)


@case(4)
def momentum_that_was_taken_over_is_in_checkpoints_and_given_back():
    """Also where nothing decays, so that an SGD whose momentum is taken over needs no buffers."""
    for decay in (0.0, 0.01):
        spec = "dgc:ratio=0.1,min_numel=0"
        model, optimizer, compression = sharded(
            spec, optimizer=lambda model: sgd(model, weight_decay=decay)
        )
        train(model, optimizer, batches(3))
        with a_folder() as folder:
            saved_together(folder, model, optimizer, compression)
            loaded_together(folder, model, optimizer, compression)
            loaded_together(folder, *sharded(spec))
        compression.switch("none")
        train(model, optimizer, batches(3))
        assert_replicas_identical(model)
        assert any(its["momentum_buffer"].to_local().any() for its in optimizer.state.values())


@case(4)
def a_momentum_that_has_decayed_stays_in_checkpoints():
    """That of a plain run, which is looked at every 64 steps."""
    model, optimizer, compression = sharded("none", optimizer=lambda m: sgd(m, momentum=1e-3))
    train(model, optimizer, batches(1))
    compression.switch("dgc:ratio=0.1,min_numel=0")
    train(model, optimizer, list(batches(1)) * 66)
    buffers = [its["momentum_buffer"].to_local() for its in optimizer.state.values()]
    assert len(buffers) == len(compression.stats_by_tensor())
    assert not any(its.any() for its in buffers)


@case(2)
def rows_of_a_run_and_a_switch():
    rows = []
    model, optimizer, compression = sharded("topk:ratio=0.05,min_numel=0")
    compression.record(rows.append, every=2)
    train(model, optimizer, batches(4))
    compression.switch("dgc:ratio=0.05,min_numel=0")
    compression.switch("none", at=6)
    train(model, optimizer, batches(4))
    assert_replicas_identical(model)
    compression.state_dict()
    assert [row["step"] for row in rows] == [0, 2, 4, 6] and compression.config["id"] == "none"
    assert all(row["bytes_sent"] for row in rows)
    assert "blocks.0.wide.weight" in compression.stats_by_tensor()


@case(4)
def updates_resume_and_are_cut_anew():
    def updating(replicas=REPLICAS):
        options = {"every": 2, "outer": fsdp.Nesterov(), "replicas": replicas}
        return with_updates("topk:ratio=0.05,min_numel=0", **options)

    def steps(model, optimizer, data):
        for x in data:
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()

    reference, its = updating()
    data = list(batches(8))
    steps(reference, its, data)
    # In the middle of a round.
    model, optimizer = updating()
    steps(model, optimizer, data[:3])
    saved = copied([model.state_dict(), optimizer.state_dict()])
    again, its = updating()
    for each, state in zip((again, its), saved):
        each.load_state_dict(state)
    steps(again, its, data[3:])
    assert torch.equal(whole(again), whole(reference))
    # torch makes a new optimizer's state by a step of it.
    fresh, its = updating()
    before = whole(fresh)
    get_state_dict(fresh, its)
    assert its.local_steps == 0 and torch.equal(whole(fresh), before)
    # After one.
    steps(model, optimizer, data[3:4])
    optimizer.average_state()

    def everything(model, optimizer):
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        return {**state, "updates": optimizer.state_dict(portable=True)["updates"]}

    with a_folder() as folder:
        portable = everything(model, optimizer)
        dcp.save(portable, checkpoint_id=folder)
        for replicas in sorted({REPLICAS, dist.get_world_size()}):
            other, its = updating(replicas)
            loaded = everything(other, its)
            dcp.load(loaded, checkpoint_id=folder)
            states = {"model_state_dict": loaded["model"], "optim_state_dict": loaded["optimizer"]}
            set_state_dict(other, its, **states)
            its.load_state_dict({**its.state_dict(), "updates": loaded["updates"]})
            moments = zip(its.state.values(), optimizer.state.values())
            for mine, kept in moments:
                for key in ("exp_avg", "exp_avg_sq"):
                    assert torch.equal(mine[key].full_tensor(), kept[key].full_tensor())
            now = its.state_dict(portable=True)["updates"]
            for name, momentum in portable["updates"]["momentum"].items():
                assert torch.equal(now["momentum"][name].full_tensor(), momentum.full_tensor())
            kept = portable["updates"]["compression"]["tensors"]
            for name, arrays in now["compression"]["tensors"].items():
                for key, array in arrays.items():
                    assert torch.equal(array.full_tensor(), kept[name][key].full_tensor())
            steps(other, its, data[:2])
            assert_replicas_identical(other)
            assert difference(other, model) > 0
