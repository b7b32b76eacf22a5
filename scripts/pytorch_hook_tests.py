#!/usr/bin/env python3
"""Runs PyTorch's own tests of communication hooks with this package's where theirs is:
pytorch_hook_tests.py CHECKOUT.

CHECKOUT is a directory with PyTorch's tests, of the release that is installed: they are no part of
its packages, nor of this project. Of test/distributed these are run on two ranks: all of
algorithms/ddp_comm_hooks/test_ddp_hooks.py, and the tests of hooks of test_c10d_gloo.py; on CPUs
with Gloo, where there are no two GPUs. Fails where a test fails, or none ran. Needs pytest and
expecttest (.venv/bin/pip install expecttest).
"""

import argparse
import functools
import importlib
import importlib.util
import os
import pathlib
import subprocess
import sys

FILES = ("algorithms/ddp_comm_hooks/test_ddp_hooks.py", "test_c10d_gloo.py")
# In place of PyTorch's own hooks, by their names; none in place of those that tests make.
SPECS = {
    "allreduce_hook": "topk:ratio=1,min_numel=0",
    "fp16_compress_hook": "fp16",
    "quantization_pertensor_hook": "maxnorm:bits=16,min_numel=0",
    "quantization_perchannel_hook": "multiscale:bits=12+16,min_numel=0",
}
NOT_RUN = {
    "test_is_last_hook": "it looks at what DDP hands to a hook of its own",
    "test_ddp_invalid_comm_hook_init": "it registers what is no hook, which DDP refuses",
    "test_ddp_invalid_comm_hook_return_type": "it registers what is no hook, which DDP refuses",
    "test_ddp_comm_hook_sparse_gradients": "sparse gradients are refused, by name",
}
NEEDED = ("pytest", "expecttest")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=pathlib.Path)
    folder = parser.parse_args().checkout.resolve() / "test" / "distributed"
    missing = [module for module in NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        sys.exit(
            f"nothing was run: {', '.join(missing)} cannot be imported, which PyTorch's tests "
            f"need. Install: {sys.executable} -m pip install {' '.join(missing)}"
        )
    for file in FILES:
        if not (folder / file).exists():
            sys.exit(f"{folder / file} is not there: give the path of a checkout of PyTorch")
    for name, why in NOT_RUN.items():
        print(f"{name} is not run: {why}", flush=True)
    tests = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", __file__]
    # Which says 5 where it has found none.
    sys.exit(subprocess.run(tests, env={**os.environ, "PYTORCH_TESTS": str(folder)}).returncode)


# -- as a module of tests, in pytest and in every rank, which imports it anew


def load(folder):
    """PyTorch's classes of tests, with hooks of ours."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.testing._internal import common_distributed

    from horovod_compress import ddp

    register = DistributedDataParallel.register_comm_hook

    def register_ours(model, state, hook):
        register(model, *ddp.comm_hook(SPECS.get(hook.__name__, "none")))

    DistributedDataParallel.register_comm_hook = register_ours
    on_cpus = torch.cuda.device_count() < 2
    if on_cpus:
        common_distributed.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
        common_distributed.requires_accelerator_dist_backend = lambda *_: lambda test: test
    sys.path.append(str(folder))
    for file in FILES:
        sys.path.append(str((folder / file).parent))
        module = importlib.import_module(pathlib.Path(file).stem)
        if on_cpus:
            module.gpus_for_rank = lambda size: [["cpu"]] * size
            module.DistributedDataParallel = functools.partial(_on_cpus, DistributedDataParallel)
        for name, tests in vars(module).items():
            if name.startswith("DistributedDataParallel") and hasattr(tests, "run"):
                yield tests


def _on_cpus(make, module, device_ids=None, **options):
    return make(module, **options)


def only_of_hooks(tests):
    """The class without its other tests, and with the means of gradients for what a hook makes."""

    def verify(self, model, input, expected_grad):
        # What the tests say that it is without a hook.
        return tests._run_and_verify_hook(self, model, input, expected_grad / 8)

    others = {
        name: None
        for name in dir(tests)
        if name.startswith("test") and ("hook" not in name or name in NOT_RUN)
    }
    made = {**others, "__module__": __name__}
    if hasattr(tests, "_run_and_verify_hook"):
        made["_run_and_verify_hook"] = verify
    return type(tests.__name__, (tests,), made)


if __name__ == "__main__":
    main()
elif "PYTORCH_TESTS" in os.environ:
    folder = pathlib.Path(os.environ["PYTORCH_TESTS"])
    globals().update({tests.__name__: only_of_hooks(tests) for tests in load(folder)})
