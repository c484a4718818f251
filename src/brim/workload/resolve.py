"""From what a person types to a model: a catalogue name, a Hub id, a folder, a `config.json`, or `module:function`.

A folder that exists goes first, then the catalogue, then the Hub's cache on this disk, and the network last. Nothing here loads weights,
and no code of a model's author runs unless `trust_remote_code` says so.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload
from urllib.parse import urlsplit

from brim.errors import RunError, UnknownNameError, UsageError
from brim.extras import missing, require_train
from brim.locale import _, sentences
from brim.printing import Printable
from brim.record import LARGEST_RECORD_BYTES, read_bounded
from brim.workload.cards import ModelCard, cards, find_card, nearest_models
from brim.workload.own import make_known
from brim.workload.parameters import count_parameters, supported_model_types

if TYPE_CHECKING:
    from torch import nn

Origin = Literal["catalogue", "folder", "config", "hub", "function"]

_FUNCTION = re.compile(r"(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<function>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
_HUB_ID = re.compile(r"(?:\w[\w.\-]*/)?\w[\w.\-]*", re.ASCII)
_WEIGHTS = ("*.safetensors", "*.bin")
_HUB_SECONDS = 4.0
_LONGEST_REASON = 200
_DEEPEST = 10_000


@dataclass(frozen=True, kw_only=True)
class Model(Printable):
    """A model that was found, and what is known of it before it is built."""

    given: str
    """What the user typed."""
    origin: Origin
    name: str
    config: Mapping[str, Any] | None = None
    """The content of its config.json; None for a function."""
    class_name: str | None = None
    card: ModelCard | None = None
    folder: Path | None = None
    has_weights: bool = False
    """Whether weights lie beside the config, so that it can be trained and not only planned."""
    trust_remote_code: bool = False
    factory: Callable[[], Any] | None = field(default=None, repr=False)

    @property
    def own_tokenizer(self) -> str | None:
        """The model's folder, where a tokenizer lies in it; None where there is none on this disk."""
        return str(self.folder) if self.folder is not None and (self.folder / "tokenizer.json").is_file() else None

    def parameters(self) -> int:
        """Parameters of the class, tied weights once: from the catalogue, by formula, or by building it on no memory."""
        if self.card is not None:
            return self.card.parameters
        runs_own_code = self.trust_remote_code and self.config is not None and "auto_map" in self.config
        if self.config is not None and self.class_name and not runs_own_code:
            try:
                return count_parameters(self.config, self.class_name)
            except UsageError:
                pass  # an architecture, a class or a setting that no formula knows: build it
        return sum(parameter.numel() for parameter in self.build("meta").parameters())

    def build(self, device: str = "meta") -> nn.Module:
        """The module with fresh weights: on `meta` it takes no memory."""
        require_train(_("Building {name}").format(name=self.name), "torch", "transformers")
        import torch

        if self.factory is None:
            with torch.device(device):
                return self._build_from_config()
        try:
            with torch.device(device):
                return self._call_factory()
        except RunError:
            if device != "meta":
                raise
        # Code that looks at values (`.item()` while it builds) cannot run without memory: build it for real, then let the memory go.
        return self._call_factory().to("meta")

    def _call_factory(self) -> nn.Module:
        from torch import nn

        assert self.factory is not None
        try:
            # What the user's code prints is not the answer of the command that asked for the model.
            with contextlib.redirect_stdout(sys.stderr):
                module = self.factory()
        except (Exception, SystemExit) as error:
            raise RunError(_("{given} failed: {why}.").format(given=self.given, why=_told(error))) from error
        if not isinstance(module, nn.Module):
            text = _("{given} returned {kind}, and a torch.nn.Module is needed.")
            raise UsageError(text.format(given=self.given, kind=type(module).__name__))
        return module

    def _build_from_config(self) -> nn.Module:
        import transformers

        assert self.config is not None
        facts = copy.deepcopy(dict(self.config))  # transformers writes into the dictionaries inside
        _refuse_absurd_depth(facts, self.name)
        try:
            if self.folder is not None and self.trust_remote_code and "auto_map" in facts:
                config = transformers.AutoConfig.from_pretrained(self.folder, trust_remote_code=True)
                automatic: Any = _automatic_class(facts["auto_map"])
                remote: nn.Module = automatic.from_config(config, trust_remote_code=True)
                return remote
            config = transformers.AutoConfig.for_model(**facts)
            model = self._class(config)(config)
            untie_output(model, facts)
        except (UsageError, MemoryError):
            raise
        except Exception as error:
            text = _("transformers {version} cannot build {name}: {why}.")
            raise UsageError(text.format(version=transformers.__version__, name=self.name, why=_told(error))) from error
        built: nn.Module = model
        return built

    def _class(self, config: Any) -> type[Any]:
        import transformers

        found = getattr(transformers, self.class_name or "", None)
        if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel):
            mapping = transformers.AutoModelForCausalLM._model_mapping  # noqa: SLF001 (there is no public look-up)
            found = mapping.get(type(config), None)
        if (
            not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel))
            or found is transformers.PreTrainedModel
        ):
            text = _("{name}: its class {class_name} is not in transformers {version}.")
            raise UsageError(text.format(name=self.name, class_name=self.class_name, version=transformers.__version__))
        return found


@overload
def models() -> tuple[ModelCard, ...]: ...
@overload
def models(name: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Model: ...
def models(name: str | os.PathLike[str] | None = None, *, trust_remote_code: bool = False) -> Model | tuple[ModelCard, ...]:
    """All models of the catalogue; with a name, a folder or anything else that `find_model` takes, that model."""
    return cards() if name is None else find_model(name, trust_remote_code=trust_remote_code)


def find_model(given: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Model:
    """Find the model that `given` names; an error that lists the nearest names where there is none."""
    text = os.fspath(given).strip()
    if not text:
        raise UsageError(_("A model is needed: a catalogue name, a Hub id, a folder, a config.json or module:function."))
    path = _existing(text)
    card = find_card(text)
    # A folder wins over the catalogue if it holds a model; one that merely has the name of a model does not.
    if path is not None and path.is_dir() and (card is None or (path / "config.json").is_file()):
        return _of_folder(text, path, trust_remote_code)
    if path is not None and path.is_file():
        return _of_config_file(text, path, trust_remote_code)
    if card is not None:
        return Model(
            given=text, origin="catalogue", name=card.name, config={**card.config, "architectures": [card.class_name]},
            class_name=card.class_name, card=card,
        )  # fmt: skip
    if ".py:" in text:
        better = text.replace("/", ".").replace(".py:", ":").lstrip(".")
        raise UsageError(
            _("{given} names a file; a function is named module:function, here {better}.").format(given=text, better=better)
        )
    match = _FUNCTION.fullmatch(text)
    if match is not None:
        return _of_function(text, match["module"], match["function"])
    if text.endswith(".json") or text.startswith(("./", "../", "/", "~")):
        raise UsageError(_("There is no file or folder {path}.").format(path=text))
    return _of_hub(text, trust_remote_code)


def _existing(text: str) -> Path | None:
    """The file or folder of this name, if there is one; a name that no file system takes is not one."""
    try:
        path = Path(text).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):
        return None


def _of_folder(given: str, folder: Path, trust_remote_code: bool) -> Model:
    config_file = folder / "config.json"
    if not config_file.is_file():
        if (folder / "adapter_config.json").is_file():
            base = _read_json(folder / "adapter_config.json").get("base_model_name_or_path", "?")
            text = _("{path} holds a PEFT adapter, not a model; its base model is {base}.")
            raise UsageError(
                text.format(path=given, base=base), hint=_("Give the base model, or merge the adapter into it first.")
            )
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:6]) or _("nothing")
        raise UsageError(
            _("{path} is not a model folder: it has no config.json (it has: {found}).").format(path=given, found=found),
            hint=_("A model folder is what save_pretrained writes; for planning, config.json alone is enough."),
        )
    return _of_config(given, "folder", config_file, trust_remote_code, folder=folder, has_weights=_has_weights(folder))


def _of_config_file(given: str, path: Path, trust_remote_code: bool) -> Model:
    if path.suffix != ".json":
        text = _("{path} is a file, and not a config.json.")
        raise UsageError(text.format(path=given), hint=_("Give the folder of the model, or its config.json."))
    return _of_config(given, "config", path, trust_remote_code, folder=path.parent)


def _of_config(
    given: str,
    origin: Origin,
    path: Path,
    trust_remote_code: bool,
    *,
    folder: Path | None = None,
    has_weights: bool = False,
) -> Model:
    config = _read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise UsageError(_("{path} does not describe a model: it has no model_type.").format(path=path))
    make_known(config["model_type"])
    if "auto_map" in config and not trust_remote_code and not _known_to_transformers(config["model_type"]):
        raise UsageError(
            _("{name} needs Python code from its own folder, which brim does not run unasked.").format(name=given),
            hint=_("Read that code, then pass trust_remote_code (--trust-remote-code)."),
        )
    architectures = config.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    return Model(
        given=given, origin=origin, name=given, config=config,
        class_name=named if isinstance(named, str) else _default_class(config),
        folder=folder, has_weights=has_weights, trust_remote_code=trust_remote_code,
    )  # fmt: skip


def _of_function(given: str, module_name: str, function_name: str) -> Model:
    require_train(given, "torch")
    # The current folder is importable, as it is for `python -m`.
    with contextlib.suppress(FileNotFoundError):  # a folder that was deleted under us
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.insert(0, here)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            text = _("There is no module {module} in the current folder or among the installed packages.")
            raise UsageError(text.format(module=module_name)) from error
        raise RunError(_("Importing {module} failed: {why}.").format(module=module_name, why=_told(error))) from error
    except (Exception, SystemExit) as error:
        raise RunError(_("Importing {module} failed: {why}.").format(module=module_name, why=_told(error))) from error
    for part in function_name.split("."):
        if not hasattr(found, part):
            names = [name for name in vars(found) if not name.startswith("_") and callable(getattr(found, name))]
            text = _("{module} has no {function}; it has: {names}.")
            raise UsageError(text.format(module=module_name, function=function_name, names=", ".join(names[:8]) or "-"))
        found = getattr(found, part)
    from torch import nn

    if isinstance(found, nn.Module):
        module = found
        return Model(given=given, origin="function", name=given, factory=lambda: module)
    if not callable(found):
        raise UsageError(_("{given} is not a function.").format(given=given))
    return Model(given=given, origin="function", name=given, factory=found)


def _of_hub(given: str, trust_remote_code: bool) -> Model:
    # A word without an owner is far more often a misspelt catalogue name than one of the Hub's few old ids: no network for it.
    is_only_cached = _HUB_ID.fullmatch(given) is None or "/" not in given
    if is_only_cached and missing("huggingface_hub"):
        raise _unknown_name(given)
    require_train(_("Reading {given} from the Hub").format(given=given), "huggingface_hub")
    from huggingface_hub import errors, try_to_load_from_cache

    cached: Any = None
    if _HUB_ID.fullmatch(given):
        with contextlib.suppress(errors.HFValidationError):
            cached = try_to_load_from_cache(given, "config.json")
    if isinstance(cached, str):
        return _of_hub_folder(given, Path(cached), trust_remote_code)
    if is_only_cached:
        raise _unknown_name(given)
    return _of_hub_folder(given, _download_config(given), trust_remote_code)


def _of_hub_folder(given: str, config_file: Path, trust_remote_code: bool) -> Model:
    folder = config_file.parent
    return _of_config(given, "hub", config_file, trust_remote_code, folder=folder, has_weights=_has_weights(folder))


def _has_weights(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in _WEIGHTS)


def _download_config(given: str) -> Path:
    from huggingface_hub import constants, errors, hf_hub_download

    if not constants.is_offline_mode() and not hub_answers(constants.ENDPOINT):
        text = _("{given} is not in brim's catalogue, not on this disk, and {hub} does not answer.")
        raise _unknown(given, text.format(given=given, hub=constants.ENDPOINT))
    try:
        return Path(hf_hub_download(given, "config.json"))
    except errors.GatedRepoError as error:
        text = _("{given} is gated on the Hub, and not in brim's catalogue.")
        hint = _("Ask for access on its page and log in with `hf auth login`, or give a folder with its config.json.")
        raise _unknown(given, text.format(given=given), hint) from error
    except errors.RepositoryNotFoundError as error:
        raise _unknown(given, _("The Hub has no model {given}, or it is private.").format(given=given)) from error
    except errors.EntryNotFoundError as error:
        # LocalEntryNotFoundError is a subclass: not cached, and the network was not to be used or not to be had.
        offline = isinstance(error, errors.LocalEntryNotFoundError)
        text = (
            _("{given} is not in brim's catalogue, not on this disk, and the Hub was not reached.")
            if offline
            else _("{given} has no config.json on the Hub.")
        )
        raise _unknown(given, text.format(given=given)) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        text = _("{given} is not in brim's catalogue, and the Hub did not give its config.json: {why}.")
        raise _unknown(given, text.format(given=given, why=_told(error))) from error


def hub_answers(endpoint: str) -> bool:
    """Whether the Hub's address can be reached at all: its own client would try for half a minute."""
    proxies = ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
    if any(os.environ.get(name) for name in proxies):
        return True
    parts = urlsplit(endpoint)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=_HUB_SECONDS):
            return True
    except OSError:
        return False


def _unknown_name(given: str) -> UnknownNameError:
    return _unknown(given, _("There is no model {given!r} in the catalogue, and no such folder.").format(given=given))


def _unknown(given: str, message: str, hint: str | None = None) -> UnknownNameError:
    nearest = nearest_models(given)
    return UnknownNameError(
        sentences(message, _("Nearest: {names}.").format(names=", ".join(nearest)) if nearest else ""),
        nearest=nearest,
        hint=hint or _("`brim models` lists the catalogue; a folder, a config.json or module:function works too."),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(read_bounded(path, LARGEST_RECORD_BYTES))
    except OSError as error:
        raise UsageError(_("Cannot read {path}: {why}.").format(path=path, why=error.strerror or error)) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(_("{path} is not valid JSON: {why}.").format(path=path, why=error)) from error
    if not isinstance(data, dict):
        raise UsageError(_("{path} does not describe a model: it has no model_type.").format(path=path))
    return data


def _known_to_transformers(model_type: str) -> bool:
    if model_type in supported_model_types():
        return True
    require_train(_("The model type {name}").format(name=model_type), "transformers")
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def _default_class(config: Mapping[str, Any]) -> str | None:
    """A config.json without `architectures`: the class that the family's own task has."""
    require_train(_("A config.json without `architectures`"), "transformers")
    from transformers.models.auto import modeling_auto

    for mapping in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        modeling_auto.MODEL_MAPPING_NAMES,
    ):
        found = mapping.get(config["model_type"])
        if found is not None:
            return str(found[0] if isinstance(found, tuple) else found)
    return None


def _refuse_absurd_depth(config: Mapping[str, Any], name: str) -> None:
    """Every layer is built, if without memory: a slip of a few digits would take hours."""
    for key in (
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "encoder_layers",
        "decoder_layers",
        "num_decoder_layers",
    ):
        depth = config.get(key)
        if isinstance(depth, int) and depth > _DEEPEST:
            raise UsageError(
                _("{name}: {key} is {depth}, more layers than any model has.").format(name=name, key=key, depth=depth)
            )


def untie_output(model: Any, config: Mapping[str, Any]) -> None:
    """Give the output layer weights of its own where the config says so and transformers tied them all the same.

    transformers 5 builds every T5 tied, and unties it when it loads a checkpoint that has both (T5 1.1, mT5, ByT5, FLAN).
    """
    import torch

    if config.get("tie_word_embeddings") is not False or not hasattr(model, "get_output_embeddings"):
        return
    output = model.get_output_embeddings()
    if output is not None and output.weight is model.get_input_embeddings().weight:
        output.weight = torch.nn.Parameter(output.weight.detach().clone())


def _automatic_class(auto_map: Mapping[str, Any]) -> Any:
    """The Auto class through which a model's own code is meant to be loaded."""
    import transformers

    for name in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModel"):
        if name in auto_map:
            return getattr(transformers, name)
    return transformers.AutoModel


def _told(error: BaseException) -> str:
    first = str(error).strip().partition("\n")[0].rstrip(".")
    if len(first) > _LONGEST_REASON:
        first = first[:_LONGEST_REASON] + "..."
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
