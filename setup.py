"""Builds the native kernels; everything else about the package is in pyproject.toml."""
import glob
import os
import sys

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

flags = []
if sys.platform != "win32":
    # No contraction: the native kernels give the reference's results bit for bit on every CPU.
    flags = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
if os.environ.get("HOROVOD_COMPRESS_SANITIZE"):
    flags = ["-O1", "-g", "-ffp-contract=off", "-fno-omit-frame-pointer", "-DHC_PORTABLE", "-fsanitize=address,undefined",
             "-fno-sanitize-recover=undefined"]

native = Pybind11Extension(
    "horovod_compress.kernels.native",
    sorted(glob.glob("horovod_compress/kernels/*.cpp")),
    depends=sorted(glob.glob("horovod_compress/kernels/*.hpp")),
    cxx_std=17,
    extra_compile_args=flags,
    extra_link_args=[flag for flag in flags if flag.startswith("-fsanitize")],
)
native.optional = True  # where no compiler is found the NumPy reference serves, with one warning

with ParallelCompile():
    setup(ext_modules=[native])
