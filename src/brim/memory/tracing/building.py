"""The model of a setup, built and prepared as it would be for training; on the meta device it takes no memory."""

from __future__ import annotations

import contextlib
import copy
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from brim.errors import BrimError, UnsupportedError, UsageError
from brim.locale import _
from brim.memory.tracing.flash2 import NAME as FLASH2, use_flash2
from brim.memory.tracing.losses import use_chunked_loss
from brim.memory.tracing.quantized import BITS, follow_peft, prepare, quantize
from brim.workload.own import make_known
from brim.workload.resolve import untie_output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from brim.memory.setup import Setup
    from brim.workload.words import Task

ALL_LINEAR = "all-linear"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HALVES = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}
"""What autocast casts to."""


def build_model(
    setup: Setup, device: str = "meta", backend: str = "cuda", quantizer: Callable[..., None] | None = None
) -> nn.Module:
    """The model of the task, prepared as it would be for training.

    `quantizer(model, bits, dtype, device)` quantises for real, from the host's memory; without one, stand-ins take the layers' places.
    """
    with torch.device("cpu" if quantizer is not None else device), refusals():
        model = model_of_config(setup, read_config(setup))
    model.train()
    if setup.attention == "flash2":
        use_flash2(model, compute_dtype(setup))
    if setup.method in BITS:
        if quantizer is not None:
            quantizer(model, BITS[setup.method], compute_dtype(setup), device)
        else:
            quantize(model, BITS[setup.method], compute_dtype(setup), backend)
        if setup.prepared:
            prepare(model)
    return prepare_model(model, setup, device)


def prepare_model(model: Any, setup: Setup, device: str) -> nn.Module:
    """What a base model gets before it trains, traced or real: checkpointing, adapters, what is frozen, the chunked loss."""
    with refusals():
        _checkpoint(model, setup.checkpointing)
        if setup.method != "full":
            model = _with_lora(model, setup, device)
            follow_peft(model)
    _freeze(model, setup.freeze)
    if setup.loss == "chunked":
        use_chunked_loss(model)
    prepared: nn.Module = model
    return prepared


def compute_dtype(setup: Setup) -> torch.dtype:
    """What matrices are multiplied in."""
    return DTYPES.get(setup.precision) or HALVES[setup.precision]


def base_dtype(setup: Setup) -> torch.dtype:
    """What the model's own weights are held in: under autocast float32 if they train, the half if they are frozen."""
    if setup.method == "full":
        return DTYPES.get(setup.precision, torch.float32)
    asked: torch.dtype | None = getattr(torch, setup.base_dtype) if setup.base_dtype else None
    return asked or compute_dtype(setup)


def attention_in_force(model: Any) -> str | None:
    """The word for what a built model attends with: transformers falls back to `eager` where a model has nothing else."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = getattr(getattr(inner, "config", None), "_attn_implementation", None)
    return "flash2" if found == FLASH2 else found


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """What transformers and peft refuse is a wrong wish, not a failure of brim: their words, without their traceback."""
    try:
        yield
    except BrimError:
        raise
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        said = said.partition("Model type should be one of")[0].strip()
        hint = _("Name them: --lora-targets q_proj,v_proj, or all-linear.") if "target_modules" in said else None
        raise UnsupportedError(
            _("This model cannot be built like that: {reason}").format(reason=said[:600]), hint=hint
        ) from error


def read_config(setup: Setup) -> Any:
    """The config as transformers completes it."""
    import transformers

    facts = {key: value for key, value in setup.config.items() if key not in {"architectures", "torch_dtype", "dtype"}}
    facts = copy.deepcopy(facts)  # transformers writes into the dictionaries inside
    if setup.task == "classification":
        facts["num_labels"] = setup.num_labels
        if facts.get("pad_token_id") is None:
            facts["pad_token_id"] = 0
    make_known(facts.get("model_type"))
    return transformers.AutoConfig.for_model(**facts)


def automatic_class(task: Task) -> Any:
    """The class of transformers that finds the model of a task."""
    import transformers

    automatic: Any = {
        "causal-lm": transformers.AutoModelForCausalLM,
        "seq2seq": transformers.AutoModelForSeq2SeqLM,
        "classification": transformers.AutoModelForSequenceClassification,
    }[task]
    return automatic


def model_of_config(setup: Setup, config: Any, **options: Any) -> Any:
    """The model of the task with fresh weights; `options` go to transformers."""
    automatic = automatic_class(setup.task)
    asked = {"attn_implementation": setup.attention} if setup.attention in {"eager", "sdpa"} else {}
    refuse_other_tasks(setup.task, config)
    model = automatic.from_config(config, dtype=base_dtype(setup), **{**asked, **options})
    untie_output(model, setup.config)
    _keep_in_float32(model, base_dtype(setup))
    return model


def refuse_other_tasks(task: Task, config: Any) -> None:
    """An error where transformers has no class of this task for such a model."""
    if type(config) in automatic_class(task)._model_mapping or automatic_class(task).__name__ in (
        getattr(config, "auto_map", None) or {}
    ):
        return
    text = _("transformers has no model of the type {kind} for the task {task}.")
    raise UnsupportedError(text.format(kind=config.model_type, task=task))


def kept_in_float32(model: Any, dtype: torch.dtype) -> set[str]:
    """Names of modules that a model class keeps in float32 whatever the dtype of the weights, such as T5's `wo` (modeling_utils.py)."""
    names = set(model._keep_in_fp32_modules_strict or ()) if dtype != torch.float32 else set()
    if dtype == torch.float16:
        names |= set(model._keep_in_fp32_modules or ())
    return names


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    kept = kept_in_float32(model, dtype)
    for name, parameter in model.named_parameters():
        if kept & set(name.split(".")):
            parameter.data = parameter.data.to(torch.float32)


def lora_targets(setup: Setup) -> list[str] | str:
    """Which modules get adapters: what was said, else peft's choice, else, where peft has none, every linear layer."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    if not setup.lora_targets:
        known: Any = KNOWN.get(str(setup.config.get("model_type")), ALL_LINEAR)
        return known if isinstance(known, str) else list(known)
    return ALL_LINEAR if setup.lora_targets == (ALL_LINEAR,) else list(setup.lora_targets)


def _with_lora(model: Any, setup: Setup, device: str) -> Any:
    import peft

    task = {"causal-lm": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM", "classification": "SEQ_CLS"}[setup.task]
    if setup.checkpointing != "none":
        model.enable_input_require_grads()
    with torch.device(device):
        adapters = peft.LoraConfig(
            r=setup.lora_rank, lora_alpha=setup.lora_alpha, lora_dropout=setup.lora_dropout,
            target_modules=lora_targets(setup), task_type=task,
        )  # fmt: skip
        wrapped: Any = peft.get_peft_model(model, adapters)
    if setup.lora_dtype is not None:
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(getattr(torch, setup.lora_dtype))
    return wrapped


def _freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Freeze every parameter in whose name a pattern is found; a pattern that is found nowhere, or changes nothing, is a mistake.

    A plain word that names a module means that module: `encoder` is not a decoder's `encoder_attn`.
    """
    named = dict(model.named_parameters())
    for pattern in patterns:
        found = [name for name in named if pattern in name.split(".")] or [name for name in named if re.search(pattern, name)]
        if not found and pattern in _EMBEDDINGS:
            found = _input_embeddings(model, named)
        if not found:
            tops = ", ".join(sorted({".".join(name.split(".")[:2]) for name in named})[:8])
            text = _("--freeze {pattern!r} matches no parameter; their names begin with: {names}.")
            raise UsageError(text.format(pattern=pattern, names=tops))
        if not any(named[name].requires_grad for name in found):
            raise UsageError(_("--freeze {pattern!r} changes nothing: none of those parameters trains.").format(pattern=pattern))
        for name in found:
            named[name].requires_grad_(False)


_EMBEDDINGS = ("embedding", "embeddings", "embed")
"""Words for the table of the input tokens, whatever a model calls it."""


def _input_embeddings(model: Any, named: dict[str, nn.Parameter]) -> list[str]:
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    own = {id(parameter) for parameter in table.parameters()} if table is not None else set()
    return [name for name, parameter in named.items() if id(parameter) in own]


def _checkpoint(model: Any, word: str) -> None:
    if word == "none":
        return
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if word != "full":
        _checkpoint_every(model, int(word.partition(":")[2]))


def _checkpoint_every(model: nn.Module, every: int) -> None:
    """Keep checkpointing on every `every`-th layer only."""
    layers = [
        module for module in model.modules() if getattr(module, "gradient_checkpointing", None) is True and _is_layer(module)
    ]
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % every == 0  # type: ignore[assignment]


def _is_layer(module: nn.Module) -> bool:
    import transformers

    layer = getattr(transformers.modeling_layers, "GradientCheckpointingLayer", None)
    return layer is not None and isinstance(module, layer)


def make_batch(setup: Setup, device: str = "meta") -> dict[str, Any]:
    """Token ids, labels, and a mask where there is padding (its last tokens); on the meta device shapes only."""

    def tokens(length: int) -> torch.Tensor:
        # Above the special tokens, of which some models count the occurrences.
        vocabulary = int(setup.config.get("vocab_size") or 4)
        return torch.randint(min(3, vocabulary - 1), vocabulary, (setup.micro_batch, length), device=device)

    batch: dict[str, Any] = {"input_ids": tokens(setup.length)}
    if setup.padded:
        batch["attention_mask"] = torch.ones(setup.micro_batch, setup.length, dtype=torch.long, device=device)
        batch["attention_mask"][:, -1:] = 0
    if setup.task == "classification":
        batch["labels"] = torch.randint(setup.num_labels, (setup.micro_batch,), device=device)
        batch["input_ids"][:, -1] = setup.config.get("eos_token_id") or 0
    else:
        batch["labels"] = tokens(setup.target_length or setup.length)
    if setup.task != "classification":
        batch["use_cache"] = False
    return batch


def find_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, in the order in which they run: every list of modules that are all of one class."""
    found: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            kinds = Counter(type(block) for block in module)
            if len(kinds) == 1 and any(True for _parameter in module[0].parameters()) and not _is_inside(module, found):
                found.extend(module)
    return found


def _is_inside(candidate: nn.Module, found: list[nn.Module]) -> bool:
    return any(candidate is inner for outer in found for inner in outer.modules())
