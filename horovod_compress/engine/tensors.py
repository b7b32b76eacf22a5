"""The tensors of a compression on one rank: what they keep, and what was counted of them."""

import json
import math
import zlib
from typing import Any, Dict, Iterator, List, Optional, cast

import numpy as np

from .. import kernels
from ..compressors.base import Compressor
from ..compressors.dense import dense_compressor
from ..compressors.state import Model, Role
from ..compressors.wrapper import kin_of, with_options
from ..protocol.machine import Machine
from ..protocol.requests import DECLARABLE, FLOAT32
from .dense_policy import compressor_for
from .record_types import Stats, TensorStats
from .tensor import SENT, SPENT, Tensor
from .wrappers import wrapped


class Tensors:
    """The tensors of a compression, by name, in the order in which they became known.

    Attributes:
        compressor: the configuration in force.
        machine: the ranks on this rank's machine, where features need them; else None.
    """

    def __init__(self, compressor: Compressor, machine: Optional[Machine]) -> None:
        self.compressor, self.machine = compressor, machine
        self._named: Dict[str, Tensor] = {}
        # A compressor of each kin.
        self._kins: List[Compressor] = []
        self._model = Model()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._named.values())

    def __contains__(self, name: str) -> bool:
        return name in self._named

    def __getitem__(self, name: str) -> Tensor:
        return self._named[name]

    def add(self, name: str, shape: tuple, variant: Compressor, size: int) -> Tensor:
        """Makes a tensor known.

        Args:
            name: of the tensor.
            shape: of the tensor.
            variant: the compressor that it has, where that does not leave it to another one.
            size: how many ranks there are.

        Raises:
            ValueError: the compressor does not keep to its contract.
        """
        chosen = wrapped(compressor_for(variant, name, shape), shape, self.machine)
        kins = [kin_of(each) for each in (*self._kins, chosen)]
        kin = kins.index(kins[-1])
        if kin == len(self._kins):
            self._kins.append(chosen)
        elif self._kins[kin] == chosen:
            chosen = self._kins[kin]
        digest = zlib.crc32(json.dumps([repr(chosen), name, shape]).encode())
        state, declared = chosen.init(name, shape), chosen.collectives(size)
        undeclared = [key for key in state.arrays if not isinstance(chosen.roles.get(key), Role)]
        if undeclared:
            raise ValueError(
                f"{chosen.id} keeps {', '.join(undeclared)}: `roles` must say of each array of the "
                f"state whether it is LOCAL or SHARED"
            )
        if not isinstance(declared, tuple) or not declared or not DECLARABLE.issuperset(declared):
            raise ValueError(
                f"{chosen.id}: `collectives` must return a tuple of some of {sorted(DECLARABLE)}, "
                f"not {declared!r}"
            )
        # Tensors that go dense may do so by the same algorithm.
        dense = dense_compressor(variant.policy.dense, variant.policy.seed or 0)
        if type(chosen) is type(self.compressor) and chosen != dense:
            self._model.add(name, math.prod(shape))
            state.model = self._model
        self._named[name] = Tensor(name, chosen, state, kin, digest, math.prod(shape), declared)
        return self._named[name]

    def remove(self, name: str) -> None:
        """Forgets a tensor."""
        del self._named[name]

    def replace(self, name: str, **options: Any) -> None:
        """Changes options of a tensor's compressor, between steps: a momentum that a scheduler has
        changed."""
        tensor = self._named[name]
        changed = with_options(tensor.compressor, **options)
        # Tensors of a group have the same one.
        known = next((each for each in self._kins if each == changed), changed)
        if known is changed:
            self._kins[tensor.kin] = changed
        tensor.compressor = known
        if known.policy.m:
            tensor.begin_momentum()

    def known(self, name: str, grad: np.ndarray) -> Tensor:
        """The tensor that a gradient is of. ValueError for what cannot be one."""
        if name not in self._named:
            raise ValueError(f"{name} is none of the tensors of this compression")
        tensor = self._named[name]
        fits = grad.dtype == FLOAT32 or grad.dtype == np.float64 and self.carries_float64(name)
        if not fits or grad.shape != (tensor.numel,):
            raise ValueError(
                f"{name}: expected {tensor.numel} float32 in one dimension, not {grad.shape} of "
                f"{grad.dtype}"
            )
        return tensor

    def is_payload(self, name: str, carrier: np.ndarray) -> bool:
        """Returns whether the carrier that `Exchange.submit` returned is what ranks have to send,
        and not the single 1 that goes beside it."""
        return carrier is not self._named[name].carrier

    def on_device(self, name: str) -> bool:
        """True if a tensor's steps can run on its gradient's device; else they are on the CPU."""
        tensor = self._named.get(name)
        return tensor is not None and tensor.compressor.traits.on_device and tensor.numel < 2**31

    def carries_float64(self, name: str) -> bool:
        """Returns whether gradients of float64 of this tensor may come as such, because they are
        not compressed; else they have to be float32."""
        tensor = self._named.get(name)
        clips = self.compressor.policy.clip_norm is not None
        return tensor is not None and tensor.compressor.traits.carries_float64 and not clips

    @property
    def keep_state(self) -> bool:
        """True if anything of a gradient is kept for later steps."""
        return any(tensor.state.arrays for tensor in self)

    def arrays(self) -> Dict[str, Dict[str, np.ndarray]]:
        """{name: {array name: array}}: what is kept, up to date, and not a copy."""
        for tensor in self:
            tensor.compressor.apply_pending(tensor.state)
        return {tensor.name: tensor.state.arrays for tensor in self}

    def totals(self) -> Dict[str, float]:
        """Counts of all since the start."""
        return {key: sum(each.counters[key] for each in self) for key in (*SENT, *SPENT)}

    def stats(self, totals: Dict[str, float]) -> Stats:
        """As of `Driver.stats`, with these totals."""
        residuals = [
            residual for residual in (its.residual for its in self) if residual is not None
        ]
        squares = sum(kernels.squared_norms(residuals))
        dense, sent = totals["dense_bytes"], totals["bytes_sent"]
        computed = {
            "ratio": dense / sent if sent else 1.0,
            "residual_norm": squares**0.5,
            "overflows": sum(tensor.state.overflows for tensor in self),
        }
        return cast(Stats, {**totals, **computed})

    def stats_by_name(self) -> Dict[str, TensorStats]:
        """{name: {"bytes_sent", "dense_bytes", "elements_sent"}} of each tensor: totals since the
        start. bytes_sent has the tensor's frames and carriers, to which `Driver.stats` adds
        others."""
        return {
            tensor.name: cast(TensorStats, {key: tensor.counters[key] for key in SENT})
            for tensor in self
        }
