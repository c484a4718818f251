"""The trained model, straight into the folder of its run: all of it, or what was there before.

It is written whole into a hidden folder beside its place, and then moved file by file, which takes no space. The file that makes a
folder a model, its config, goes first and comes last: whoever looks in between, or after a crash, finds no model, and never the weights
of one with the config of another.
"""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import SafetensorError
from transformers.trainer import TRAINING_ARGS_NAME

from brim.errors import RunError
from brim.locale import _, sentences
from brim.sizes import format_bytes
from brim.trainer.disk import disk_trouble, free_bytes, is_of_missing_file, sync
from brim.trainer.loading import USED_CACHE
from brim.trainer.manifest import MODEL_MANIFEST, seal
from brim.trainer.summing import sums_while_writing
from brim.trainer.weights import bars_on_screens_only

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from brim.trainer.summing import Sums

HIDDEN: Final = ".saving-model"
_CONFIG: Final[str] = "config.json"
_ADAPTER_CONFIG: Final[str] = "adapter_config.json"
_OF_ADAPTERS: Final = ("adapter_model*",)
_OF_MODELS: Final = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")


def save_model(trainer: Any, tokenizer: Any, folder: Path) -> None:
    """Write the trainer's model, as `from_pretrained(folder)` finds it. Weights that are half changed are never written."""
    try:
        _write_model(trainer, tokenizer, folder)
    except RunError as error:
        # Somebody has deleted the folder meanwhile. With several ranks the others are through with what is collective.
        if trainer.args.world_size > 1 or not is_of_missing_file(error):
            raise
        _write_model(trainer, tokenizer, folder)


def _write_model(trainer: Any, tokenizer: Any, folder: Path) -> None:
    hidden = folder / HIDDEN
    writes = bool(trainer.args.should_save)
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(hidden, ignore_errors=True)  # of a process that was killed
    try:
        with _told(trainer.model, folder), _as_before_training(trainer.model), bars_on_screens_only():
            if writes:
                _refuse_full_disk(trainer.model, folder)
            with sums_while_writing() as sums:
                trainer.save_model(str(hidden), _internal_call=True)
            if writes:
                _complete(hidden, tokenizer, sums)
                seal(hidden, trainer.state.global_step, sums=sums, name=MODEL_MANIFEST)
                _move(hidden, folder)
    finally:
        if writes:
            shutil.rmtree(hidden, ignore_errors=True)


def needed_bytes(model: Any) -> int:
    """What the weights will take on disk: those of the adapters alone, where there are any."""
    named = model.state_dict()
    if hasattr(model, "peft_config"):
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        named = {name: tensor for name, tensor in named.items() if name in trained}
    tensors = [tensor for tensor in named.values() if isinstance(tensor, torch.Tensor)]
    return sum({_place(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


def _place(tensor: torch.Tensor) -> int:
    """Where it lies; of one that is spread over ranks, where this rank's piece lies."""
    here: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return here.data_ptr()


@contextlib.contextmanager
def _told(model: Any, folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        why = disk_trouble(error)
        if why is None and isinstance(error, OSError | SafetensorError):
            why = getattr(error, "strerror", None) or str(error)
        if why is None:
            raise
        shutil.rmtree(folder / HIDDEN, ignore_errors=True)  # first, so that the free bytes are those that there are
        raise _not_written(needed_bytes(model), folder, why) from error


def _refuse_full_disk(model: Any, folder: Path) -> None:
    needed = needed_bytes(model)
    if free_bytes(folder) < needed:
        raise _not_written(needed, folder, _("the disk is full"))


def _not_written(needed: int, folder: Path, why: str) -> RunError:
    text = _("The model was not written to {folder}: {why}.").format(folder=folder, why=why.strip().rstrip("."))
    room = _("It needs {needed}, and {free} are free there.").format(
        needed=format_bytes(needed), free=format_bytes(free_bytes(folder))
    )
    hint = _("Mend that or free some space; then `brim train --resume {folder}` saves it.").format(folder=folder)
    return RunError(sentences(text, room, _("What was there is as it was.")), hint=hint)


@contextlib.contextmanager
def _as_before_training(model: Any) -> Iterator[None]:
    """The cache is off for training alone: a model that is saved uses it again."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    used = getattr(inner, USED_CACHE, None)
    if used is None:
        yield
        return
    now, inner.config.use_cache = inner.config.use_cache, used
    try:
        yield
    finally:
        inner.config.use_cache = now


def _complete(hidden: Path, tokenizer: Any, sums: Sums) -> None:
    if tokenizer is not None:
        tokenizer.save_pretrained(str(hidden))
    # The Trainer's arguments, pickled: nobody needs them to load a model.
    (hidden / TRAINING_ARGS_NAME).unlink(missing_ok=True)
    sums.pop(str((hidden / TRAINING_ARGS_NAME).absolute()), None)


def _move(hidden: Path, folder: Path) -> None:
    names = sorted(path.name for path in hidden.iterdir())
    last = [name for name in (MODEL_MANIFEST, _CONFIG, _ADAPTER_CONFIG) if name in names]
    for name in last:
        (folder / name).unlink(missing_ok=True)
    for path in _outlived(folder, names):
        path.unlink()
    for name in [*(name for name in names if name not in last), *last]:
        target = folder / name
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        (hidden / name).replace(target)
    sync(folder)


def _outlived(folder: Path, names: list[str]) -> list[Path]:
    """Files of an older model that would be loaded beside the new one: its other shards, or its adapters."""
    is_adapter = _ADAPTER_CONFIG in names
    patterns = _OF_ADAPTERS if is_adapter else (*_OF_ADAPTERS, *_OF_MODELS, _ADAPTER_CONFIG)
    return [path for pattern in patterns for path in folder.glob(pattern) if path.name not in names and path.is_file()]
