"""Decentralized training: ranks with models of their own, which exchange with their neighbors
only. `torch/decentralized.py` is its port."""
