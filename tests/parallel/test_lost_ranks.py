"""Jobs whose ranks are killed, and that torchrun starts again from their last checkpoint: the
scripts of pages."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from checks import ROOT, scripts_of_pages  # noqa: E402
from jobs import ENVIRONMENT, LIMIT  # noqa: E402

# {page: its number of ranks}
PAGES = {"docs/guides/save-and-resume.md": 2, "docs/start/fsdp.md": 4}
# Behind a backward pass, which is in no checkpoint.
BACKWARD = "    loss.backward()\n"
KILLS = """
    if (dist.get_rank(), step, os.environ["TORCHELASTIC_RESTART_COUNT"]) in {kills}:
        import signal

        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.extended
@pytest.mark.parametrize("page", PAGES)
def test_a_job_ends_where_one_ends_that_nothing_has_stopped(tmp_path, page):
    script = scripts_of_pages("dist.init_process_group(")[ROOT / page]
    assert script.count(BACKWARD) == 1
    said = []
    for name, kills in (("whole", []), ("killed", [(1, 53, "0")])):
        folder = tmp_path / name
        folder.mkdir()
        killing = script.replace(BACKWARD, BACKWARD + KILLS.format(kills=kills or [None]))
        (folder / "train.py").write_text(killing)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", PAGES[page]]
        # torchrun's own store would be of the ranks before.
        command += ["--standalone", "--max-restarts", 1, "train.py"]
        environment = {**ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        done = subprocess.run(
            [*map(str, command)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout.strip().splitlines()[-1])
    whole, killed = (each.partition(": loss ") for each in said)
    assert (whole[0], killed[0]) == ("from step 0", "from step 40")
    assert float(killed[2]) == pytest.approx(float(whole[2]), rel=1e-6)
