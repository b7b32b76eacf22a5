"""Methods that may change parameters outside of step() are found, and whether they have."""

import contextlib

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch", reason="the package needs Horovod with PyTorch")

from horovod_compress.torch_common.optimizer_around import Probe, watch  # noqa: E402


class Swapping(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)

    def eval(self):
        self.turned = True

    def _show(self):
        return "shown"

    @contextlib.contextmanager
    def averaged(self):
        yield "inside"

    @staticmethod
    def defaults_of():
        return {}


def test_methods_beside_those_of_every_optimizer():
    params = [torch.nn.Parameter(torch.zeros(3))]
    assert watch(Swapping(params, 0.1), contextlib.nullcontext) == {"eval", "_show", "averaged"}
    for plain in (torch.optim.SGD(params, 0.1), torch.optim.AdamW(params)):
        assert not watch(plain, contextlib.nullcontext)


def test_what_is_around_them():
    optimizer, told = Swapping([torch.nn.Parameter(torch.zeros(3))], 0.1), []

    @contextlib.contextmanager
    def around(name):
        told.append(f"before {name}")
        yield
        told.append(f"after {name}")

    watch(optimizer, around)
    optimizer.eval()
    assert optimizer.turned and optimizer._show() == "shown"
    assert told == ["before eval", "after eval", "before _show", "after _show"]
    told.clear()
    with optimizer.averaged() as inside:
        told.append(inside)
    # Making the context, entering it, leaving it.
    begun = ["before averaged", "after averaged"]
    assert told == [*begun, *begun, "inside", *begun]
    with pytest.raises(KeyError), optimizer.averaged():
        raise KeyError


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.add_(1),
        lambda p: p.data.mul_(2),
        lambda p: p[-1].zero_(),
        lambda p: setattr(p, "data", torch.full_like(p, 3)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changes_are_seen(change, dtype):
    params = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((), (0,), (300, 7))]
    params[2].data[0, 0] = float("nan")
    params.append(torch.nn.Parameter(torch.ones(4, 5, dtype=dtype).t()))
    before = Probe(params)
    assert not Probe(params).differs(before)
    with torch.no_grad():
        change(params[2])
    assert Probe(params).differs(before)
