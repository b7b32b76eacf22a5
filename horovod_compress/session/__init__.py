"""Choices, agreements, switches and states of a compression's ranks, whatever the framework;
trials, elastic states, updates."""
