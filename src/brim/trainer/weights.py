"""Weights from a folder, from the Hub's cache on this disk, or from the Hub; and whether the file held all that the model has."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import SafetensorError
from torch import nn

from brim.errors import BrimError, RunError, UnsupportedError, UsageError, is_out_of_memory
from brim.locale import _
from brim.memory.obtain import quiet
from brim.memory.setup import Setup
from brim.memory.tracing.building import automatic_class, base_dtype, compute_dtype, refuse_other_tasks
from brim.memory.tracing.quantized import BITS, quantized_layers
from brim.trainer.data.classes import labels_of
from brim.workload.resolve import Model, hub_answers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ATTENTION: Final = {"eager": "eager", "sdpa": "sdpa", "flash2": "flash_attention_2"}
"""As transformers spells it."""
_WEIGHTS: Final = ("model.safetensors", "pytorch_model.bin")
_FAILURES: Final = (OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError, AttributeError, SafetensorError)
"""What transformers raises where a folder does not hold what its config says."""
_SHOWN: Final = 3


@dataclass(frozen=True)
class Weights:
    """Weights from a folder, or from the Hub's cache or the Hub."""

    model: Model
    setup: Setup
    device: str
    trusts: bool
    say: Callable[[str], None]

    def load(self, labels: Sequence[str], pad_token_id: int | None) -> Any:
        """The base model, judged by what its file held."""
        reference, is_here = self._reference()
        if not is_here:
            self.say(_("The weights of {name} are not on this disk: asking the Hub.").format(name=reference))
        with self._failures():
            config = self._config(reference, is_here)
            own = labels_of(getattr(config, "id2label", None)) if self.setup.task == "classification" else ()
            config = completed(config, self.setup, labels, pad_token_id)
        refuse_other_tasks(self.setup.task, config)
        options = self._options(config)
        with self._failures(), quiet(), bars_on_screens_only():
            loaded, held = automatic_class(self.setup.task).from_pretrained(
                reference, config=config, dtype=base_dtype(self.setup), output_loading_info=True, local_files_only=is_here,
                trust_remote_code=self.trusts, **options,
            )  # fmt: skip
        others = own if labels and own and own != tuple(labels) else ()
        if others:
            text = _("The model's head is for the classes {own}, and the data's are {labels}: it is drawn anew.")
            self.say(text.format(own=_some(others), labels=_some(labels)))
        self._judge(loaded, held, _drawn_anew(loaded) if others else set())
        return loaded if "device_map" in options else loaded.to(self.device)

    def _reference(self) -> tuple[str, bool]:
        """What transformers is asked for, which is what adapters will name as their base; and whether all of it is on this disk."""
        model = self.model
        if model.origin in {"folder", "config"}:
            assert model.folder is not None
            self._refuse_empty(model.folder)
            return str(model.folder.resolve()), True
        hub_id = model.card.hub_id if model.card is not None else model.name
        folder = model.folder if model.card is None else _cached_folder(hub_id)
        if folder is not None and not _missing_files(folder):
            return hub_id, True
        why = why_no_hub(hub_id)
        if why:
            raise RunError(
                _("The weights of {name} cannot be loaded: {why}.").format(name=hub_id, why=why),
                hint=_("Fetch them where there is a network (hf download {name}), or give a folder that holds them.").format(
                    name=hub_id
                ),
            )
        return hub_id, False

    def _refuse_empty(self, folder: Path) -> None:
        missing = _missing_files(folder)
        if not missing:
            return
        if self.model.has_weights:
            text = _("The weights in {folder} are not complete: {names} is missing.")
            raise UsageError(text.format(folder=folder, names=_some(missing)), hint=_("Copy or download the folder anew."))
        raise UsageError(
            _("{folder} holds a config.json and no weights.").format(folder=folder),
            hint=_("Give a folder with weights, or add --from-scratch to train fresh ones, drawn by the seed."),
        )

    def _config(self, reference: str, is_here: bool) -> Any:
        import transformers

        automatic: Any = transformers.AutoConfig
        return automatic.from_pretrained(reference, local_files_only=is_here, trust_remote_code=self.trusts)

    def _options(self, config: Any) -> dict[str, Any]:
        setup = self.setup
        options: dict[str, Any] = {}
        if setup.attention is not None:
            options["attn_implementation"] = ATTENTION[setup.attention]
        if setup.task == "classification":
            options["ignore_mismatched_sizes"] = True  # the head of other classes; `_judge` looks at what it was
        stored = getattr(config, "quantization_config", None)
        if stored is not None:
            self._refuse_other_bits(stored)
        elif setup.method in BITS:
            options["quantization_config"] = self._quantization(config)
        if setup.method in BITS:
            options["device_map"] = {"": self.device}  # each layer is quantised as it arrives there
        return options

    def _refuse_other_bits(self, stored: Any) -> None:
        facts: Mapping[str, Any] = stored if isinstance(stored, dict) else stored.to_dict()
        bits = 4 if facts.get("load_in_4bit") else 8 if facts.get("load_in_8bit") else None
        if bits is None or BITS.get(self.setup.method) != bits:
            raise UnsupportedError(
                _("The weights of {name} are stored quantised ({kind}), which --method {method} cannot train.").format(
                    name=self.model.name, kind=facts.get("quant_method", "?"), method=self.setup.method
                ),
                hint=_("Give the model they were made from: brim quantises it itself, with --method qlora or lora-8bit."),
            )

    def _quantization(self, config: Any) -> Any:
        import transformers

        made: Any = transformers.BitsAndBytesConfig
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # it tells each product of its cast
        skipped = self._not_quantised(config) if self.setup.task == "classification" else None
        if BITS[self.setup.method] == 8:
            return made(load_in_8bit=True, llm_int8_skip_modules=skipped)
        return made(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute_dtype(self.setup), llm_int8_skip_modules=skipped,
        )  # fmt: skip

    def _not_quantised(self, config: Any) -> list[str]:
        """A classifier's head trains with the adapters, so it stays whole: the linear layers that a trace leaves whole too."""
        with torch.device("meta"):
            empty = automatic_class(self.setup.task).from_config(config, trust_remote_code=self.trusts)
        quantised = {name for name, _layer in quantized_layers(empty)}
        return [name for name, module in empty.named_modules() if isinstance(module, nn.Linear) and name not in quantised]

    def _judge(self, loaded: Any, held: Mapping[str, Any], drawn: set[str]) -> None:
        """What the file did not hold was drawn at random: an error, unless it is the head of a new task. `drawn`: on purpose."""
        mismatched = {str(name[0] if isinstance(name, tuple) else name) for name in held.get("mismatched_keys") or ()}
        missing = {str(name) for name in held.get("missing_keys") or ()} | mismatched
        new = {name for name in missing if self.setup.task == "classification" and _is_head(loaded, name)}
        if missing - new:
            wrong = sorted(missing - new)
            text = _("The weights of {name} do not fit its config: {count} are missing or of another shape, {first} among them.")
            raise RunError(
                text.format(name=self.model.name, count=len(wrong), first=wrong[0]),
                hint=_("Copy or download it anew, or take another --task; --from-scratch draws all weights by the seed."),
            )
        new |= drawn
        if new:
            self.say(_("New weights, drawn by the seed: {names}.").format(names=_some(sorted(new))))
        unused = sorted(str(name) for name in held.get("unexpected_keys") or ())
        if unused:
            text = _("Weights in the file that this model does not have, and that are not used: {names}.")
            self.say(text.format(names=_some(unused)))

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except BrimError:
            raise
        except _FAILURES as error:
            if is_out_of_memory(error):
                raise
            text = _("The model {name} cannot be loaded: {why}.").format(name=self.model.name, why=told(error))
            raise RunError(text) from error


@contextlib.contextmanager
def bars_on_screens_only() -> Iterator[None]:
    """A bar that is written into a file is a heap of lines."""
    from transformers.utils import logging as told_by_transformers

    bars: Any = told_by_transformers
    if sys.stderr.isatty() or not bars.is_progress_bar_enabled():
        yield
        return
    bars.disable_progress_bar()
    try:
        yield
    finally:
        bars.enable_progress_bar()


def _cached_folder(hub_id: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(hub_id, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _missing_files(folder: Path) -> tuple[str, ...]:
    """What a folder lacks of its weights: nothing, some of the files that its index names, or all."""
    if any((folder / name).is_file() for name in _WEIGHTS):
        return ()
    for name in _WEIGHTS:
        index = folder / f"{name}.index.json"
        with contextlib.suppress(OSError, ValueError, KeyError, AttributeError):
            parts = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return tuple(sorted(part for part in set(parts) if not (folder / part).is_file()))
    return _WEIGHTS[:1]


def _is_head(model: Any, name: str) -> bool:
    """Outside of the part that all tasks share; and the pooler, which masked language models are saved without."""
    prefix = f"{model.base_model_prefix}."
    return not name.startswith(prefix) or "pooler" in name.split(".")


def _drawn_anew(model: Any) -> set[str]:
    """Draw the head again, as transformers draws that of a new task; the names of its weights."""
    prefix = model.base_model_prefix
    names: set[str] = set()
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if path.partition(".")[0] == prefix or not own:
            continue
        for name, parameter in own.items():
            parameter._is_hf_initialized = False  # noqa: SLF001 (else it is left as it is)
            names.add(f"{path}.{name}".removeprefix("."))
        with torch.no_grad():
            model._init_weights(module)  # noqa: SLF001 (there is no public way to draw a part)
    return names


def completed(config: Any, setup: Setup, labels: Sequence[str], pad_token_id: int | None) -> Any:
    """The config with the classes and with the token that fills rows up."""
    if setup.task != "classification":
        return config
    if labels:
        config.num_labels = len(labels)
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: number for number, label in enumerate(labels)}
    end = getattr(config, "eos_token_id", None)
    for token in (pad_token_id, getattr(config, "pad_token_id", None), end[0] if isinstance(end, list) and end else end, 0):
        if token is not None:
            config.pad_token_id = token
            break
    return config


def why_no_hub(reference: str) -> str:
    """Why the Hub cannot be asked for it; empty where it can."""
    from huggingface_hub import constants

    if constants.is_offline_mode() or "/" not in reference:
        return _("it is not on this disk")
    if not hub_answers(constants.ENDPOINT):
        return _("it is not on this disk, and {hub} does not answer").format(hub=constants.ENDPOINT)
    return ""


def told(error: BaseException) -> str:
    """The first line of what an error says."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f", ... ({len(names)})" if len(names) > _SHOWN else "")
