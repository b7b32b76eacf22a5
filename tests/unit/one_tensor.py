"""The kernels as functions of one tensor, for tests: those of the modules take lists."""

import functools
import inspect

from horovod_compress import kernels
from horovod_compress.kernels import reference as _reference

# Those that are so in the modules, too.
ALONE = {
    "draw_coordinates",
    "flush_denormals",
    "open_frames",
    "random_bits",
    "seal_frame",
}
LISTS = [name for name in _reference.__all__ if name not in ALONE]


def arrays_of(name):
    """The names of a kernel's arrays."""
    parameters = inspect.signature(getattr(_reference, name)).parameters.values()
    return [each.name for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD]


class One:
    """The kernels of a module for one tensor, whose arrays may be named."""

    def __init__(self, module):
        self.module = module

    def __getattr__(self, name):
        its = getattr(self.module, name)
        return functools.partial(self.call, name) if name in LISTS else its

    def call(self, name, *arrays, **options):
        named = dict(zip(arrays_of(name), arrays), **options)
        columns = [[named.pop(array, None)] for array in arrays_of(name)]
        (result,) = getattr(self.module, name)(*columns, **{key: [named[key]] for key in named})
        return result


cpu, reference = One(kernels.cpu), One(_reference)
