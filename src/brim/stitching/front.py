"""`StitchLLM`: a stitched model with a `train` that is called as people write it.

    model = brim.StitchLLM("recipe.yaml", dataset, tokenizer)
    model.train(output_dir="./stitch_model_optimized", learning_rate=1e-4, per_device_train_batch_size=1, gradient_checkpointing=True)

The front holds the `StitchedModel` and adds nothing to it. Before the first step the five proofs run; the steps are brim's, so that every
batch size trains the same model and memory that runs out costs a split and not the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from brim.errors import BrimError, RunError, UsageError
from brim.locale import _, sentences
from brim.machine.screen import say
from brim.stitching.angles import refuse_rows_beyond
from brim.stitching.arguments import precision_of, training_arguments, workers_as_asked
from brim.stitching.assembling import stitch
from brim.stitching.config import MODEL_TYPE
from brim.stitching.model import StitchedModel
from brim.stitching.proving import prove
from brim.stitching.reading import read_recipe
from brim.stitching.recipe import Recipe
from brim.stitching.rows import Pad, Rows, rows_of
from brim.stitching.saving import written_or_told
from brim.trainer.hf import BrimTrainer
from brim.trainer.words import aligned, batch_words, loader_words, precision_words
from brim.workload.resolve import find_model

if TYPE_CHECKING:
    from transformers import TrainingArguments
    from transformers.trainer_utils import TrainOutput


class StitchLLM:
    """Holds a stitched model, its data and its tokenizer.

    `given` is a `StitchedModel`, a `Recipe` or a mapping of one, the path of a recipe, or the folder of a stitched model. `verify=False`
    leaves the proofs out, and training then says so.
    """

    def __init__(
        self,
        given: StitchedModel | Recipe | Mapping[str, Any] | str | os.PathLike[str],
        dataset: Any = None,
        tokenizer: Any = None,
        *,
        verify: bool = True,
    ) -> None:
        self.model, folder = _obtained(given)
        self.dataset = dataset
        self.tokenizer = _tokenizer_in(folder) if tokenizer is None else tokenizer
        self.trainer: BrimTrainer | None = None
        """Of the last training."""
        self._has_to_be_proven = verify
        self._is_proven = False

    def train(
        self,
        output_dir: str | os.PathLike[str] = "./stitch_model_optimized",
        learning_rate: float = 1e-4,
        per_device_train_batch_size: int = 1,
        save_steps: float = 100,
        logging_steps: float = 10,
        gradient_checkpointing: bool = True,
        dataset: Any = None,
        eval_dataset: Any = None,
        resume_from_checkpoint: str | bool | None = None,
        verify: bool | None = None,
        **arguments: Any,
    ) -> TrainOutput:
        """Train what the recipe says, and save the model to `output_dir`.

        `arguments` are any of transformers' TrainingArguments. Every optimizer step holds exactly `per_device_train_batch_size x
        gradient_accumulation_steps` (4 unless given) sequences on each process, whatever the memory holds at once. `verify=False` leaves
        the proofs out.
        """
        _refuse_to_replace(Path(output_dir))
        if eval_dataset is not None:
            arguments = {"eval_strategy": "epoch", **arguments}
        chosen = training_arguments(
            {
                "output_dir": os.fspath(output_dir), "learning_rate": learning_rate, "save_steps": save_steps,
                "per_device_train_batch_size": per_device_train_batch_size, "logging_steps": logging_steps,
                "gradient_checkpointing": gradient_checkpointing, **arguments,
            },
            is_half=bool(_half(self.model)),
        )  # fmt: skip
        self._refuse_if_nothing_trains()
        rows = self._rows(self.dataset if dataset is None else dataset)
        evaluated = None if eval_dataset is None else self._rows(eval_dataset).data
        self._prove(self._has_to_be_proven if verify is None else verify)
        _say_settings(chosen, self.model)
        with workers_as_asked(), _as_before(self.model), _trained_in_float32(self.model, is_cast=chosen.bf16 or chosen.fp16):
            trainer = BrimTrainer(
                self.model, chosen, data_collator=Pad(self._padding), train_dataset=rows.data, eval_dataset=evaluated,
                processing_class=self.tokenizer, lengths=rows.lengths,
            )  # fmt: skip
            self.trainer = trainer
            result = _trained(trainer, resume_from_checkpoint)
        with written_or_told(output_dir):
            trainer.save_model(chosen.output_dir)
        say(_("Saved: {folder}.").format(folder=chosen.output_dir))
        return result

    def _refuse_if_nothing_trains(self) -> None:
        if self.model.trainable_parameters:
            return
        names = ", ".join(dict.fromkeys(facts["donor"] for facts in self.model.config.parts))
        hint = _(
            "Say in the recipe what does: `train: [head]`, `train: [layers]`, or the layers of one donor by its name: {names}."
        )
        raise UsageError(
            _("Nothing of this model trains: it is all frozen, and it has no adapter with weights."),
            hint=hint.format(names=names),
        )

    def _rows(self, dataset: Any) -> Rows:
        if dataset is None:
            raise UsageError(
                _("There is no training data."), hint=_("Give it: StitchLLM(model, dataset), or train(dataset=...).")
            )
        config = self.model.config
        rows = rows_of(
            dataset, self.tokenizer, positions=config.max_position_embeddings, vocabulary=config.vocab_size, say=say
        )  # fmt: skip
        refuse_rows_beyond(rows.real_lengths, [part.config for part in self.model.parts])
        return rows

    def _prove(self, is_wanted: bool) -> None:
        """Once: training changes weights, and no weight can make a right model wrong."""
        if self._is_proven:
            return
        if not is_wanted:
            say(_("Not proven, because verify=False was given: whether batches above 1 are right is not known."))
            return
        found = prove(self.model)
        for proof in found.failures():
            text = _("The proof of {name} failed, so nothing was trained.").format(name=proof.name)
            raise RunError(sentences(text, proof.diagnosis), hint=proof.mend or None)
        self._is_proven = True
        say(_("Proven: {names}.").format(names=", ".join(proof.name for proof in found.proofs if proof.verdict == "pass")))

    @property
    def _padding(self) -> int:
        """What fills rows up; it is masked, so any token would do."""
        token = self.model.config.pad_token_id
        return token if isinstance(token, int) and 0 <= token < self.model.config.vocab_size else 0

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """The model's forward."""
        return self.model(*inputs, **keywords)

    def generate(self, *inputs: Any, **keywords: Any) -> Any:
        """The model's."""
        return self.model.generate(*inputs, **keywords)

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """The model's."""
        found: Iterator[torch.nn.Parameter] = self.model.parameters(recurse)
        return found

    def save_pretrained(self, folder: str | os.PathLike[str], **keywords: Any) -> None:
        """The model's, and the tokenizer's where there is one."""
        with written_or_told(folder):
            self.model.save_pretrained(folder, **keywords)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


def _obtained(given: Any) -> tuple[StitchedModel, Path | None]:
    """The model, and the folder in which its tokenizer may lie."""
    if isinstance(given, StitchedModel):
        return given, None
    if isinstance(given, str | os.PathLike) and Path(given).expanduser().is_dir():
        return _loaded(Path(given).expanduser())
    if isinstance(given, Mapping | str | os.PathLike):
        given = read_recipe(given, say=say)
    if not isinstance(given, Recipe):
        text = _("{kind} is not a stitched model: a StitchedModel, a recipe, or the folder of a stitched model is needed.")
        hint = (
            _("Train it with a Trainer of transformers and brim.attach(trainer).") if isinstance(given, torch.nn.Module) else None
        )
        raise UsageError(text.format(kind=type(given).__name__), hint=hint)
    model = stitch(given)
    return model, find_model(given.donors[given.pieces[0].donor]).folder


def _trained(trainer: BrimTrainer, resume: str | bool | None) -> TrainOutput:
    try:
        result: TrainOutput = trainer.train(resume)
    except KeyboardInterrupt:
        say(_("Stopped. train(..., resume_from_checkpoint=True) goes on from the last checkpoint, if there is one."))
        raise
    return result


def _say_settings(chosen: TrainingArguments, model: StitchedModel) -> None:
    """Batch, loader and precision, as `brim train` prints them before its first step."""
    batch = batch_words(chosen.per_device_train_batch_size, chosen.gradient_accumulation_steps, max(1, chosen.world_size))
    pin_memory = chosen.dataloader_pin_memory and chosen.device.type != "cpu"
    loader = loader_words(chosen.dataloader_num_workers, chosen.dataloader_prefetch_factor, pin_memory=pin_memory)
    checkpointing = "full" if chosen.gradient_checkpointing else "none"
    attention = getattr(model.config, "_attn_implementation", None)
    rows = [
        (_("Effective batch"), batch),
        (_("Data loading"), loader),
        (_("Precision"), precision_words(precision_of(chosen), attention, checkpointing)),
    ]
    for line in aligned(rows):
        say(line)


def _refuse_to_replace(folder: Path) -> None:
    """A folder that holds a model of another sort is a donor, or somebody's work."""
    if not (folder / "config.json").is_file():
        return
    kind = (find_model(folder).config or {}).get("model_type")
    if kind != MODEL_TYPE:
        raise UsageError(
            _("{folder} holds a {kind} model, which would be gone.").format(folder=folder, kind=kind),
            hint=_("Give another output_dir."),
        )


def _loaded(folder: Path) -> tuple[StitchedModel, Path]:
    kind = (find_model(folder).config or {}).get("model_type")
    if kind != MODEL_TYPE:
        text = _("{folder} holds a {kind} model, and not a stitched one.").format(folder=folder, kind=kind)
        raise UsageError(text, hint=_("Write a recipe that takes its layers, and stitch it with `brim stitch`."))
    try:
        return StitchedModel.from_pretrained(folder), folder
    except BrimError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError, SafetensorError) as error:
        why = str(error).strip().partition("\n")[0].rstrip(".")
        raise RunError(_("The model in {folder} cannot be loaded: {why}.").format(folder=folder, why=why)) from error


def _tokenizer_in(folder: Path | None) -> Any:
    """The tokenizer that lies beside a model; None where there is none."""
    if folder is None or not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    from transformers import AutoTokenizer

    automatic: Any = AutoTokenizer
    try:
        return automatic.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = str(error).strip().partition("\n")[0].rstrip(".")
        say(_("The tokenizer in {folder} cannot be loaded, and is left out: {why}.").format(folder=folder, why=why))
        return None


@contextmanager
def _as_before(model: StitchedModel) -> Iterator[None]:
    """What a Trainer switches for as long as it trains is switched back, however that ends."""
    uses_cache = model.config.use_cache
    was_checkpointing = model.is_gradient_checkpointing
    forward = model.__dict__.get("forward")
    try:
        yield
    finally:
        # accelerate has put autocast around it.
        for name in ("forward", "_original_forward"):
            model.__dict__.pop(name, None)
        if forward is not None:
            model.__dict__["forward"] = forward
        if not was_checkpointing and model.is_gradient_checkpointing:
            model.gradient_checkpointing_disable()
        model.config.use_cache = uses_cache
        model.eval()


def _half(model: StitchedModel) -> list[torch.nn.Parameter]:
    """What trains and is held at half precision."""
    halves = (torch.float16, torch.bfloat16)
    return [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.dtype in halves]


@contextmanager
def _trained_in_float32(model: StitchedModel, *, is_cast: bool) -> Iterator[None]:
    """What trains is held in float32 for as long as it does: steps smaller than the spacing of bfloat16 would be lost (near 1 that is
    0.004), and gradients in float16 cannot be unscaled. It needs autocast, since the layers beside it stay as they are.
    """
    trained = _half(model)
    if not trained:
        yield
        return
    dtype = str(trained[0].dtype).removeprefix("torch.")
    if not is_cast:
        say(_("What trains is held in {dtype}, where small steps are lost: leave bf16=False out.").format(dtype=dtype))
        yield
        return
    say(_("What trains is held in float32 until it is saved, and rounded to {dtype} then.").format(dtype=dtype))
    before = [parameter.dtype for parameter in trained]
    for parameter in trained:
        parameter.data = parameter.data.float()
    try:
        yield
    finally:
        for parameter, own in zip(trained, before, strict=True):
            parameter.data = parameter.data.to(own)
