"""Requests of a tensor's step, the bytes of its payloads, and comparisons between ranks."""
