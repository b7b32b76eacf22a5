"""Steps of tensors, from their gradients to their results, and the features around them."""
