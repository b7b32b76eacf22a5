"""Loads the native module named by NATIVE_UNDER_TEST, one built with sanitizers, in place of the
installed one."""

import importlib.util
import os
import sys

if "NATIVE_UNDER_TEST" in os.environ:
    name = "horovod_compress.kernels.native._native"
    spec = importlib.util.spec_from_file_location(name, os.environ["NATIVE_UNDER_TEST"])
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
