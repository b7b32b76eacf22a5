"""What real ranks are asked to prove. Each case runs on every rank of one job; run_cases.py runs
them, test_ranks.py asks.

A case raises on the rank that finds something wrong. `sizes` are the numbers of ranks it is meant
for. A file for each topic has cases; a job may run any of them, in the order of the files here.
"""

from checks import joined

from . import (
    algorithms,
    asked,
    automatic,
    decentralized,
    defaults,
    dense_limit,
    devices,
    errors,
    faults,
    float64,
    horovod_options,
    hosts,
    optimizers,
    outside_step,
    recording,
    samples,
    split,
    states,
    steps,
    switches,
    transports,
    unbound,
    uneven,
    update_faults,
    updates,
)
from .training import start

__all__ = ["CASES", "start"]

CASES = joined(
    dense_limit,
    optimizers,
    horovod_options,
    states,
    errors,
    samples,
    split,
    algorithms,
    transports,
    faults,
    uneven,
    unbound,
    switches,
    asked,
    automatic,
    recording,
    updates,
    update_faults,
    decentralized,
    outside_step,
    devices,
    hosts,
    steps,
    defaults,
    float64,
)
