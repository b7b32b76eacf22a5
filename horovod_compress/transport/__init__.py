"""Transports, which move arrays between ranks: base (the contract), and loopback (ranks in one
process). Those of a framework are beside its port."""
