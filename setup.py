"""Builds the native kernels, and stubs for editors and type checkers; everything else about the
package is in pyproject.toml.

environment:
  HOROVOD_COMPRESS_KERNELS=reference   builds none: the NumPy reference serves, which
                                       is about ten times slower
  HOROVOD_COMPRESS_SANITIZE=1          builds them with AddressSanitizer and
                                       UndefinedBehaviorSanitizer, for the tests
"""

import glob
import os
import pathlib
import subprocess
import sys

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.errors import CCompilerError, ExecError, PlatformError

flags = []
if sys.platform != "win32":
    # No contraction: the native kernels give the reference's results bit for bit on every CPU.
    flags = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
if os.environ.get("HOROVOD_COMPRESS_SANITIZE"):
    flags = [
        "-O0",
        "-g1",
        "-ffp-contract=off",
        "-fno-omit-frame-pointer",
        "-DHC_PORTABLE",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=undefined",
    ]

native = Pybind11Extension(
    "horovod_compress.kernels.native._native",
    sorted(glob.glob("horovod_compress/kernels/native/*.cpp")),
    depends=sorted(glob.glob("horovod_compress/kernels/native/*.[ch]pp")),
    cxx_std=17,
    extra_compile_args=flags,
    extra_link_args=[flag for flag in flags if flag.startswith("-fsanitize")],
)


class BuildKernels(build_ext):
    def build_extension(self, ext):
        ext.sources = self.joined(ext.sources)
        try:
            super().build_extension(ext)
        except (CCompilerError, ExecError, PlatformError) as error:
            sys.exit(
                f"horovod-compress: the native kernels could not be built: {error}\nWhat the "
                f"compiler said is above. They need a C++17 "
                "compiler, GCC 9 or Clang 14 or later, and Python's headers. To install without "
                "them, on the NumPy reference, about ten "
                "times slower, set HOROVOD_COMPRESS_KERNELS=reference."
            )

    def joined(self, sources):
        """Two files, for two cores, that include all: pybind11's headers take more than half of the
        time of compiling them one by one."""
        sources, parts = sorted(sources, key=os.path.getsize), []
        os.makedirs(self.build_temp, exist_ok=True)
        for i in range(2):
            parts.append(os.path.join(self.build_temp, f"native_{i}.cpp"))
            text = "".join(f'#include "{os.path.abspath(source)}"\n' for source in sources[i::2])
            part = pathlib.Path(parts[i])
            if not part.exists() or part.read_text() != text:
                part.write_text(text)
        return parts


class BuildModules(build_py):
    def run(self):
        super().run()
        folder = "." if self.editable_mode else self.build_lib
        # The native kernels are not there yet.
        environment = {**os.environ, "HOROVOD_COMPRESS_KERNELS": "reference"}
        command = [sys.executable, "scripts/stubs.py", folder]
        subprocess.run(command, env=environment, check=True)


wanted = [] if os.environ.get("HOROVOD_COMPRESS_KERNELS") == "reference" else [native]
with ParallelCompile():
    setup(ext_modules=wanted, cmdclass={"build_ext": BuildKernels, "build_py": BuildModules})
