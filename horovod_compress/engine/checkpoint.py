"""A compression's state in and out: plain values and arrays, of one rank or, portable, the mean of
all ranks."""

import itertools
import numbers
from typing import (
    Any,
    Dict,
    Iterable,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import numpy as np

from ..compressors.state import zeros
from ..kernels.reference.dense import TOO_LARGE
from ..protocol.handshake import AnyTransport, Words, agree, first_difference, gather, shown
from .tensor import Tensor

# By tensor and array name.
Arrays = Dict[str, Dict[str, np.ndarray]]
Difference = Optional[Tuple[str, Any, Any]]
_FORMAT = 1
# As many of the ranks whose states are missing are named.
_NAMED = 8
# Names of arrays that a state may hold beside its algorithm's, each as long as the tensor.
BESIDE: Set[str] = set()
_HEADER = ("format", "id", "rank", "size", "seed", "step")


class Parts:
    """The border to a feature with which ranks keep parts of tensors: what states say of those.
    This one is for whole tensors alone."""

    # What a state's header says of whole tensors.
    of_none: Dict[str, Any] = {}

    def of_tensors(self, tensors: Iterable[Tensor]) -> Dict[str, Any]:
        """The entries of a state's header for these."""
        return self.of_none

    def wrong(self, header: Mapping[str, Any]) -> Difference:
        """The difference to what a header may say, if there is one."""
        return None

    def refuse_missing(self, headers: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError where all ranks' parts do not make tensors up."""

    def alike(self, header: Mapping[str, Any]) -> Dict[str, Any]:
        """The entries of a header that are the same on all ranks."""
        return {}

    def shape(self, header: Mapping[str, Any], name: str, array: np.ndarray) -> Tuple[int, ...]:
        """That of a tensor's array, were it of the whole tensor."""
        return array.shape

    def whole(self, arrays: Arrays, header: Mapping[str, Any]) -> Arrays:
        """A rank's arrays, as long as its tensors. They are zero outside of its parts: means over
        ranks are then what results are still to bring."""
        return arrays

    def own(self, tensor: Tensor, arrays: Dict[str, np.ndarray]) -> Dict[str, np.ndarray]:
        """A rank's part of means over ranks of a tensor's whole arrays."""
        return arrays


# A feature replaces it.
parts = Parts()


class Saved(NamedTuple):
    """A state_dict that was read. header: all but the arrays; its rank is None where the arrays
    are means over all ranks."""

    header: Dict[str, Any]
    arrays: Arrays


def saved(
    identity: Dict[str, Any],
    tensors: Iterable[Tensor],
    step: Any,
    into: Optional[Dict[str, Any]] = None,
) -> Dict[str, Any]:
    """A state_dict: what `identity` says of algorithm and rank, and copies of the tensors' arrays.
    into: one of the same tensors that is not needed any more, whose
    arrays' memory is used again."""
    tensors, memory = list(tensors), into["tensors"] if into else {}
    return {
        "format": _FORMAT,
        **identity,
        "step": step,
        "dense_until": {tensor.name: tensor.dense_until for tensor in tensors},
        "factors": {t.name: t.state.factor for t in tensors if "u" in t.state.arrays},
        "tensors": {
            tensor.name: copies(
                {key: np.asarray(array) for key, array in tensor.state.arrays.items()},
                memory.get(tensor.name, {}),
            )
            for tensor in tensors
        },
    }


def copies(
    arrays: Mapping[str, np.ndarray], memory: Mapping[str, np.ndarray]
) -> Dict[str, np.ndarray]:
    """Copies of arrays, by name, each in the memory of that name where it is as long, and on the
    same device."""
    copied = {}
    for key, array in arrays.items():
        fits = key in memory and memory[key].shape == array.shape
        fits = fits and type(memory[key]) is type(array)
        copied[key] = memory[key] if fits else np.empty_like(array)
        np.copyto(copied[key], array)
    return copied


def portable(state: Dict[str, Any], transport: AnyTransport, label: str) -> Dict[str, Any]:
    """The state_dict of which this rank's is `state`, for any number of ranks: the mean over all
    ranks of every array, which leaves those that are alike on all ranks as they are. All ranks call
    it. MismatchError where they are not at the same step."""
    said = {
        key: value for key, value in state.items() if key not in ("rank", "tensors", *parts.of_none)
    }
    arrays = parts.whole(state["tensors"], state)
    agree(
        transport,
        f"{label}.portable",
        {**said, "tensors": _layout(arrays)},
        what="called state_dict(portable=True)",
    )
    return {
        **state,
        **parts.of_none,
        "rank": None,
        "tensors": means_over_ranks(arrays, transport, label),
    }


def synced(
    state: Dict[str, Any], transport: AnyTransport, label: str, even: bool = False
) -> Dict[str, Any]:
    """The state this rank continues from after ranks joined or left, at rank 0's step. Ranks at
    that step keep their own `state`, or with `even` get the mean of those. The others, which have
    just begun or failed elsewhere, get that mean, also of tensors that they do not know yet. All
    ranks call it."""
    kinds = {
        name: {key: (a.dtype.name, a.shape) for key, a in named.items()}
        for name, named in state["tensors"].items()
    }
    told = {key: state[key] for key in ("step", "dense_until", "factors", "shapes") if key in state}
    said = gather(transport, f"{label}.state", {**told, "kinds": kinds})
    counting = [each["step"] == said[0]["step"] for each in said]
    own = counting[transport.rank]
    if all(counting) and not even:
        return state
    kinds, tensors = said[0].pop("kinds"), state["tensors"]
    if not own:
        tensors = {
            name: {key: np.empty(shape, dtype) for key, (dtype, shape) in named.items()}
            for name, named in kinds.items()
        }
    means = means_over_ranks(tensors, transport, label, own, sum(counting))
    return {**state, **said[0], "tensors": tensors if own and not even else means}


def read(state: Any) -> Saved:
    """A state_dict's parts. ValueError for what is none."""
    try:
        header = {key: state[key] for key in _HEADER}
        # The first files have none.
        later = ("dense_until", "factors", "shapes", *parts.of_none)
        header.update((key, state.get(key, {})) for key in later)
        arrays = {
            name: {key: np.asarray(a) for key, a in named.items()}
            for name, named in state["tensors"].items()
        }
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"not a state_dict of a compression: {error!r}") from None
    rank, size = header["rank"], header["size"]
    refuse(wrong_count("size", size) or (None if rank is None else wrong_count("rank", rank)))
    if rank is not None and rank >= size:
        refuse(("rank", Words(f"below its size of {size}"), rank))
    refuse(parts.wrong(header) or _wrong_shapes(header["shapes"]))
    return Saved(header, arrays)


def checked(state: Any, identity: Dict[str, Any], taken: Any) -> Saved:
    """The state for this rank to load. load_state_dict was given its own, a portable one, or all
    ranks' in any order: of those its own at the same number of ranks, else their mean. ValueError
    for states of another algorithm, seed, rank or number of ranks. taken: steps so far, a number or
    one for each tensor."""
    found = _joined(state, identity) if isinstance(state, (list, tuple)) else read(state)
    expected = {"format": _FORMAT, **identity}
    if found.header["rank"] is None:
        expected.update(rank=None, size=found.header["size"], **parts.of_none)
    difference = first_difference(expected, {key: found.header[key] for key in expected})
    wrong_steps = _wrong_by_tensor if isinstance(taken, dict) else wrong_count
    refuse(
        difference
        or wrong_steps("step", found.header["step"])
        or _wrong_by_tensor("dense_until", found.header["dense_until"])
        or _wrong_factors(found.header["factors"])
    )
    refuse_not_finite(found.arrays)
    return found


def refuse_not_finite(arrays: Arrays, of: str = "") -> None:
    """Raises ValueError, which names tensor and array, for values after which no step is finite.

    Args:
        arrays: by tensor and array name, of any shape and type; those of no float type are right.
        of: whose they are, for the message, as " of rank 1".
    """
    for name, named in arrays.items():
        for key, array in named.items():
            if array.dtype.kind != "f" or not array.size:
                continue
            least, most = array.min(), array.max()
            # Written so that NaN is refused as well.
            if not (least > -TOO_LARGE and most < TOO_LARGE):
                worst = most if least > -TOO_LARGE else least
                (where,) = shown(f"{name}.{key}")
                raise ValueError(
                    f"this state does not fit: {where}{of} has elements that are {worst:.3g}, and "
                    "no step would be finite again: load an older one"
                )


def with_momentum(tensors: Iterable[Tensor], arrays: Arrays) -> Arrays:
    """A state's arrays, with u of zeros where only the tensors have it. Where only the state has
    it, the tensors get it."""
    found = dict(arrays)
    for tensor in tensors:
        own, its = tensor.state.arrays.get("u"), arrays.get(tensor.name, {})
        if "u" in its:
            tensor.begin_momentum()
        elif own is not None and tensor.name in arrays:
            found[tensor.name] = {**its, "u": np.zeros(own.size, np.float32)}
    return found


def restore(tensors: Iterable[Tensor], arrays: Arrays) -> None:
    """Copies a state's arrays into the tensors'. ValueError, and nothing changed, where they do not
    fit."""
    tensors = list(tensors)
    its = {t.name: parts.own(t, arrays[t.name]) for t in tensors if t.name in arrays}
    arrays = {**arrays, **its}
    expected = _layout(
        {
            t.name: {key: array for key, array in t.state.arrays.items() if key not in BESIDE}
            for t in tensors
        }
    )
    for t in tensors:
        found = BESIDE & arrays.get(t.name, {}).keys()
        expected[t.name].update(dict.fromkeys(found, f"float32 of {(t.numel,)}"))
    refuse(first_difference(expected, _layout(arrays)))
    for tensor in tensors:
        own = tensor.state.arrays
        for key in BESIDE:
            own.pop(key, None)
        for key, array in arrays[tensor.name].items():
            if key not in own:
                own[key] = zeros(array.size)
            np.copyto(own[key], array)
        tensor.state.replaced()


def steps_of(state: Any) -> int:
    """The number of steps that training had taken, of a state_dict or of the list of all ranks'.
    ValueError for what is none."""
    steps = read(state[0] if isinstance(state, (list, tuple)) and state else state).header["step"]
    refuse(wrong_count("step", steps))
    return int(steps)


def wrong_count(where: str, number: Any) -> Difference:
    """The difference to a whole number of steps, if there is one."""
    whole = isinstance(number, numbers.Integral) and not isinstance(number, bool)
    return None if whole and number >= 0 else (where, Words("a whole number"), number)


def refuse(difference: Difference) -> None:
    """Raises ValueError for a difference between a state and what it is loaded into."""
    if difference:
        (where,), (expected, found) = shown(difference[0]), shown(*difference[1:])
        raise ValueError(
            f"this state does not fit: {where} is {found} in it and {expected} here. A "
            f"compression's state belongs to one rank: "
            "save and load one file a rank, at the same number of ranks and with the same model. "
            "For another number of ranks load the list of all "
            "ranks' states, or one that was saved with portable=True"
        )


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


def _joined(states: Sequence[Any], identity: Dict[str, Any]) -> Saved:
    """The state for this rank, from those of all. ValueError where one is missing, comes twice, or
    is not of the others' job and step."""
    by_rank: Dict[Any, Saved] = {}
    for each in map(read, states):
        refuse_not_finite(each.arrays, f" of rank {each.header['rank']}")
        rank, first = each.header["rank"], next(iter(by_rank.values()), each)
        if rank is None:
            raise ValueError(
                "a state that was saved with portable=True holds all ranks: load it by itself, not "
                "in a list"
            )
        if rank in by_rank:
            raise ValueError(
                f"two of the {len(states)} states are of rank {rank}: load the list of all ranks' "
                f"states, each once"
            )
        difference = first_difference(_said_by_all(first), _said_by_all(each))
        if difference:
            (where,), (expected, found) = shown(difference[0]), shown(*difference[1:])
            raise ValueError(
                f"the states of rank {first.header['rank']} and rank {rank} do not belong "
                f"together: {where} is {expected} in the first and "
                f"{found} in the second. Load the states that the ranks of one job have saved at "
                f"one step"
            )
        by_rank[rank] = each
    size = next(iter(by_rank.values())).header["size"] if by_rank else identity["size"]
    absent = itertools.filterfalse(by_rank.__contains__, range(size))
    missing = list(map(str, itertools.islice(absent, _NAMED)))
    if missing:
        more = " …" if len(by_rank) + len(missing) < size else ""
        raise ValueError(
            f"the state of rank {', '.join(missing)}{more} is missing: load the list of all "
            f"{size} ranks' states"
        )
    all_ranks = [by_rank[rank] for rank in range(size)]
    parts.refuse_missing([each.header for each in all_ranks])
    if size == identity["size"]:
        own = by_rank[identity["rank"]]
        if all(own.header[key] == identity[key] for key in parts.of_none):
            return own
    means = mean_of([parts.whole(each.arrays, each.header) for each in all_ranks])
    return Saved({**by_rank[0].header, **parts.of_none, "rank": None}, means)


def _said_by_all(state: Saved) -> Dict[str, Any]:
    said = {key: value for key, value in state.header.items() if key != "rank"}
    return {**said, **parts.alike(state.header), "tensors": _layout(state.arrays, state.header)}


def _wrong_by_tensor(where: str, steps: Any) -> Difference:
    if not isinstance(steps, dict):
        return where, "steps by tensor", steps
    wrong = (wrong_count(f"{where}.{name}", number) for name, number in steps.items())
    return next(filter(None, wrong), None)


def _wrong_factors(factors: Any) -> Difference:
    good = isinstance(factors, dict) and all(
        isinstance(number, float) and 0 < number <= 1 for number in factors.values()
    )
    return None if good else ("factors", Words("numbers from above 0 to 1 by tensor"), factors)


def _wrong_shapes(shapes: Any) -> Difference:
    good = isinstance(shapes, dict) and all(
        isinstance(shape, (list, tuple)) and not any(wrong_count(name, n) for n in shape)
        for name, shape in shapes.items()
    )
    return None if good else ("shapes", Words("lengths by tensor"), shapes)


def _layout(arrays: Arrays, header: Mapping[str, Any] = {}) -> Dict[str, Dict[str, str]]:
    """Types and shapes of arrays. header: of their state, for the shapes of whole tensors."""
    return {
        name: {
            key: f"{array.dtype} of {parts.shape(header, name, array)}"
            for key, array in named.items()
        }
        for name, named in arrays.items()
    }
