"""The parts that ports without Horovod share: the ranks of torch.distributed, their transport, and
UpdateOptimizer."""
