"""Transports, which move arrays between ranks: base (the contract), horovod (the default), mpi, and
loopback (ranks in one process)."""
