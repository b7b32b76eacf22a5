"""What users are told of an SGD's momentum that a compression takes over."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch")  # horovod_compress.torch needs it

from horovod_compress import get_compressor  # noqa: E402
from horovod_compress.torch_common.takeover import SGDTakeover  # noqa: E402


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([{"momentum": 0.9}], "dgc applies momentum=0.9 in place of SGD"),
        (
            [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "weight_decay": 0.1}],
            "dgc applies momentum=0.5 and weight_decay=0.1; momentum=0.9 (nesterov) in place of "
            "SGD",
        ),
        ([{}], None),
    ],
)
def test_what_is_taken_over_is_said(options, said):
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in options]
    optimizer = torch.optim.SGD(
        [{"params": [param], **its} for param, its in zip(params, options)], lr=0.1
    )
    takeover = SGDTakeover(
        optimizer, get_compressor("dgc"), {id(param): f"p{i}" for i, param in enumerate(params)}
    )
    assert takeover.announcement == said


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("infinite", [False, True])
def test_a_fused_step_unscales_and_skips_by_itself(nesterov, infinite):
    """Weights decay as in one that a GradScaler unscales and skips."""

    def trained(fused):
        param = torch.nn.Parameter(torch.ones(4))
        sgd = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
        optimizer = torch.optim.SGD([param], **sgd, fused=fused)
        takeover = SGDTakeover(optimizer, get_compressor("dgc"), {id(param): "p"})
        optimizer.register_step_pre_hook(lambda *_: takeover.before_step(optimizer))
        optimizer.register_step_post_hook(lambda *_: takeover.restore())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            gradient = float("inf") if infinite and step == 1 else 1.0
            param.grad = scaler.scale(torch.full((4,), gradient))
            scaler.step(optimizer)
            scaler.update()
        return param.detach()

    torch.testing.assert_close(trained(fused=True), trained(fused=False))


def test_a_fused_step_after_a_takeover():
    """Of parameters of which only one has kept a buffer, because it was not taken over."""
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.5, fused=True)
    takeover = SGDTakeover(optimizer, get_compressor("dgc"), {id(params[0]): "p"})
    for _ in range(2):
        for param in params:
            param.grad = torch.ones(4)
        takeover.before_step(optimizer)
        optimizer.step()
        takeover.restore()
    takeover.give_back(optimizer)
    optimizer.step()
    torch.testing.assert_close(params[0].detach(), torch.full((4,), 0.7))
    torch.testing.assert_close(params[1].detach(), torch.full((4,), 1 - 0.1 * (1 + 1.5 + 1.75)))
