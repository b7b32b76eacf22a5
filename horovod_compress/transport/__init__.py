"""What moves arrays between ranks: base (the contract), horovod (the default), loopback (ranks in one process)."""
