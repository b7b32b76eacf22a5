"""Processes that end while threads of the package are busy."""

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("horovod.torch")


def test_the_thread_that_polls_counts_ends_before_python():
    # A thread that frees tensors while Python shuts down aborts the process.
    script = textwrap.dedent(
        """
        import threading, time, torch
        from horovod_compress.transport.horovod import _counts

        class Step:
            def end_count(self, wait):
                polled.set()
                until = time.monotonic() + 0.3
                while time.monotonic() < until:
                    torch.ones(1)
                return False

        polled = threading.Event()
        _counts.add(Step())
        polled.wait()
        """
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
