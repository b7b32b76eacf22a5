"""The Triton programs, one function for each pass over memory, in the files of the kernels that
launch them.

`row` points to the first of the arguments that a program has for its block's tensor, which its
docstring lists after "In a row"; see `launches`.

Floats are compared as the native kernels compare them: for finite ones the bits without the sign
order as the absolute values do, and infinity and NaN are the largest. A program that adds up or
compares leaves one number for its block, and torch adds those up: nothing depends on the order in
which blocks run.
"""
