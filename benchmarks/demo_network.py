"""The demo's network and its images, for benchmarks: the examples that have them are scripts for
users to copy, and no package."""

import functools
import importlib.util
import pathlib
import sys

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"


@functools.lru_cache(maxsize=None)
def example(name):
    """An example as a module, by its path. It is registered, because examples import each other by
    name."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


images = example("images")
load = images.load


def network(*arguments, **options):
    """The demo's; its script needs Horovod."""
    return example("pytorch_images").network(*arguments, **options)


def accuracy(*arguments):
    """As the demo's script measures it; that needs Horovod."""
    return example("pytorch_images").accuracy(*arguments)
