"""States that are saved and loaded, compressions that change, and steps that are recorded."""

import io
import json
import os
import tempfile

import torch
import torch.distributed as dist
from checks import registry

from .options import SPARSE, told_model
from .told import assert_nothing_lost, held_back, told
from .training import (
    DENSE,
    assert_close,
    assert_replicas_identical,
    batches,
    flat,
    same_in_any_bucket,
    train,
    trained,
    wrapped,
)

CASES, case = registry()
SPECS = (
    "dgc:ratio=0.01,min_numel=0",
    "maxnorm:min_numel=0",
    "adacomp:min_numel=0",
    "powersgd",
    "none",
    "fp16",
)


def copied(state):
    """A state as a file brings it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@case(2, 3)
def resume_is_bit_for_bit():
    for spec in same_in_any_bucket(SPECS):
        whole, _ = trained(spec, steps=6)
        model, optimizer, compression = wrapped(spec)
        data = list(batches(6))
        train(model, optimizer, data[:3])
        saved = copied([model.state_dict(), optimizer.state_dict(), compression.state_dict()])
        again, its, compressing = wrapped(spec)
        for each, state in zip((again, its, compressing), saved):
            each.load_state_dict(state)
        train(again, its, data[3:])
        assert torch.equal(flat(again), flat(whole)), spec


@case(2, 3)
def states_of_other_numbers_of_ranks():
    """A portable state, and the states of all of four ranks, of which each gets the mean."""
    model, optimizer, compression = told_model()
    gradients = [told(dist.get_rank(), step) for step in range(4)]
    for its in gradients[:2]:
        optimizer.zero_grad()
        model(its).backward()
        optimizer.step()
    held = held_back(compression)
    portable = compression.state_dict(portable=True)
    size, own = dist.get_world_size(), compression.state_dict()
    four = [{**own, "rank": rank, "size": 4} for rank in range(4)]
    for state in (portable, four):
        again, its, compressing = told_model()
        again.load_state_dict(model.state_dict())
        compressing.load_state_dict(copied(state))
        if state is portable:
            for name, mean in held_back(compressing).items():
                torch.testing.assert_close(mean, held[name], rtol=0, atol=1e-6)
        for grads in gradients[2:]:
            its.zero_grad()
            again(grads).backward()
            its.step()
        assert_replicas_identical(again)
        if state is portable:
            assert_nothing_lost(again, compressing, gradients)
    assert portable["rank"] is None and own["size"] == size


@case(2, 3)
def nothing_is_lost_over_switches():
    model, optimizer, compression = told_model()
    gradients = []
    for step, spec in enumerate((SPARSE, "none", "topk:ratio=0.1,min_numel=0", "fp16", "none")):
        if step:
            compression.switch(spec)
        for turn in range(2):
            optimizer.zero_grad()
            gradients.append(told(dist.get_rank(), 2 * step + turn))
            model(gradients[-1]).backward()
            optimizer.step()
        assert_replicas_identical(model)
    # fp16 has rounded.
    assert_nothing_lost(model, compression, gradients, 1e-3)
    assert not any(held.any() for held in held_back(compression).values())


@case(2)
def momentum_counts_once_over_switches():
    plain = trained(None, steps=9)[0]
    model, optimizer, compression = wrapped("none")
    data = list(batches(9))
    train(model, optimizer, data[:3])
    compression.switch("dgc:ratio=1,masking=false,min_numel=0")
    train(model, optimizer, data[3:6])
    compression.switch("none", at=7)
    train(model, optimizer, data[6:])
    assert_close(model, plain, 1e-4)
    assert_replicas_identical(model)
    assert compression.config["id"] == "none"


@case(2, 3)
def a_step_that_is_discarded():
    for spec in (SPARSE, "powersgd", "dgc:ratio=0.05,momentum=0.9,min_numel=0"):
        found = []
        for discards in (False, True):
            model, optimizer, compression = told_model(spec, discardable=True)
            for step in range(5):
                if step == 2 and not discards:
                    continue
                optimizer.zero_grad()
                model(told(dist.get_rank(), step)).backward()
                if step == 2:
                    compression.discard()
                else:
                    optimizer.step()
            found.append(flat(model))
            undone = compression.stats()["steps_undone"]
            assert undone == discards, (spec, undone)
        # What is random, or taken in turns, depends on the step's number.
        if spec != "powersgd":
            assert torch.equal(*found), spec


@case(2)
def records_and_totals():
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "run.jsonl")
        model, optimizer, compression = wrapped("dgc:ratio=0.01")
        compression.record(file, every=1)
        train(model, optimizer, batches(4))
        compression.state_dict()
        if dist.get_rank() == 0:
            with open(file) as lines:
                records = [json.loads(line) for line in lines]
            assert [record["step"] for record in records] == [0, 1, 2, 3], records
    stats = compression.stats()
    assert stats["ratio"] > 4 and stats["steps"] == 4, stats


@case(2, 3)
def auto_chooses_while_it_trains():
    model, optimizer, compression = wrapped("auto")
    train(model, optimizer, batches(3))
    assert compression.plan["spec"] is None
    train(model, optimizer, batches(40, seed=1))
    chosen = compression.plan["spec"]
    assert chosen is not None
    assert_replicas_identical(model)
    state = compression.state_dict()
    again, its, compressing = wrapped("auto")
    compressing.load_state_dict(copied(state))
    train(again, its, batches(2))
    assert compressing.plan["spec"] == chosen
    compressing.switch("none")
    train(again, its, batches(2))
    assert compressing.config["id"] == "none"


@case(2)
def dense_limit_from_what_a_plain_run_has_left():
    """SGD's momentum of a plain run lives on when it is taken over."""
    plain, its, _ = wrapped(None)
    data = list(batches(8))
    train(plain, its, data[:4])
    model, optimizer, compression = wrapped(DENSE)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copied(its.state_dict()))
    train(plain, its, data[4:])
    train(model, optimizer, data[4:])
    assert_close(model, plain)
