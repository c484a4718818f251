"""brim's part in the Trainer's own life: an entry of the ledger after each step, the state of the run in each checkpoint."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerCallback

from brim.locale import _

if TYPE_CHECKING:
    from brim.trainer.hf import BrimMixin


class BrimBookkeeper(TrainerCallback, ExportableState):
    """What must happen at certain moments of training."""

    def __init__(self, trainer: BrimMixin) -> None:
        # Weak, as in the run: a trainer that is deleted gives its memory back at once, as ever.
        self._trainer: Any = weakref.proxy(trainer)
        self._logging: dict[str, Any] | None = None

    def on_train_begin(self, *_details: Any, **_keywords: Any) -> None:
        """The Trainer has set its sums to zero."""
        if self._logging is not None:
            self._trainer.restore_logging(self._logging)
            self._logging = None

    def on_step_end(self, *_details: Any, **_keywords: Any) -> None:
        """The optimizer has stepped."""
        self._trainer.running.end_step()

    def on_train_end(self, *_details: Any, **_keywords: Any) -> None:
        """The Trainer's loop is done, by plan or because a callback said so."""
        state = self._trainer.state
        finished = state.global_step >= state.max_steps
        self._trainer.running.close(finished=finished, reason="" if finished else self._why())

    def _why(self) -> str:
        return self._trainer.ended_because or _("A callback ended the training.")

    def state(self) -> dict[str, Any]:
        """What goes into `trainer_state.json`, and so is saved with it or not at all."""
        run = self._trainer.state_of_run()
        return {"args": {}, "attributes": {"state": run, "logging": None if run is None else self._trainer.logging_state()}}

    def saved_in(self, checkpoint: str | None) -> dict[str, Any] | None:
        """Brim's state in a checkpoint; None where there is no checkpoint, or one that was made without brim."""
        self._logging = None
        if checkpoint is None:
            return None
        saved = json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        kept: dict[str, Any] = saved.get("stateful_callbacks", {}).get(type(self).__name__, {})
        self._logging = kept.get("attributes", {}).get("logging")
        found: dict[str, Any] | None = kept.get("attributes", {}).get("state")
        return found
