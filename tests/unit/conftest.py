import native_under_test  # noqa: F401
