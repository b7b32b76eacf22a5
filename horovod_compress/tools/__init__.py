"""The command line tools: one module a command, wired by `cli`, and what they measure and compute
with."""
