"""What changes in the Trainer when its model is spread over ranks: put between BrimMixin and the Trainer.

The weights of a checkpoint are in the model before it is cut; the Trainer neither wraps nor moves it; checkpoints hold whole tensors, as
one process writes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from brim.locale import _
from brim.step.together import RanksApartError
from brim.trainer.run import Run
from brim.trainer.sharding.shards import Shards, in_host_memory, make_shards

if TYPE_CHECKING:
    from brim.records import RunCard
    from brim.step.micro import Counting

_SAVED_DTYPE: Final = {"bf16": torch.bfloat16}
"""Of weights that one process would hold in half precision; an engine keeps them wider, and a checkpoint too."""

# Whatever class of Trainer stands behind it; not one that mypy could know.
_AnyTrainer: Any = object


class ShardedTraining(_AnyTrainer):  # type: ignore[misc]
    """A Trainer whose model may be in pieces. Until `shard` is called it is a Trainer like any other."""

    shards: Shards | None = None
    counting: Counting | None = None
    """What the loss is a mean of, where that was asked before training."""
    _card: RunCard

    def ask_counting(self) -> None:
        """Before training prepares the model."""
        run = Run(self, self.get_train_dataloader().dataset)
        with self.accelerator.autocast():
            self.counting = run.ask_counting(self.model)

    def shard(self, folder: Path, checkpoint: Path | None) -> None:
        """Cut the model, with the weights of the checkpoint it goes on from."""
        if checkpoint is not None:
            super()._load_from_checkpoint(str(checkpoint))
        # Asked now: in pieces, parameters have no gradients of their own.
        self.ask_counting()
        self.shards = make_shards(self.model, self._card, folder, lambda _model: self.make_optimizer())
        self.optimizer = self.shards.optimizer
        self.model_wrapped = self.shards.model
        self.accelerator.prepare_model = _as_it_is

    def _wrap_model(self, model: Any, *args: Any, **keywords: Any) -> Any:
        return super()._wrap_model(model, *args, **keywords) if self.shards is None else self.shards.model

    def _load_from_checkpoint(self, *args: Any, **keywords: Any) -> None:
        if self.shards is None:
            super()._load_from_checkpoint(*args, **keywords)

    def _clip_grad_norm(self, model: Any) -> Any:
        return super()._clip_grad_norm(model) if self.shards is None else self.shards.clip(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if self.shards is None:
            return super()._get_grad_norm(model, grad_norm=grad_norm)
        return grad_norm if grad_norm is not None else self.shards.clip(None)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Every rank gives its pieces, the first one writes."""
        if self.shards is None:
            super().save_model(output_dir, _internal_call)
            return
        with RanksApartError.told(_("The weights could not be gathered.")):
            weights = self.shards.whole_weights(keeps=self.args.should_save)
        if weights is None:
            return
        folder = Path(output_dir or self.args.output_dir)
        # Adapters are float32 in one process too.
        dtype = None if hasattr(self.model, "peft_config") else _SAVED_DTYPE.get(self._card.settings.precision)
        with in_host_memory(self._card):
            if dtype is not None and not folder.name.startswith(PREFIX_CHECKPOINT_DIR):
                weights = {name: each.to(dtype) if each.is_floating_point() else each for name, each in weights.items()}
            self._save(str(folder), state_dict=weights)
            del weights

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.shards is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        with RanksApartError.told(_("The optimizer's state could not be gathered.")):
            state = self.shards.whole_optimizer(keeps=self.args.should_save)
        if state is not None:
            with in_host_memory(self._card):
                torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
                torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)
                del state

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.shards is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        optimizer, schedule = Path(checkpoint) / OPTIMIZER_NAME, Path(checkpoint) / SCHEDULER_NAME
        if optimizer.is_file() and schedule.is_file():
            # Mapped: of what is in the file each rank reads its pieces alone.
            self.shards.load_optimizer(torch.load(optimizer, map_location="cpu", weights_only=True, mmap=True))
            self.lr_scheduler.load_state_dict(torch.load(schedule, weights_only=True))


def _as_it_is(model: Any, *_arguments: Any, **_keywords: Any) -> Any:
    return model
