import os
import pathlib

import native_under_test  # noqa: F401
from hypothesis import HealthCheck, settings

# Triton reads this when it is imported. Without a GPU the kernels on devices are interpreted.
os.environ.setdefault("TRITON_INTERPRET", "0" if pathlib.Path("/dev/nvidiactl").exists() else "1")

settings.register_profile("on any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # no test asserts on time
settings.load_profile("on any machine")
