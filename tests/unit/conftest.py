import native_under_test  # noqa: F401
from hypothesis import HealthCheck, settings

settings.register_profile("on any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # no test asserts on time
settings.load_profile("on any machine")
