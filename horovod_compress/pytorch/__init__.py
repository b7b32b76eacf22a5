"""What compressions in PyTorch need, whoever hands gradients over: parameters, an SGD's momentum,
moments of samples, the life of a step."""
