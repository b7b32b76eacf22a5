"""For every id of available(): every byte is counted, and submitting waits for nobody."""

import numpy as np
from battery_facts import SHAPES, copies, over, quiet, shaped, spec_of, steps_of, variants
from ranks import ranks_of

import horovod_compress as hc
from horovod_compress.engine.lockstep import mean_of, start_step
from horovod_compress.transport.loopback import Loopback

pytestmark = quiet


class Counting(Loopback):
    """Counts what goes through it."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.sent, self.calls, self.waited = 0, [], 0

    def allgather(self, name, payload):
        return self._counted(("gather", name), payload, super().allgather(name, payload))

    def allreduce(self, name, array, op="sum"):
        return self._counted((op, name), array, super().allreduce(name, array, op))

    def alltoall(self, name, payload, splits):
        return self._counted(("alltoall", name), payload, super().alltoall(name, payload, splits))

    def _counted(self, call, array, wait):
        self.sent += array.nbytes
        self.calls.append(call)

        def counted():
            self.waited += 1
            return wait()

        return counted


@over(variants)
def test_every_byte_is_counted(id, options):
    """What the host's carriers and the collectives of a step hold, on each rank."""
    exchanges = ranks_of(spec_of(id, options), 3, SHAPES, Counting)
    steps = steps_of(0, 4, 3)
    steps[2][1]["w"][3] = np.nan
    carried = [0] * 3
    for ranks in copies_of_steps(steps):
        carriers = start_step(exchanges, ranks)
        for rank, named in enumerate(carriers):
            carried[rank] += sum(carrier.nbytes for carrier in named.values())
        for name in SHAPES:
            for ex in exchanges:
                ex.finish(name, mean_of([named[name] for named in carriers]))
    sent = [bytes_carried + ex.transport.sent for bytes_carried, ex in zip(carried, exchanges)]
    assert [ex.stats()["bytes_sent"] for ex in exchanges] == sent
    run = hc.simulate(spec_of(id, options), shaped(copies_of_steps(steps)))
    assert np.sum(run.bytes_sent, axis=0).tolist() == sent
    for stats in run.stats:
        assert stats["dense_bytes"] == 4 * 4 * (720 + 270 + 7)
        assert stats["ratio"] == stats["dense_bytes"] / stats["bytes_sent"]


def copies_of_steps(steps):
    return [copies(ranks) for ranks in steps]


@over(variants)
def test_submitting_never_waits_and_names_every_operation(id, options):
    """Inside a backward hook nothing may block; and ranks may come to operations in different
    orders."""
    (exchange,) = ranks_of(spec_of(id, options), 1, SHAPES, Counting)
    ((named,),) = steps_of(0, 1, 1)
    carriers = {name: exchange.submit(name, named[name]) for name in SHAPES}
    assert exchange.transport.waited == 0
    for name, carrier in carriers.items():
        exchange.finish(name, carrier)
    calls = exchange.transport.calls
    assert len(set(calls)) == len(calls) and all(
        any(n in name for n in [*SHAPES, ":agree", ":step", ":split"]) for _, name in calls
    )
