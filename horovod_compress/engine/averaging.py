"""The arrays of all ranks as one: means over ranks."""

from typing import Dict, Optional, Sequence

import numpy as np

from ..protocol.handshake import AnyTransport

# By tensor and array name.
Arrays = Dict[str, Dict[str, np.ndarray]]


def mean_of(ranks: Sequence[Arrays]) -> Arrays:
    """The mean over ranks. Sums are in float64, so that the mean of equal arrays is equal to the
    last bit."""
    return {
        name: {
            key: np.mean([arrays[name][key] for arrays in ranks], axis=0, dtype=np.float64).astype(
                array.dtype
            )
            for key, array in named.items()
        }
        for name, named in ranks[0].items()
    }


def means_over_ranks(
    arrays: Arrays,
    transport: AnyTransport,
    label: str,
    counts: bool = True,
    ranks: Optional[int] = None,
) -> Arrays:
    """The same as `mean_of`, with a collective. All ranks call it.

    Args:
        arrays: this rank's, with the same names and shapes on all ranks.
        transport: adds up float64.
        label: of this exchange.
        counts: whether this rank's arrays are part of the mean.
        ranks: how many ranks count; None: all.
    """

    def mean(name: str, array: np.ndarray) -> np.ndarray:
        summed = transport.allreduce(
            name, array.astype(np.float64) if counts else np.zeros(array.shape)
        )()
        return (summed / (ranks or transport.size)).astype(array.dtype)

    # In the same order on all ranks, whatever the order in which they came to know tensors.
    return {
        name: {
            key: mean(f"{label}.{name}.{key}", array) for key, array in sorted(arrays[name].items())
        }
        for name in sorted(arrays)
    }
