"""Sums over samples of squared gradients in recurrent, attention and transformer layers: against a
loop over samples."""

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch")  # horovod_compress.torch needs it

from moments_checks import B, assert_taken, collector, loop, loss_of  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections", "ignore:.*nested tensor")
T = 6


class BatchFirst(nn.Module):
    """A layer whose inputs and outputs have samples second: for loss_of and loop, which want them
    first."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *xs):
        output = self.layer(*(x.transpose(0, 1) for x in xs))
        return (output[0] if isinstance(output, tuple) else output).transpose(0, 1)


class First(nn.Module):
    """A layer's output without what else it returns."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args):
        return self.layer(*args)[0]


class States(nn.Module):
    """A recurrent layer that begins with states and of which both output and last states count."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, *states):
        states = [state.transpose(0, 1).contiguous() for state in states]
        output, last = self.layer(x, tuple(states) if len(states) > 1 else states[0])
        last = last if isinstance(last, tuple) else (last,)
        return torch.cat(
            [output.flatten(1), *(state.transpose(0, 1).flatten(1) for state in last)], 1
        )


class Packed(nn.Module):
    """Sequences of several lengths, which the first feature of the first step holds."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        lengths = x[:, 0, 0].long()
        output, last = self.layer(
            pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        )
        assert isinstance(output, PackedSequence)
        output = pad_packed_sequence(output, batch_first=True, total_length=T)[0]
        last = last[0] if isinstance(last, tuple) else last
        return torch.cat([output.flatten(1), last.transpose(0, 1).flatten(1)], 1)


class Cell(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        states = None
        for t in range(x.shape[1]):
            states = self.layer(x[:, t], states)
        return torch.cat(states, 1) if isinstance(states, tuple) else states


RECURRENT = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn": nn.RNN,
    "rnn of relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
}
OPTIONS = {
    "one layer": {},
    "layers": dict(num_layers=3),
    "both directions": dict(bidirectional=True),
    "layers in both directions": dict(num_layers=2, bidirectional=True),
    "without bias": dict(bias=False, num_layers=2),
}
CELLS = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "rnn": nn.RNNCell,
    "rnn of relu": lambda *a, **k: nn.RNNCell(*a, nonlinearity="relu", **k),
}


def check(module, *inputs, rtol=1e-4):
    """Sums equal a loop over samples, and gradients torch's own."""
    expected = loop(module, *inputs)
    module.zero_grad()
    own = torch.autograd.grad(loss_of(module(*inputs)), list(module.parameters()))
    moments = collector(module)
    loss_of(module(*inputs)).backward()
    for (name, param), gradient in zip(module.named_parameters(), own):
        torch.testing.assert_close(
            param.grad,
            gradient,
            rtol=rtol,
            atol=rtol * gradient.abs().max().item(),
            msg=lambda m: f"{name}: {m}",
        )
    assert_taken(moments, expected, rtol)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)


@pytest.mark.extended
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_layers(kind, options, batch_first):
    layer = RECURRENT[kind](3, 4, batch_first=batch_first, **OPTIONS[options])
    check(First(layer) if batch_first else BatchFirst(layer), torch.randn(B, T, 3))


@pytest.mark.parametrize(
    "options", [{}, dict(num_layers=2, bidirectional=True), dict(num_layers=2, bias=False)]
)
def test_lstm_with_projections(options):
    check(First(nn.LSTM(3, 4, proj_size=2, batch_first=True, **options)), torch.randn(B, T, 3))


@pytest.mark.parametrize("kind", RECURRENT)
def test_first_and_last_states(kind):
    layer = RECURRENT[kind](3, 4, num_layers=2, bidirectional=True, batch_first=True)
    states = [torch.randn(B, 4, 4) for _ in range(2 if kind == "lstm" else 1)]
    check(States(layer), torch.randn(B, T, 3), *states)


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_packed_sequences(kind, bidirectional):
    x = torch.randn(B, T, 3)
    x[:, 0, 0] = torch.tensor([2, 6, 1, 4, 4])
    check(
        Packed(RECURRENT[kind](3, 4, num_layers=2, bidirectional=bidirectional, batch_first=True)),
        x,
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", CELLS)
def test_cells(kind, bias):
    check(Cell(CELLS[kind](3, 4, bias=bias)), torch.randn(B, T, 3))


def test_sequences_without_a_batch_are_one_sample():
    module = nn.GRU(3, 4, num_layers=2)
    moments = collector(module)
    module(torch.randn(T, 3))[0].sin().sum().backward()
    assert_taken(moments, {name: param.grad**2 for name, param in module.named_parameters()})


def test_dropout_between_layers():
    # All of it: the same in every call.
    module = First(nn.LSTM(3, 4, num_layers=2, dropout=1.0, batch_first=True))
    check(module, torch.randn(B, T, 3))
    some = First(nn.GRU(3, 64, num_layers=2, dropout=0.5, batch_first=True))
    moments = collector(some)
    x = torch.randn(B, T, 3)
    assert not torch.equal(some(x), some(x))
    some.eval()
    torch.testing.assert_close(some(x), copy.deepcopy(some)(x))
    assert moments is not None


def test_a_recurrent_layer_used_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.GRU(3, 3, batch_first=True)

        def forward(self, x):
            return self.layer(self.layer(x)[0])[0]

    check(Twice(), torch.randn(B, T, 3))


def test_packed_sequences_of_a_layer_used_twice_are_refused():
    layer = Packed(nn.GRU(3, 4, batch_first=True))
    moments = collector(layer)
    x = torch.ones(B, T, 3)
    with pytest.raises(ValueError, match="packed sequences more than once"):
        (layer(x) + layer(x)).sum().backward()
    assert moments is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_recurrent_layers_of_other_types(dtype):
    module, x = First(nn.LSTM(3, 4, batch_first=True)).to(dtype), torch.randn(B, T, 3, dtype=dtype)
    expected = loop(copy.deepcopy(module).double(), x.double())
    moments = collector(module)
    loss_of(module(x).float()).backward()
    assert_taken(moments, expected, rtol=1e-4 if dtype == torch.float64 else 0.2)


def test_autocast():
    module, x = First(nn.LSTM(3, 4, batch_first=True)), torch.randn(B, T, 3)
    expected = loop(module, x)
    moments = collector(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(module(x).float())
    loss.backward()
    assert_taken(moments, expected, rtol=0.1)


# -- attention


class Attention(nn.Module):
    """Queries from one input, keys and values from others, or all from one."""

    def __init__(self, weights=False, **options):
        super().__init__()
        self.layer, self.weights = nn.MultiheadAttention(4, 2, batch_first=True, **options), weights

    def forward(self, *inputs):
        query, key, value = {1: inputs * 3, 2: (*inputs, inputs[-1]), 3: inputs}[len(inputs)]
        return self.layer(query, key, value, need_weights=self.weights)[0]


@pytest.mark.extended
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("inputs", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, dict(bias=False), dict(add_zero_attn=True)])
def test_attention(options, inputs, weights):
    xs = [torch.randn(B, T, 4), torch.randn(B, T + 1, 4), torch.randn(B, T + 1, 4)]
    check(Attention(weights, **options), *xs[:inputs])


def test_attention_with_keys_and_values_of_other_sizes():
    check(
        Attention(kdim=3, vdim=6), torch.randn(B, T, 4), torch.randn(B, 7, 3), torch.randn(B, 7, 6)
    )


def test_attention_with_samples_second():
    class Self(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.MultiheadAttention(4, 2)

        def forward(self, x):
            return self.layer(x, x, x)[0]

    check(BatchFirst(Self()), torch.randn(B, T, 4))


def test_attention_without_a_batch_is_one_sample():
    module = nn.MultiheadAttention(4, 2)
    moments = collector(module)
    x = torch.randn(T, 4)
    module(x, x, x)[0].sin().sum().backward()
    assert_taken(moments, {name: param.grad**2 for name, param in module.named_parameters()})


def test_an_attention_layer_used_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x, y):
            x = self.layer(x, x, x)[0]
            return self.layer(x, y, y)[0]

    check(Twice(), torch.randn(B, T, 4), torch.randn(B, T + 2, 4))


def transformer(cls, batch_first):
    options = dict(dim_feedforward=8, dropout=0.0, batch_first=batch_first)
    if cls is nn.Transformer:
        return nn.Transformer(4, 2, num_encoder_layers=2, num_decoder_layers=2, **options)
    return cls(4, 2, **options)


@pytest.mark.extended
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "cls", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.Transformer]
)
def test_transformers(cls, batch_first):
    layer = transformer(cls, batch_first)
    inputs = [torch.randn(B, T, 4), torch.randn(B, T + 1, 4)][
        : 1 if cls is nn.TransformerEncoderLayer else 2
    ]
    check(layer if batch_first else BatchFirst(layer), *inputs, rtol=1e-3)


def test_a_stack_with_a_norm_of_its_own():
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, dropout=0.0, norm_first=True)
    check(
        BatchFirst(nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(4))),
        torch.randn(B, T, 4),
        rtol=1e-3,
    )


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_transformer_without_a_batch_is_one_sample(batch_first):
    module = transformer(nn.Transformer, batch_first)
    moments = collector(module)
    module(torch.randn(T, 4), torch.randn(T + 1, 4)).sin().sum().backward()
    assert_taken(
        moments, {name: param.grad**2 for name, param in module.named_parameters()}, rtol=1e-3
    )


def test_inference_is_torchs_own():
    model = nn.ModuleList(
        [nn.LSTM(4, 4, batch_first=True), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)]
    ).eval()
    x = torch.randn(B, T, 4)
    with torch.no_grad():
        expected = [model[0](x)[0], model[1](x)]
        moments = collector(model)
        assert torch.equal(model[0](x)[0], expected[0]) and torch.equal(model[1](x), expected[1])
    assert type(model[0](x)[0]) is torch.Tensor and type(model[1](x)) is torch.Tensor
    assert moments is not None


# -- errors


def test_batches_that_are_not_the_samples_are_an_error():
    model = nn.ModuleDict({"lstm": nn.LSTM(3, 4), "out": nn.Linear(4, 2)})
    moments = collector(model)
    with pytest.raises(
        ValueError, match=f"is used for {B} samples and out.* for {T}.*first dimension"
    ):
        model["out"](model["lstm"](torch.randn(T, B, 3))[0]).sum().backward()
    assert moments is not None


def test_keys_and_values_that_are_parameters_are_refused():
    with pytest.raises(ValueError, match="bias_k.*bias_v.*exclude="):
        collector(nn.MultiheadAttention(4, 2, add_bias_kv=True))


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models(backend):
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(B, 3)
    expected = loop(model, x)
    moments = collector(model)
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        loss_of(compiled(x)).backward()
        assert_taken(moments, expected)
        model.zero_grad()


def test_inputs_by_keyword_are_named():
    module = nn.GRU(3, 4)
    moments = collector(module)
    with pytest.raises(ValueError, match="by position"):
        module(input=torch.randn(T, B, 3))[0].sum().backward()
    assert moments is not None
