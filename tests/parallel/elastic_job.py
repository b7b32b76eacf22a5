"""One rank of an elastic job, as a user would write it, with a model for each way to compress: it
dies, asks for other hosts, and goes on.

Each rank writes to FOLDER what happens to it, a line of JSON each. Tests start the job and replay
what was written.
"""

import pathlib
import sys

import elastic_gradients
import elastic_switches
import elastic_updates
import horovod.torch as hvd
import torch
from elastic_jobs import on_the_host_that_dies, tell, wait_for_hosts
from elastic_training import COMMITTED_EVERY, KILLED_AT, RANKS, STEPS

WAYS = (elastic_updates, elastic_switches, elastic_gradients)


def main(folder):
    import horovod_compress.torch as hvdc

    torch.set_num_threads(1)
    hvd.init()
    parts = {}
    for way in WAYS:
        parts.update(way.made(hvdc))
    state = hvd.elastic.TorchState(**parts, step=0)

    @hvdc.elastic.run
    def train(state):
        tell(folder, hvd, state.step)
        while state.step < STEPS:
            under_way = elastic_gradients.train_step(state), elastic_switches.train_step(state)
            for steps in under_way:
                next(steps)
            dies = state.step == KILLED_AT and on_the_host_that_dies(folder)
            elastic_updates.train_step(state, dies)
            for steps in under_way:
                next(steps, None)
            state.step += 1
            elastic_switches.switch_after(state)
            if state.step % COMMITTED_EVERY == 0:
                state.commit()
            if state.step in RANKS:
                save(state, folder)
                wait_for_hosts(state, folder, hvd, RANKS[state.step])

    train(state)
    save(state, folder)


def save(state, folder):
    models = {way.__name__: way.saved(state) for way in WAYS}
    torch.save(models, folder / f"{state.step}.{hvd.rank()}.pt")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
