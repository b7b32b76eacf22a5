"""Scripts that pages show run as they are pasted."""

import contextlib
import os
import tempfile

import torch.distributed as dist
from checks import registry, said_by, scripts_of_pages

CASES, case = registry()


@contextlib.contextmanager
def in_a_new_folder():
    """All ranks are in one."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        os.chdir(folder[0])
        try:
            yield
        finally:
            os.chdir(before)


@case(2)
def scripts_of_pages_run_as_pasted():
    """One that saves states ends, started again, as what was not stopped. FSDP2's, which older
    versions of PyTorch have not, is in test_lost_ranks.py."""
    for page, script in scripts_of_pages("dist.init_process_group(").items():
        if "fully_shard" in script:
            continue
        with in_a_new_folder():
            said = [
                said_by(script, page, dist, "init_process_group", "destroy_process_group")
                for _ in range(1 + ("torch.save(" in script))
            ]
        if dist.get_rank() == 0:
            assert all("loss" in each for each in said), (page, said)
            if said[1:]:
                whole, resumed = (each.partition(": loss ") for each in said)
                assert (whole[0], resumed[0]) == ("from step 0", "from step 80")
                assert whole[2] == resumed[2]
