"""DeMo (Peng, Quesnelle, Kingma, arXiv 2411.19870) against its published code, as a gradient
compression: without lr and sign."""

import numpy as np
import pytest
from battery_facts import bytes_of, copies, steps_of
from paper_checks import alone, normal, payload_of, seeded  # noqa: F401
from ranks import end_step, ranks_of

from horovod_compress import get_compressor, kernels
from horovod_compress.compressors.base import Step
from horovod_compress.compressors.demo import _dct
from horovod_compress.engine.lockstep import run_step
from horovod_compress.kernels import reference

torch = pytest.importorskip("torch")


def dct(x):
    """Orthonormal DCT-II of the last dimension, by the Fourier transform of the signal and its
    mirror image."""
    n = x.shape[-1]
    frequency = np.arange(n)
    waves = np.fft.fft(np.concatenate([x, x[..., ::-1]], axis=-1))[..., :n] * np.exp(
        -1j * np.pi * frequency / (2 * n)
    )
    return waves.real / 2 * np.sqrt(np.where(frequency, 2, 1) / n)


def dct_2d(chunks):
    return dct(dct(chunks).swapaxes(-1, -2)).swapaxes(-1, -2)


def inverse_2d(coefficients):
    h, w = coefficients.shape[-2:]
    return dct(np.eye(h)) @ coefficients @ dct(np.eye(w)).T


def published(delta, chunk, k):
    """What is sent of a matrix: the chunk's extents are the largest divisors up to `chunk`; the k
    largest of each chunk."""
    h, w = (max(d for d in range(1, chunk + 1) if n % d == 0) for n in delta.shape)
    chunks = delta.reshape(delta.shape[0] // h, h, delta.shape[1] // w, w).swapaxes(1, 2)
    coefficients = torch.from_numpy(dct_2d(chunks)).reshape(*chunks.shape[:2], h * w)
    at = coefficients.abs().topk(min(k, h * w), dim=-1).indices
    sent = torch.zeros_like(coefficients).scatter_(-1, at, coefficients.gather(-1, at))
    return inverse_2d(sent.reshape(chunks.shape).numpy()).swapaxes(1, 2).reshape(delta.shape)


@pytest.mark.parametrize("shape", [(128, 192), (60, 98), (7, 13), (521, 64), (1, 640), (67, 71)])
@pytest.mark.parametrize("options", ["", "k=3,decay=0.9", "chunk=16,k=20,decay=1"])
def test_demo_follows_the_published_code(shape, options):
    demo = get_compressor(f"demo:{options}")
    gradients = [np.exp(normal(*shape)) * normal(*shape) for _ in range(4)]
    means, state = alone(f"demo:min_numel=0,{options}", *gradients)
    delta = np.zeros(shape)
    for gradient, mean in zip(gradients, means):
        delta = demo.decay * delta + gradient
        sent = published(delta, demo.chunk, demo.k)
        delta -= sent
        np.testing.assert_allclose(mean, sent, atol=2e-5 * np.abs(gradient).max())
    np.testing.assert_allclose(
        state["residual"].reshape(shape), delta, atol=5e-5 * np.abs(gradients[0]).max()
    )


def test_vectors_and_tensors_of_more_dimensions_are_matrices():
    g = normal(64, 3, 7, 7)
    for shape in ((64, 147), (64, 147, 1), (8, 8, 147)):
        np.testing.assert_array_equal(
            alone("demo", g)[0][0].reshape(-1),
            alone("demo:columns=147", g.reshape(shape))[0][0].reshape(-1),
        )
    vector = normal(640)
    parts = [alone("demo:min_numel=0", part)[0][0] for part in vector.reshape(10, 64)]
    np.testing.assert_array_equal(alone("demo:min_numel=0", vector)[0][0], np.concatenate(parts))
    with pytest.raises(ValueError, match="columns=5 does not divide the 64 elements"):
        alone("demo:min_numel=0,columns=5", normal(8, 8))


def test_what_is_smooth_takes_few_coefficients():
    """A plane wave of a chunk is one coefficient, a mean is another; topk would send every
    element."""
    i, j = np.mgrid[:64, :64]
    wave = (
        3 + np.cos(np.pi * (2 * i + 1) * 5 / 128) * np.cos(np.pi * (2 * j + 1) * 2 / 128)
    ).astype(np.float32)
    (sent,), state = alone("demo:k=2", wave)
    np.testing.assert_allclose(sent, wave, atol=1e-5)
    assert np.abs(state["residual"]).max() < 1e-5


@pytest.mark.parametrize("decay", [1, 0.9, 0])
@pytest.mark.parametrize("values", ["fp32", "2bit"])
def test_what_is_sent_and_what_waits_are_the_decayed_residual_and_the_gradient(decay, values):
    """mean of results + mean of residuals = decay · mean of residuals before + mean of gradients,
    in every step and on every rank."""
    shapes = {"w": (24, 30), "conv": (6, 5, 3, 3)}
    exchanges = ranks_of(f"demo:min_numel=0,chunk=8,k=3,decay={decay},values={values}", 3, shapes)
    before = {name: 0 for name in shapes}
    for ranks in steps_of(1, 5, 3, shapes, spread=False):
        given = copies(ranks)
        results = run_step(exchanges, ranks)
        assert all(bytes_of(results)[0] == other for other in bytes_of(results))
        for name in shapes:
            waits = np.mean(
                [ex.arrays()[name]["residual"] for ex in exchanges], axis=0, dtype=np.float64
            )
            gradient = np.mean([named[name] for named in given], axis=0, dtype=np.float64)
            np.testing.assert_allclose(
                results[0][name] + waits, decay * before[name] + gradient, atol=2e-5
            )
            before[name] = waits


def test_the_matrix_is_orthonormal_and_its_numbers_are_the_same_everywhere():
    """No entry, of chunks up to 64, lies so near to the middle of two floats that a cosine off by
    its last bits would round to the other."""
    for n in range(1, 65):
        matrix = _dct(n).reshape(n, n)
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(n), atol=1e-6)
        exact = dct(np.eye(n)).T
        np.testing.assert_allclose(matrix, exact, atol=1e-6)
        i, frequency = np.meshgrid(np.arange(n), np.arange(n))
        wide = np.sqrt(np.where(frequency, 2, 1) / n) * np.cos(
            np.pi / 2 * ((2 * i + 1) * frequency % (4 * n)) / n
        )
        np.testing.assert_array_equal(matrix == 0, np.abs(wide) < 1e-10)
        wide = wide[np.abs(wide) > 1e-10]
        for nudge in (1 - 2**-50, 1 + 2**-50):
            np.testing.assert_array_equal(
                (wide * nudge).astype(np.float32), wide.astype(np.float32), err_msg=f"{n}"
            )


def test_bodies_for_other_tensors_are_refused():
    payload, compressor, _ = payload_of("demo:chunk=8,k=3", normal(32, 48))
    for module in {kernels.cpu, reference}:
        out = np.zeros(32 * 48, np.float32)
        (rows,), (columns,) = compressor._transforms([out])
        for wrong, width in ((rows, 47), (rows, 0), (rows[:-1], 48), (rows, 32 * 48)):
            with pytest.raises(ValueError):
                module.decode_add_dct(
                    [out], [payload.body], [wrong], [columns], width=width, scale=1.0
                )
        with pytest.raises(ValueError, match="shorter|early|entries|gaps"):
            module.decode_add_dct(
                [out], [payload.body[:-3]], [rows], [columns], width=48, scale=1.0
            )
        assert not out.any()


def test_a_dense_step_decays_what_was_kept_too():
    _, demo, state = payload_of("demo:min_numel=0,decay=0.5", normal(64, 64))
    end_step(demo, state, True)
    kept, g = state.arrays["residual"].copy(), normal(64 * 64)
    payload = demo.encode_dense(g.copy(), state, Step(1, 0, 2))
    np.testing.assert_array_equal(payload.array, np.float32(0.5) * kept + g)
