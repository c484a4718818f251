"""The squared norm of each micro-batch's own gradient, seen on its way into `.grad`.

How noisy a gradient is can be told from how much the gradients of a step's micro-batches differ. They are never kept apart: autograd adds
each to the sum. But a hook on a parameter sees what is about to be added. Its norm costs one read and no copy, stays on the device until
the step is over, and leaves what is trained as it is, bit for bit. `brim.audit.run.noise` makes the noise scale of these numbers.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SMALL_BYTES: Final = 64 << 20
"""Where all trainable gradients together are smaller than this (LoRA, small models), reading them now and then costs next to nothing."""
EVERY: Final = 4
"""... which is in every so many steps, unless more is asked for: enough for an estimate, at a fourth of the cost."""


def steps_between(asked: bool | None, parameters: Sequence[torch.nn.Parameter]) -> int | None:
    """In every how many steps the squares are kept; None: never. `asked` is None where nobody has said."""
    if asked is not None:
        return 1 if asked else None
    gradient_bytes = sum(each.numel() * each.element_size() for each in parameters if each.requires_grad)
    return EVERY if gradient_bytes < SMALL_BYTES else None


class GradientSquares:
    """Sums the squares of one micro-batch at a time, while its hooks are on the parameters.

    `scale` is what a loss scaler multiplies losses by. It stays the same within a step.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], scale: Callable[[], float] = lambda: 1.0) -> None:
        self._parameters = parameters
        self._scale = scale
        self._norms: list[torch.Tensor] = []
        self._seen: set[int] = set()
        self._is_whole = True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Put the hooks on for one step, and off again: nothing of them is left on a model that goes elsewhere."""
        trained = [(index, each) for index, each in enumerate(self._parameters) if each.requires_grad]
        hooks = [each.register_hook(self._hook_of(index)) for index, each in trained]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self.begin()

    def begin(self) -> None:
        """A micro-batch begins; what one that failed has left is forgotten."""
        self._norms.clear()
        self._seen.clear()
        self._is_whole = True

    def take(self) -> torch.Tensor | None:
        """The squared norm of all that went by since `begin`, on the device; None if parts of a gradient came one after another."""
        if not self._is_whole or not self._norms:
            return None
        device = self._norms[0].device
        return torch.stack([norm.to(device) for norm in self._norms]).square().sum()

    def unscaled(self, squares: Sequence[torch.Tensor | None], weights: Sequence[float]) -> list[float | None]:
        """Read, once for a step: the squares of the gradients of plain mean losses, whatever weight and scale they went backward with."""
        known = [square for square in squares if square is not None]
        values = iter(torch.stack([square.to(known[0].device) for square in known]).tolist() if known else [])
        scale = self._scale() if known else 1.0
        found = []
        for square, weight in zip(squares, weights, strict=True):
            value = math.nan if square is None else next(values)
            # fp16 overflows now and then, and such a step is not taken; after many such steps the scaler has halved its scale to zero.
            divisor = (weight * scale) ** 2
            value = value / divisor if divisor else math.nan
            found.append(value if math.isfinite(value) else None)
        return found

    def _hook_of(self, index: int) -> Callable[[torch.Tensor | None], None]:
        def look(gradient: torch.Tensor | None) -> None:
            if (
                gradient is None
            ):  # a function that has none for this input: bitsandbytes' product with adapters that begin at zero
                return
            # A weight that two checkpointed parts share gets its gradient in two parts, and their squares do not add up to that of the sum.
            if index in self._seen or gradient.layout != torch.strided:
                self._is_whole = False
                return
            self._seen.add(index)
            self._norms.append(
                torch.linalg.vector_norm(gradient.detach(), dtype=torch.promote_types(gradient.dtype, torch.float32))
            )

        return look
