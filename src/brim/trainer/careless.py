"""A worker that believes its memory to be endless: all sequences of a step in one micro-batch, whatever the limit.

`brim demo` and the tests of recovery train with it, under a limit that is real: what follows is an out-of-memory that nobody has staged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from brim.locale import _
from brim.step.budget import Budget
from brim.trainer import worker

if TYPE_CHECKING:
    from pathlib import Path

    from brim.trainer.ranks import World


_NO_SLICES: Final = 1e9
"""In tokens, what another micro-batch seems to cost: so much that it is never worth one."""


class Careless(worker.Worker):
    """Slices nothing by itself."""

    def budget(self) -> Budget:
        """As if everything fitted; what fails is learned from, as ever."""
        card = self._card
        longest = (card.settings.seq_len or 1) + (card.settings.target_len or 0)
        return replace(
            Budget.tokens(card.effective_batch * longest, fixed_tokens=_NO_SLICES), because=_("As if the memory had no end.")
        )


def work(folder: Path, world: World) -> worker.Ended:
    """As `brim.trainer.worker.work`."""
    return Careless.of(folder, world).run()


def main(arguments: list[str]) -> None:
    """As `brim.trainer.worker.main`."""
    worker.main(arguments, work)
