"""Refusals of compressions in TensorFlow."""

from typing import Any, Iterable

from ..compressors.base import Compressor
from ..compressors.dense import dense_compressor
from ..session.notices import warn_once
from .horovod_internals import is_scaler

ONE_PASS = "A tape's gradient is one pass, for which moments=minibatch is the same"


def check_elastic(compressor: Compressor, optimizer: Any) -> None:
    """ValueError for what cannot work where ranks come and go."""
    if optimizer is None:
        raise ValueError(
            "in an elastic job a rank may be left alone, for which Horovod reduces nothing, and "
            "what it holds back is applied by the optimizer: bind "
            f"the compression to that, as in hvdc.Compression.{compressor.id}(optimizer)"
        )
    dense = compressor.policy.dense
    for adding, instead in (
        (compressor, "take another algorithm"),
        (dense_compressor(dense, 0), "say dense=fp32 or dense=fp16"),
    ):
        if len({adding.collectives(size) for size in range(1, 129)}) > 1:
            what = compressor.id if adding is compressor else f"dense={dense}"
            raise ValueError(
                f"{what} adds up integers, whose type depends on the number of ranks, and the "
                f"operations of a traced function keep theirs: in "
                f"elastic jobs with TensorFlow {instead}"
            )


def tell_of_missing_gradients() -> None:
    """Warns once that a tape has come to a compression's results."""
    warn_once(
        "a tape records what is made of a compression's results, which have no gradients. Where it "
        "is asked for gradients through them, that part is missing: take second derivatives of the "
        "gradients of a tape of TensorFlow's own, and have only the last ones reduced. Where it is "
        "not, nothing is missing; gradient() called outside of the tape's block avoids this warning"
    )


def tell_of_scaler(optimizers: Iterable[Any]) -> None:
    """Warns once where a tape whose gradients come to a compression without grad_scaler may have a
    scaled loss. optimizers: those of its function."""
    if any(getattr(each, "dynamic", True) for each in filter(is_scaler, optimizers)):
        warn_once(
            "a LossScaleOptimizer is in reach of a tape, and its compression does not know: if the "
            "tape's loss is scaled, what waits to be sent will not follow the scale. Give it, as "
            "in hvdc.Compression.topk(grad_scaler=optimizer)"
        )


def check_elastic_scale(scaler: Any) -> None:
    # Keras 3's has no other.
    if getattr(scaler, "dynamic", True):
        raise ValueError(
            "in an elastic job with TensorFlow new ranks would begin with another loss scale than "
            "the others have: say "
            "LossScaleOptimizer(optimizer, dynamic=False, initial_scale=1024)"
        )


def check_scaler(scaler: Any) -> None:
    """TypeError for what is neither a LossScaleOptimizer nor None."""
    if scaler is not None and not is_scaler(scaler):
        raise TypeError(
            f"grad_scaler must be a tf.keras.mixed_precision.LossScaleOptimizer, not {scaler!r}"
        )


def check_options(compressor: Any, optimizer: Any = None) -> None:
    """ValueError for options that TensorFlow cannot serve."""
    policy = compressor.policy
    if policy.transport != "horovod":
        raise ValueError(
            "with TensorFlow payloads are moved by operations of the graph: say transport=horovod"
        )
    if policy.exchange != "gather":
        raise ValueError(
            "exchange=split needs PyTorch: in a graph no operation sees all tensors of a step. "
            "With TensorFlow say exchange=gather"
        )
    if policy.moments == "per_sample":
        raise ValueError(
            "moments=per_sample needs PyTorch, which shows layers' inputs. With TensorFlow say "
            "moments=microbatch, and give hvd.DistributedOptimizer("
            "backward_passes_per_step=4) or more: groups of samples stand for samples; or "
            "moments=minibatch"
        )
    if policy.moments == "microbatch" and optimizer is None:
        raise ValueError(
            f"moments=microbatch needs the optimizer, to see every backward pass. {ONE_PASS}"
        )
