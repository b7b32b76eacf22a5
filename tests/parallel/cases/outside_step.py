"""What changes parameters or state of optimizers under hvdc.UpdateOptimizer beside step()."""

import contextlib
import copy
import warnings

import horovod.torch as hvd
import torch
from checks import raises, registry
from torch import nn

import horovod_compress.torch as hvdc
from horovod_compress import MismatchError

from .training import assert_close, assert_replicas_identical, batches, flat, model_of, train
from .updates import of_updates

CASES, case = registry()


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (arXiv 2405.15682): parameters are y in training, and x after eval()."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": True})

    def _turn(self, training):
        for group in self.param_groups:
            weight = 1 - group["beta"] if training else 1 - 1 / group["beta"]
            for p in group["params"] if group["training"] != training else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight)
            group["training"] = training

    @torch.no_grad()
    def train(self):
        self._turn(True)

    @torch.no_grad()
    def eval(self):
        self._turn(False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.clone())
                rate = group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1)
                p.lerp_(z, 1 / group["k"]).add_(p.grad, alpha=rate)
                z.sub_(p.grad, alpha=group["lr"])


class Lookahead(torch.optim.Optimizer):
    """Lookahead (arXiv 1907.08610), whose slow weights are shown by methods with an underscore, as
    in its authors' code."""

    def __init__(self, optimizer, k=4):
        super().__init__(optimizer.param_groups, {})
        self.optimizer, self.k, self.taken = optimizer, k, 0
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}

    def step(self, closure=None):
        self.optimizer.step()
        self.taken += 1
        for p, slow in self.slow.items() if self.taken % self.k == 0 else ():
            slow.add_(p.data - slow, alpha=0.5)
            p.data.copy_(slow)

    def _show_slow(self):
        self.backup = {p: p.data.clone() for p in self.slow}
        for p, slow in self.slow.items():
            p.data.copy_(slow)

    def _show_fast(self):
        for p, values in self.backup.items():
            p.data.copy_(values)


class Averaging(torch.optim.SGD):
    """SGD with an exponential moving average of the weights, which a context shows."""

    def step(self, closure=None):
        super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p].setdefault("ema", p.detach().clone()).lerp_(p.detach(), 0.1)

    def decays(self):
        return [0.9]

    def swap(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            p.data, self.state[p]["ema"] = self.state[p]["ema"], p.data

    @contextlib.contextmanager
    def averaged(self):
        self.swap()
        yield self
        self.swap()


@contextlib.contextmanager
def turned(optimizer):
    optimizer.eval()
    yield
    optimizer.train()


@contextlib.contextmanager
def slow(optimizer):
    optimizer._show_slow()
    yield
    optimizer._show_fast()


SWAPPING = (
    (lambda model: ScheduleFree(model.parameters()), turned),
    (lambda model: Lookahead(torch.optim.SGD(model.parameters(), 0.05)), slow),
    (lambda model: Averaging(model.parameters(), 0.05), lambda optimizer: optimizer.averaged()),
)


@case(2, 3)
def optimizers_that_swap_parameters_train_as_with_plain_horovod():
    """All are linear in gradients, so uncompressed updates are plain Horovod's, and so is what is
    shown. Their methods are called on either optimizer."""
    for make, shown in SWAPPING:
        reference, model, plain, inner = model_of(), model_of(), None, None
        plain, inner = make(reference), make(model)
        wrapped = of_updates(model, inner, "none")
        assert wrapped.param_groups is inner.param_groups
        data = list(batches(14))
        for taken, its in enumerate((wrapped, inner, wrapped)):
            for x, y in data[4 * taken : 4 * taken + 4]:
                for net in (reference, model):
                    net.zero_grad()
                    nn.functional.cross_entropy(net(x), y).backward()
                for p in filter(lambda p: p.grad is not None, reference.parameters()):
                    p.grad = hvd.allreduce(p.grad, name="gradient")
                plain.step()
                wrapped.step()
            before = flat(model)
            with shown(plain), shown(its):
                assert not torch.equal(flat(model), before)
                assert_replicas_identical(model)
                assert_close(model, reference, 1e-5)
            assert_replicas_identical(model)
            assert_close(model, reference, 1e-5)


@case(2)
def parameters_are_shown_alike_within_rounds_and_under_compression():
    for make, shown in SWAPPING:
        model = model_of()
        wrapped = of_updates(model, make(model), "topk:ratio=0.05,min_numel=0", every=4)
        for _ in range(3):
            train(model, wrapped, batches(5))
            with shown(wrapped):
                assert_replicas_identical(model)
        wrapped.take_part()
        assert_replicas_identical(model)
    assert wrapped.decays() == [0.9] and not hasattr(wrapped, "train")
    if hvd.rank() == 0:
        # Which changes nothing, and waits for nobody.
        wrapped.decays()
    train(model, wrapped, batches(1))
    with raises(RuntimeError, "before or after"), wrapped.shared_parameters():
        wrapped.swap()


def resumed(saved, load, every=1, outer=None):
    """A model and its optimizer as a script of Horovod's resumes them."""
    model = model_of(seed=hvd.rank())
    adamw = torch.optim.AdamW(model.parameters(), 0.01)
    optimizer = hvdc.UpdateOptimizer(
        adamw, named_parameters=model.named_parameters(), every=every, outer=outer
    )
    if load:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))  # whose tensors it goes on in
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    before = flat(model)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert torch.equal(flat(model), before)  # no weight decay
    return model, optimizer


@case(2, 3)
def horovods_broadcast_of_an_optimizers_state_is_no_deadlock():
    for every, outer in ((1, None), (2, hvdc.Nesterov())):
        model, optimizer = resumed(None, False, every, outer)
        train(model, optimizer, batches(4))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        for on_all in (False, True):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                again, its = resumed(saved, on_all or hvd.rank() == 0, every, outer)
                train(again, its, batches(4, seed=1))
            assert_replicas_identical(again)
            assert its.compression.stats()["steps"] == 4 // every
            assert its.compression._session.exchange.steps_taken() == 8 // every
            steps = [its.state[p]["step"].item() for p in again.parameters() if p in its.state]
            assert set(steps) == {saved[1]["state"][0]["step"].item() + 4}, steps
            told = any("rank 0 has loaded a state" in str(each.message) for each in caught)
            # Once in a process.
            assert told == (not on_all and hvd.rank() == 0 and every == 1)
    for options in ({}, {"every": 2}):
        with raises(MismatchError, "different steps" if not options else "local_steps"):
            model = model_of()
            late = of_updates(model, torch.optim.AdamW(model.parameters(), 0.01), **options)
            if hvd.rank() == 1:
                late.compression._session.exchange._begin_at(3)
                late.local_steps = len(options)
            train(model, late, batches(1))


@case(1)
def an_optimizer_that_takes_parameters_to_be_where_it_left_them_is_refused():
    for cls in (torch.optim.LBFGS, type("Own", (torch.optim.LBFGS,), {})):
        with raises(ValueError, "LBFGS", "diverges", "such as SGD or AdamW"):
            hvdc.UpdateOptimizer(cls(model_of().parameters()))
    with raises(TypeError, "put what is none around the UpdateOptimizer"):
        hvdc.UpdateOptimizer(object())
