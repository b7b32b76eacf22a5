#!/usr/bin/env python3
"""Runs Horovod's own tests of optimizers with a compression where they have none: horovods_tests.py
CHECKOUT [SPEC ...].

CHECKOUT is a directory with Horovod's sources and tests, v0.28.1: they are no part of Horovod's
packages, nor of this project. Each test of test_torch.py and test_tensorflow2_keras.py that makes a
DistributedOptimizer is run on two ranks: as it is, and once for every SPEC. By default those gather
every tensor, with values of 16 bits or a part of the elements, or sum it. Fails where a test fails
that passes as it is, and where none passes. Needs Open MPI, pytest, mock and parameterized
(.venv/bin/pip install mock parameterized).
"""

import argparse
import importlib.util
import inspect
import os
import pathlib
import subprocess
import sys
import tempfile

FILES = {
    "torch": "test/parallel/test_torch.py",
    "tensorflow": "test/parallel/test_tensorflow2_keras.py",
}
SPECS = {
    "torch": (
        "topk:ratio=1,values=bf16,min_numel=0",
        "dgc:ratio=0.3,min_numel=0",
        "maxnorm:bits=16,min_numel=0",
    ),
    # What Keras' tests compute is compared with exact numbers.
    "tensorflow": (
        "topk:ratio=1,values=bf16,min_numel=0",
        "dgc:ratio=1,values=bf16,masking=false,min_numel=0",
    ),
}
FAIL_ON_PURPOSE = {
    "test_dynamic_requires_grad": "reads gradients while they are exchanged, and those that are "
    "gathered are 0 then",
    "test_broadcast_state_options": "trains before it broadcasts options that differ between "
    "ranks, which is an error here",
    "test_synchronize_step_warning": "exchanges results as new gradients, which is an error where "
    "something is kept of them",
}
# What those files import, beside Horovod and its frameworks.
NEEDED = ("pytest", "mock", "parameterized")
JOB = "mpirun --allow-run-as-root --bind-to none --oversubscribe -np 2"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=pathlib.Path)
    parser.add_argument("specs", nargs="*")
    arguments = parser.parse_args()
    missing = [module for module in NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        sys.exit(
            f"nothing was run: {', '.join(missing)} cannot be imported, which Horovod's tests "
            f"need. Install: {sys.executable} -m pip install {' '.join(missing)}"
        )
    failed = False
    for framework, file in FILES.items():
        path = (arguments.checkout / file).resolve()
        if not path.exists():
            sys.exit(f"{path} is not there: give the path of a checkout of Horovod v0.28.1")
        as_it_is = outcomes(framework, path, "")
        passed = list(as_it_is.values()).count("passed")
        print(f"{framework}: {passed} tests pass as they are", flush=True)
        if not passed:
            print(
                f"{framework}: nothing was compared: no test that makes a DistributedOptimizer "
                "passes as it is. What they printed stands above",
                flush=True,
            )
            failed = True
            continue
        for spec in arguments.specs or SPECS[framework]:
            found = outcomes(framework, path, spec)
            worse = sorted(
                name for name, outcome in as_it_is.items() if outcome == "passed" != found.get(name)
            )
            unexpected = [name for name in worse if name not in FAIL_ON_PURPOSE]
            failed |= bool(unexpected)
            ran = sum(name in found for name in as_it_is)
            print(
                f"{framework}, {spec}: {len(unexpected)} of {passed} fail, {ran} ran "
                f"{' '.join(unexpected)}",
                flush=True,
            )
            for name in worse:
                if name in FAIL_ON_PURPOSE:
                    print(f"    {name} fails on purpose: it {FAIL_ON_PURPOSE[name]}", flush=True)
    sys.exit(failed)


def outcomes(framework, path, spec):
    """{test: "passed", or what else it came to on some rank} of a job."""
    with tempfile.TemporaryDirectory() as folder:
        plugin = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "horovods_tests",
            "-p",
            "no:cacheprovider",
            path,
        ]
        environment = {
            **os.environ,
            # Horovod's optimizers need Keras 2, which is tf_keras since TensorFlow 2.16.
            "TF_USE_LEGACY_KERAS": "1",
            "HVDC_FRAMEWORK": framework,
            "HVDC_SPEC": spec,
            "HVDC_OUTCOMES": folder,
            "PYTHONPATH": os.pathsep.join(
                [os.path.dirname(os.path.abspath(__file__)), os.environ.get("PYTHONPATH", "")]
            ),
        }
        job = subprocess.run(
            [*JOB.split(), *plugin],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=1200,
        )
        found = {}
        for rank in range(2):
            file = pathlib.Path(folder, f"rank{rank}")
            for line in file.read_text().splitlines() if file.exists() else ():
                name, outcome = line.split()
                if outcome != "passed" or name not in found:
                    found[name] = outcome
        said = {outcome for name, outcome in found.items() if name not in FAIL_ON_PURPOSE}
        if "passed" not in said or "failed" in said:
            print(job.stdout[-6000:], job.stderr[-2000:])
        return found


# -- as a plugin of pytest, on every rank


def pytest_collection_modifyitems(items):
    items[:] = [
        item
        for item in items
        if "DistributedOptimizer(" in inspect.getsource(inspect.unwrap(item.function))
    ]


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
        with open(os.path.join(os.environ["HVDC_OUTCOMES"], f"rank{rank}"), "a") as file:
            print(report.nodeid.split("::")[-1].replace(" ", "_"), report.outcome, file=file)


def pytest_sessionstart(session):
    if os.environ["HVDC_FRAMEWORK"] == "torch":
        import torch

        # The tests take any optimizer of PyTorch's, and this one takes matrices only.
        if hasattr(torch.optim, "Muon"):
            torch.optim.Muon.__module__ = "not torch.optim"
    if os.environ["HVDC_SPEC"]:
        inject(os.environ["HVDC_FRAMEWORK"], os.environ["HVDC_SPEC"])


def inject(framework, spec):
    """Lets DistributedOptimizer have a compression where it is given none."""
    if framework == "torch":
        import horovod.torch as hvd

        import horovod_compress.torch as hvdc
    else:
        import horovod.tensorflow.keras as hvd

        import horovod_compress.tensorflow as hvdc
    theirs = hvd.DistributedOptimizer

    def with_compression(optimizer, *args, **kwargs):
        if "compression" not in kwargs and not (
            framework == "torch" and kwargs.get("op") == hvd.Adasum
        ):
            options = {"process_set": kwargs.get("process_set")}
            if framework == "torch" and kwargs.get("named_parameters") is not None:
                options["named_parameters"] = kwargs["named_parameters"] = list(
                    kwargs["named_parameters"]
                )
            kwargs["compression"] = hvdc.Compression.from_spec(spec, optimizer, **options)
        return theirs(optimizer, *args, **kwargs)

    hvd.DistributedOptimizer = with_compression


if __name__ == "__main__":
    main()
