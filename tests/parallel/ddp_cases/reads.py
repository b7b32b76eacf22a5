"""What is asked of a compression on one rank alone, at any time, and many models in one process."""

import contextlib
import functools
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
import torch.distributed as dist
from checks import registry
from public_reads import READS
from torch.nn.parallel import DistributedDataParallel as DDP

from horovod_compress import ddp

from .options import SPARSE
from .training import (
    BUCKETS,
    batches,
    flat,
    model_of,
    sgd,
    train,
    trained,
    wrapped,
)
from .updates import updating

CASES, case = registry()
SPECS = ("dgc:ratio=0.05,min_numel=0", "maxnorm:min_numel=0")
ENDS_A_STEP = {"record", "state_dict"}


def refused(compression, *others):
    """The questions that are refused, and all that is said to that."""
    found = {}
    asked = {name: functools.partial(read, compression) for name, read in READS.items()}
    for name, ask in (*asked.items(), *((each.__name__, each) for each in others)):
        try:
            ask()
        except (RuntimeError, TypeError) as error:
            found[name] = str(error)
    return found


@contextlib.contextmanager
def interrupted(handler):
    """Within it the main thread is interrupted by signals all the time, on the first rank."""
    ended = threading.Event()

    def send():
        while not ended.wait(0.001):
            os.kill(os.getpid(), signal.SIGUSR2)

    thread = threading.Thread(target=send)
    before = signal.signal(signal.SIGUSR2, lambda *_: handler())
    if dist.get_rank() == 0:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if dist.get_rank() == 0:
            thread.join()
        signal.signal(signal.SIGUSR2, before)


def assert_in_step(answers):
    assert answers.keys() == ENDS_A_STEP, answers
    assert all("a step is under way" in said for said in answers.values()), answers


@case(2)
def questions_on_one_rank_change_no_step():
    """Before there is a model, before there is an optimizer, between steps, in the middle of a
    backward pass, of this thread and of another one, and wherever a signal comes."""
    first, in_pass = dist.get_rank() == 0, []
    for spec in SPECS:
        state, hook = ddp.comm_hook(spec)
        # Else the oldest PyTorch makes one bucket of a small model.
        with mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1 << 10):
            model = DDP(model_of(), **BUCKETS)
        for step in (lambda: None, lambda: model.register_comm_hook(state, hook)):
            step()
            if first:
                assert refused(state).keys() == {"state_dict"}
                assert state.stats()["steps"] == 0 and state.config["id"] == spec.split(":")[0]
        optimizer = sgd(model)

        def ask(_, state=state):
            if first:
                in_pass.append(refused(state))
                with ThreadPoolExecutor(1) as pool:
                    in_pass.append(pool.submit(refused, state).result())

        data = list(batches(8))
        for step, batch in enumerate(data[:4]):
            if step == 1:
                # Now its gradient comes in the last bucket, of several.
                hooked = model.module.conv.weight.register_hook(ask)
            train(model, optimizer, [batch])
            assert not first or not refused(state)
        hooked.remove()
        with interrupted(lambda state=state: refused(state)):
            train(model, optimizer, data[4:])
        assert torch.equal(flat(model), flat(trained(spec, steps=8)[0])), spec
    assert len(in_pass) == (6 * len(SPECS) if first else 0)
    for answers in in_pass:
        assert_in_step(answers)


@case(2)
def questions_on_one_rank_change_no_update():
    for spec in (SPARSE, "maxnorm:min_numel=0"):
        found = []
        for asks in (False, dist.get_rank() == 0):
            model, optimizer = updating(spec, every=2, outer=ddp.Nesterov())

            def ask(optimizer=optimizer):
                return refused(optimizer.compression, optimizer.state_dict, optimizer.__repr__)

            with interrupted(ask if asks else bool):
                for batch in batches(8):
                    # There is no other spec for later.
                    assert not asks or ask().keys() == {"switch_at"}
                    train(model, optimizer, [batch])
            found.append(flat(model))
        assert torch.equal(*found), spec


@case(2)
def what_a_hook_is_told_before_there_is_a_model():
    whole, compression = trained(SPARSE, steps=6)
    model, optimizer, before = wrapped(SPARSE)
    data = list(batches(6))
    train(model, optimizer, data[:3])
    (state, hook), records = ddp.comm_hook("none"), []
    state.record(records.append, every=1)
    state.switch(SPARSE)
    state.load_state_dict(before.state_dict())
    again = DDP(model.module, **BUCKETS)
    again.register_comm_hook(state, hook)
    train(again, optimizer, data[3:])
    assert torch.equal(flat(again), flat(whole))
    assert state.stats()["steps"] == 3 and [each["step"] for each in records] == [3, 4, 5]
