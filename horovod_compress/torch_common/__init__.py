"""The parts that all ports in PyTorch share: an optimizer's steps and parameters, an SGD's
momentum, moments of samples, UpdateOptimizer."""
