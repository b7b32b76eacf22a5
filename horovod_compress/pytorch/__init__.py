"""The parts that all compressions in PyTorch share, whoever hands gradients over: parameters, an
SGD's momentum, moments of samples, the life of a step."""
