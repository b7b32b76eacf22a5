"""Two ranks that save and load by accelerate, as docs/guides/save-and-resume.md says. Run by
test_other_packages.py; the argument is a folder."""

import sys
import warnings
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from checks import assert_equal

from horovod_compress import ddp

accelerator = Accelerator(cpu=True)


def made():
    """(model, optimizer, compression), alike each time. accelerate saves them."""
    for known in ("_models", "_optimizers", "_custom_objects"):
        getattr(accelerator, known).clear()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    compression = ddp.compress(model, optimizer, "topk:ratio=0.1,min_numel=0")
    portable = SimpleNamespace(
        state_dict=lambda: compression.state_dict(portable=True),
        load_state_dict=compression.load_state_dict,
    )
    accelerator.register_for_checkpointing(portable)
    return model, optimizer, compression


def train(model, optimizer, steps):
    for step in range(steps):
        torch.manual_seed(100 * step + accelerator.process_index)
        optimizer.zero_grad()
        accelerator.backward(model(torch.randn(8, 64)).square().mean())
        optimizer.step()


def main(folder):
    model, optimizer, compression = made()
    train(model, optimizer, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        accelerator.save_state(folder)
    again, its, compressing = made()
    accelerator.load_state(folder)
    assert_equal(again.state_dict(), model.state_dict())
    states = [each.state_dict(portable=True) for each in (compression, compressing)]
    assert_equal(states[1]["tensors"], states[0]["tensors"])
    assert states[0]["step"] == states[1]["step"] == 4
    train(again, its, 4)
    weights = accelerator.gather(again.module.weight.detach())
    assert torch.equal(*weights.chunk(2))
    # What cannot be loaded is warned of where it is saved.
    accelerator._custom_objects[:] = [compressing]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        accelerator.save_state(folder)
    assert any("accelerate's save_state() writes" in str(each.message) for each in told)


if __name__ == "__main__":
    main(sys.argv[1])
