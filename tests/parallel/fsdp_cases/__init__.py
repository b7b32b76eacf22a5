"""What replicas of models that fully_shard has cut are asked to prove, without Horovod. As `cases`,
for test_fsdp.py."""

from checks import joined

from . import algorithms, errors, options, passes, states, updates
from .training import start

__all__ = ["CASES", "start"]

CASES = joined(algorithms, passes, options, states, errors, updates)
