"""The kernels in C++: the functions of `kernels.reference` by the same names, and a function by
which tests choose CPU instructions.

Importing this raises ImportError where the extension was not built.
"""

from ._native import *  # noqa: F403
