"""What ZeRO and FSDP2 have in common: a rank holds its part of the optimizer's state, and steps on its part alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.memory.sharding.walk import STEPPING, Engine, Parameter

if TYPE_CHECKING:
    from brim.memory.sharding.shard import Parallel
    from brim.memory.stream import Birth, Trace

_SINGLE_BYTES = 4
# Counters of steps: a number a tensor, which nobody splits.
_SCALAR_BYTES = 8
# What clipping makes per parameter, and not per element (`torch.nn.utils.clip_grad_norm_`).
_NORMS = frozenset({"aten::linalg_vector_norm", "aten::stack"})


class Split(Engine):
    """An engine that splits what belongs to parameters evenly."""

    def __init__(self, trace: Trace, parallel: Parallel, *, widens: bool, on_host: bool) -> None:
        """`widens`: the optimizer works on float32; `on_host`: not on the device."""
        super().__init__(trace)
        self.parallel = parallel
        self.on_host = on_host
        self._item_bytes = max((each.item_bytes for each in self.reading.trainable), default=_SINGLE_BYTES)
        self._widens = widens
        self._parameters = {each.number: each for each in self.reading.parameters}

    def split(self, size: int) -> int:
        """A rank's part."""
        return -(-size // self.parallel.ranks)

    def widened(self, size: int) -> int:
        """Bytes in float32 of what has so many in the dtype in which it trains."""
        return size * _SINGLE_BYTES // self._item_bytes if self._widens else size

    def birth(self, number: int, birth: Birth) -> None:
        """Sort by what it belongs to."""
        if birth.kind == "optimizer" or self.now.phase in STEPPING:
            self.of_the_step(number, birth)
        elif number in self.reading.gradients:
            self.gradient(number)
        elif number in self._parameters:
            self.parameter(self._parameters[number])
        else:
            self.writer.copy(number)

    def parameter(self, parameter: Parameter) -> None:
        """A parameter is made."""
        self.writer.copy(parameter.number)

    def gradient(self, number: int) -> None:
        """A fresh gradient of a parameter is there."""
        self.writer.copy(number)

    def of_the_step(self, number: int, birth: Birth) -> None:
        """Optimizer state, and what clipping and the optimizer's step need in passing."""
        if self.on_host:
            return
        if birth.size <= _SCALAR_BYTES or birth.operator in _NORMS:
            self.writer.copy(number)
        else:
            widened = self.widened(birth.size) if self.reading.states_follow_dtype else birth.size
            self.writer.copy(number, self.split(widened))
