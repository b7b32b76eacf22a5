"""Processes that end while threads of the package are busy."""

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("horovod.torch")

from horovod_compress.session.process_sets import ProcessSetRanks


def test_the_thread_that_polls_counts_ends_before_python():
    # A thread that frees tensors while Python shuts down aborts the process.
    script = textwrap.dedent(
        """
        import threading, time, torch
        from horovod_compress.torch.counted_step import _counts

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


def test_ranks_are_known_after_shutdown():
    # States are saved then, too.
    class ProcessSet:
        def rank(self):
            if over:
                raise ValueError("Horovod has not been initialized; use hvd.init().")
            return 1

    over = []
    ranks = ProcessSetRanks(ProcessSet())
    assert ranks.rank == 1
    over.append(True)
    assert ranks.rank == 1
    with pytest.raises(ValueError, match="not been initialized"):
        _ = ProcessSetRanks(ProcessSet()).rank
