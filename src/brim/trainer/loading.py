"""The model and the tokenizer of a training: weights that are really loaded, prepared as `brim.memory.tracing.building` prepares a trace.

So what trains is what was estimated: the same dtypes, the same quantised layers, the same adapters, the same frozen parameters. What a file
does not hold, transformers draws at random and goes on; here that is an error, or, for the head of a new task, a sentence.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from brim.errors import BrimError, UnsupportedError, UsageError
from brim.locale import _, sentences
from brim.machine.detect import require_flash_attention
from brim.memory.compatibility import check_module
from brim.memory.setup import Setup
from brim.memory.tracing.building import attention_in_force, model_of_config, prepare_model, read_config, refusals
from brim.memory.tracing.quantized import BITS
from brim.step.four_bits import keep_trainable
from brim.trainer.chunking import use_proven_chunks
from brim.trainer.weights import ATTENTION, Weights, completed, told, why_no_hub
from brim.workload.cards import find_card
from brim.workload.own import make_known
from brim.workload.settings import ALPHA_PER_RANK, DEFAULT_RANK, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from brim.workload.resolve import Model

USED_CACHE: Final = "used_cache_before_training"
"""The attribute of a model that remembers what its config said of the cache, which is off while it trains."""

_STITCHED: Final = "brim_stitched"
_SHAPING: Final = (
    "method",
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "lora_targets",
    "lora_dtype",
    "base_dtype",
    "freeze",
    "precision",
    "checkpointing",
    "loss",
)
"""Settings that a model is built with, and a module of somebody's own cannot be given."""


def load_model(
    model: Model,
    settings: Settings,
    *,
    device: str,
    labels: Sequence[str] = (),
    pad_token_id: int | None = None,
    from_scratch: bool = False,
    seed: int = 42,
    trust_remote_code: bool = False,
    say: Callable[[str], None],
) -> nn.Module:
    """The model with its weights on the device, ready to be trained; `settings` say its task and everything else.

    `labels` name the classes of a classifier. `pad_token_id` is what rows are filled up with: a decoder that classifies looks for the last
    token that is another. `from_scratch` draws all weights by the seed; otherwise only what is new by nature.
    """
    refuse_what_cannot_train(model, settings, device=device, from_scratch=from_scratch)
    torch.manual_seed(seed)
    if model.factory is not None:
        return _of_function(model, settings, device)
    assert model.config is not None
    setup = _setup(model.config, settings, labels)
    make_known(model.config.get("model_type"))
    trusts = trust_remote_code or model.trust_remote_code
    if from_scratch:
        base = _fresh(model, setup, labels, pad_token_id, trusts).to(device)
    else:
        base = Weights(model, setup, device, trusts, say).load(labels, pad_token_id)
    if setup.method in BITS:
        base = _prepared_for_adapters(base)
    _switch_cache_off(base)
    base.train()
    torch.manual_seed(seed)  # adapters are drawn alike, whatever was drawn before them
    prepared = prepare_model(base, replace(setup, loss="standard"), device).train()
    _refuse_if_nothing_trains(prepared)
    if setup.loss == "chunked":
        use_proven_chunks(prepared, base)
    _tell_halves(prepared, setup, say)
    return prepared


def refuse_what_cannot_train(model: Model, settings: Settings, *, device: str, from_scratch: bool = False) -> None:
    """What would not run, or would not be what was asked for; before anything is read."""
    kind = torch.device(device).type
    if settings.precision == "fp16":
        raise UnsupportedError(
            _("Precision fp16 holds the weights in half precision, where no scaler can keep small gradients."),
            hint=_("Take --precision fp32 or amp-bf16.")
            if kind == "cpu"
            else _("Take --precision amp-fp16, which keeps float32 weights and scales."),
        )
    if settings.precision == "amp-fp16" and kind == "cpu":
        raise UnsupportedError(
            _("Precision amp-fp16 needs a GPU: on the CPU accelerate takes the wish and trains in float32 all the same."),
            hint=_("Take --precision fp32 or amp-bf16."),
        )
    if settings.attention == "flash2" and kind != "cuda":
        raise UnsupportedError(_("flash2 runs on CUDA cards alone, and this is {device}.").format(device=device))
    if settings.attention == "flash2":
        require_flash_attention()
    if settings.method in BITS and importlib.util.find_spec("bitsandbytes") is None:
        text = _("The quantised methods are bitsandbytes', which is not installed.")
        raise UnsupportedError(text, hint=_("Install it: pip install bitsandbytes."))
    if settings.method != "full" and from_scratch:
        raise UsageError(
            _("Adapters are saved without the model below them, and with --from-scratch that model is random and saved nowhere."),
            hint=_("Take --method full, or weights that exist."),
        )
    if settings.method != "full" and (model.config or {}).get("model_type") == _STITCHED:
        raise UnsupportedError(
            _("A stitched model trains what its recipe says, and LoRA would freeze that."),
            hint=_("Take --method full: what is not named under `train` in the recipe stays frozen."),
        )


def has_dropout(model: nn.Module) -> bool:
    """Whether training draws random numbers inside the model: any dropout above 0, as a module or as a rate that a module keeps."""
    return any(_draws(module) for module in model.modules())


def _draws(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):  # noqa: SLF001 (the base of all of torch's)
        return module.p > 0
    rates = (value for name, value in vars(module).items() if "drop" in name or "jitter" in name)
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


# The tokenizer.


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """From a folder, a `tokenizer.json`, a catalogue name or a Hub id; the network is asked only for what is not on this disk."""
    path = Path(name).expanduser()
    try:
        if path.is_file():
            return _tokenizer_of_file(path, trust_remote_code)
        card = None if path.is_dir() else find_card(name)
        reference = str(path) if path.is_dir() else card.hub_id if card is not None else name
        return _tokenizer(reference, trust_remote_code)
    except BrimError:
        raise
    except Exception as error:
        # Both libraries raise whatever went wrong in them; `tokenizers` even the bare Exception.
        raise _no_tokenizer(name, told(error)) from error


def _tokenizer_of_file(path: Path, trust_remote_code: bool) -> Any:
    from transformers import PreTrainedTokenizerFast

    if path.name != "config.json":
        made: Any = PreTrainedTokenizerFast
        return made(tokenizer_file=str(path))
    return _tokenizer(str(path.parent), trust_remote_code)


def _tokenizer(reference: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    automatic: Any = AutoTokenizer
    options = {"trust_remote_code": trust_remote_code}
    is_folder = Path(reference).is_dir()
    try:
        return automatic.from_pretrained(reference, local_files_only=True, **options)
    except (OSError, ValueError) as error:
        if is_folder or (why := why_no_hub(reference)):
            raise _no_tokenizer(reference, told(error) if is_folder else why) from error
    return automatic.from_pretrained(reference, **options)


def _no_tokenizer(name: str, why: str) -> UsageError:
    text = _("The tokenizer {name} cannot be loaded: {why}.").format(name=name, why=why.rstrip("."))
    return UsageError(text, hint=_("Give a folder with a tokenizer, a tokenizer.json or a Hub id: --tokenizer NAME."))


# The parts of a model that is not loaded, and what all get.


def _setup(config: Mapping[str, Any], settings: Settings, labels: Sequence[str]) -> Setup:
    """As `brim estimate` makes it; the batch has no say here."""
    assert settings.task is not None, "the caller fills in the task"
    rank = settings.lora_rank or DEFAULT_RANK
    return Setup(
        config=config, task=settings.task, micro_batch=1, length=1, method=settings.method,
        lora_rank=rank, lora_alpha=settings.lora_alpha or ALPHA_PER_RANK * rank, lora_dropout=settings.lora_dropout,
        lora_targets=settings.lora_targets, lora_dtype=settings.lora_dtype, base_dtype=settings.base_dtype,
        freeze=settings.freeze, precision=settings.precision, optimizer=settings.optimizer,
        checkpointing=settings.checkpointing, attention=settings.attention, num_labels=len(labels) or _classes(config),
        loss=settings.loss,
    )  # fmt: skip


def _classes(config: Mapping[str, Any]) -> int:
    """As a config says it; 2 where it says nothing, as transformers takes it."""
    named = config.get("id2label")
    return len(named) if isinstance(named, dict) and named else int(config.get("num_labels") or 2)


def _fresh(model: Model, setup: Setup, labels: Sequence[str], pad_token_id: int | None, trusts: bool) -> Any:
    """On the host, whatever the device: so the seed draws the same weights everywhere."""
    import transformers

    with refusals():
        if trusts and model.folder is not None and "auto_map" in setup.config:
            automatic: Any = transformers.AutoConfig
            config = automatic.from_pretrained(str(model.folder), trust_remote_code=True)
        else:
            config = read_config(setup)
        options = {"attn_implementation": ATTENTION["flash2"]} if setup.attention == "flash2" else {}
        return model_of_config(setup, completed(config, setup, labels, pad_token_id), trust_remote_code=trusts, **options)


def _of_function(model: Model, settings: Settings, device: str) -> nn.Module:
    """What the user's own code builds is trained as it is: how it is made is its own."""
    check_module(Settings(**{name: getattr(settings, name) for name in _SHAPING}), has_step=False)
    built = model.build("cpu").to(device).train()
    found = attention_in_force(built)
    if settings.attention is not None and found is not None and settings.attention != found:
        text = _("{given} builds a model with {found} attention, and {asked} was asked for.")
        raise UsageError(text.format(given=model.given, found=found, asked=settings.attention), hint=_("Build it so."))
    _switch_cache_off(built)
    _refuse_if_nothing_trains(built)
    return built


def _prepared_for_adapters(base: Any) -> Any:
    """Everything of the base is frozen, and what is not quantised is held in float32. Checkpointing is switched on later, as for all."""
    import peft

    prepare: Any = peft.prepare_model_for_kbit_training
    keep_trainable(base)
    return prepare(base, use_gradient_checkpointing=False)


def _switch_cache_off(model: Any) -> None:
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "use_cache"):
        setattr(model, USED_CACHE, config.use_cache)
        config.use_cache = False


def _refuse_if_nothing_trains(model: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(_("Nothing trains: every parameter is frozen."))


def _tell_halves(model: nn.Module, setup: Setup, say: Callable[[str], None]) -> None:
    """Near 1 the spacing of bfloat16 is 0.004: smaller steps are lost."""
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    for dtype in sorted(trained & {torch.bfloat16, torch.float16}, key=str):
        first = _("What trains is held in {dtype}, where small steps are lost.").format(dtype=str(dtype).removeprefix("torch."))
        cure = _("--precision amp-bf16 holds it in float32.") if setup.lora_dtype is None else ""
        say(sentences(first, cure))
