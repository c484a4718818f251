"""Which tool reads a config file. Told by its keys, never by its name; what no tool of ours reads is left alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from brim.audit.config.reading import LARGEST_CHARACTERS, Broken, Entry, Tree, read
from brim.audit.found import Edit, Found
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.source.module import Source
    from brim.records.findings import Confidence, InForce, Severity

Kind = Literal["transformers", "trl", "llama-factory", "axolotl", "deepspeed", "accelerate"]
TRAINER_KINDS: Final[tuple[Kind, ...]] = ("transformers", "trl", "llama-factory", "axolotl")
"""Whose training is the Hugging Face Trainer's."""
ARGUMENT_KINDS: Final[tuple[Kind, ...]] = ("transformers", "trl", "llama-factory")
"""Whose keys are those of TrainingArguments."""

LABELS: Final[dict[Kind, str]] = {
    "transformers": "Transformers", "trl": "TRL", "llama-factory": "LLaMA-Factory", "axolotl": "axolotl",
    "deepspeed": "DeepSpeed", "accelerate": "accelerate",
}  # fmt: skip

_TELLING: Final = re.compile(
    r"per_(?:device|gpu)_train_batch_size|gradient_accumulation_steps|train_micro_batch_size_per_gpu|zero_optimization|train_batch_size"
    r"|distributed_type|num_train_epochs|micro_batch_size|sequence_len|finetuning_type|lr_scheduler_type|sample_packing"
)
"""A file without any of these words is not read at all."""
_OTHERS: Final = frozenset(
    {"log_history", "best_model_checkpoint", "architectures", "added_tokens", "weight_map", "merge_method"}
)
"""Keys of records of a finished run, of models and of tokenizers."""
_AXOLOTL: Final = frozenset(
    {"micro_batch_size", "sequence_len", "sample_packing", "lora_r", "num_epochs", "gradient_accumulation_steps", "val_set_size"}
)
_LLAMA_FACTORY: Final = frozenset(
    {"finetuning_type", "cutoff_len", "lora_target", "dataset_dir", "quantization_bit", "neat_packing"}
)
_ACCELERATE: Final = frozenset(
    {"compute_environment", "num_processes", "mixed_precision", "deepspeed_config", "fsdp_config", "machine_rank", "num_machines"}
)
_DEEPSPEED: Final = frozenset(
    {"gradient_clipping", "steps_per_print", "wall_clock_breakdown", "gradient_accumulation_steps", "fp16", "bf16", "optimizer"}
)
_TRL: Final = frozenset(
    {
        "use_peft", "packing", "packing_strategy", "padding_free", "dataset_text_field", "assistant_only_loss", "completion_only_loss",
        "lora_target_modules", "lora_r", "load_in_4bit", "load_in_8bit", "num_generations", "max_completion_length", "max_prompt_length",
        "dataset_train_split", "precompute_ref_log_probs", "use_bnb_nested_quant", "eval_packing", "dataset_mixer",
    }
)  # fmt: skip
_ARGUMENTS: Final = frozenset(
    {
        "output_dir", "gradient_accumulation_steps", "num_train_epochs", "lr_scheduler_type", "learning_rate", "save_strategy",
        "eval_strategy", "evaluation_strategy", "warmup_ratio", "warmup_steps", "bf16", "fp16", "optim", "max_steps", "logging_steps",
        "per_device_eval_batch_size", "gradient_checkpointing", "max_grad_norm", "save_total_limit", "weight_decay", "report_to",
        "dataloader_num_workers", "save_steps", "eval_steps", "load_best_model_at_end", "group_by_length", "auto_find_batch_size",
    }
)  # fmt: skip
_LARGEST_SAID: Final = 20


@dataclass(frozen=True)
class Config:
    """One config of one tool: a file, or the part of a file that is for this tool."""

    kind: Kind
    file: str
    entries: Mapping[str, Entry]
    """By their names as the tool knows them: from the top of the tool's own part."""
    repeated: tuple[tuple[Entry, Entry], ...] = ()
    prefix: str = ""
    """Where that part begins, with a dot behind it; empty for a whole file."""
    inside: Config | None = None
    """The config that this one is written in, as a DeepSpeed mapping is in TrainingArguments."""
    links: list[Config] = field(default_factory=list, compare=False)
    """Configs that this one names by path."""

    @property
    def label(self) -> str:
        """The tool as it spells itself."""
        return LABELS[self.kind]

    def get(self, name: str) -> Entry | None:
        """The key of that dotted name."""
        return self.entries.get(name)

    def value(self, name: str, default: Any = None) -> Any:
        """Its value."""
        entry = self.entries.get(name)
        return default if entry is None else entry.value

    def is_on(self, name: str) -> bool:
        """Whether a switch is set to true, in any of the ways people write that."""
        value = self.value(name)
        return value is True or (isinstance(value, str) and value.lower() in {"true", "yes"})

    def whole(self, name: str) -> int | None:
        """A value that is a whole number above 0."""
        value = self.value(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    def top(self) -> Iterator[Entry]:
        """The keys of the first level."""
        return (entry for name, entry in self.entries.items() if "." not in name)

    def found(
        self,
        rule: str,
        entry: Entry,
        message: str,
        *,
        confidence: Confidence = "high",
        severity: Severity | None = None,
        in_force: tuple[InForce, ...] = (),
        edits: tuple[Edit, ...] = (),
        is_safe: bool = False,
    ) -> Found:
        """A finding about a key."""
        return Found(
            rule=rule,
            file=entry.file,
            line=entry.line,
            end_line=max(entry.line, entry.of_value.end_line) if entry.is_plain else entry.line,
            message=message,
            confidence=confidence,
            severity=severity,
            in_force=in_force,
            edits=edits,
            is_safe=is_safe,
        )


def recognise(source: Source, notes: list[str]) -> list[Config]:
    """The configs in a file: none, one, or one with another inside it. What looks like one and cannot be read is noted."""
    if len(source.text) > LARGEST_CHARACTERS or source.file.lower().endswith(".toml"):
        return []
    words = set(_TELLING.findall(source.text))
    if not words:
        return []
    try:
        tree = read(source)
    except Broken as error:
        if len(notes) < _LARGEST_SAID:
            text = _("{file} looks like a training config, and cannot be read in line {line}: {why}.")
            notes.append(text.format(file=source.file, line=error.line, why=error.why))
        return []
    return [] if tree is None else _configs(source.file, tree)


def _configs(file: str, tree: Tree) -> list[Config]:
    own = _part(file, tree, "")
    if own is not None:
        embedded = _embedded(file, tree, own)
        return [own, embedded] if embedded is not None else [own]
    for name, entry in tree.entries.items():
        if name.count(".") <= 1 and isinstance(entry.value, dict):
            part = _part(file, tree, f"{name}.")
            if part is not None:
                embedded = _embedded(file, tree, part)
                return [part, embedded] if embedded is not None else [part]
    return []


def _part(file: str, tree: Tree, prefix: str) -> Config | None:
    entries = {name.removeprefix(prefix): entry for name, entry in tree.entries.items() if name.startswith(prefix)}
    kind = _kind(entries)
    if kind is None or (prefix and "per_device_train_batch_size" not in entries and "per_gpu_train_batch_size" not in entries):
        return None
    repeated = tuple(pair for pair in tree.repeated if pair[1].name.startswith(prefix))
    return Config(kind, file, entries, repeated, prefix)


def _embedded(file: str, tree: Tree, own: Config) -> Config | None:
    """A DeepSpeed mapping in the place of its path."""
    value = own.value("deepspeed")
    if own.kind not in TRAINER_KINDS or not isinstance(value, dict):
        return None
    prefix = f"{own.prefix}deepspeed."
    entries = {name.removeprefix(prefix): entry for name, entry in tree.entries.items() if name.startswith(prefix)}
    made = Config("deepspeed", file, entries, (), prefix, own)
    own.links.append(made)
    return made


def _kind(entries: Mapping[str, Entry]) -> Kind | None:
    keys = {name for name in entries if "." not in name}
    if keys & _OTHERS:
        return None
    if "distributed_type" in keys and keys & _ACCELERATE:
        return "accelerate"
    if _is_deepspeed(entries, keys):
        return "deepspeed"
    if "base_model" in keys and keys & _AXOLOTL:
        return "axolotl"
    has_batch = bool(keys & {"per_device_train_batch_size", "per_gpu_train_batch_size"})
    if "model_name_or_path" in keys and (
        len(keys & _LLAMA_FACTORY) > 1 or (keys & _LLAMA_FACTORY and keys & {"stage", "template", "do_train"})
    ):
        return "llama-factory"
    if not has_batch and len(keys & _ARGUMENTS) < 4:
        return None
    return "trl" if keys & _TRL else "transformers"


def _is_deepspeed(entries: Mapping[str, Entry], keys: set[str]) -> bool:
    zero = entries.get("zero_optimization")
    if "train_micro_batch_size_per_gpu" in keys or (zero is not None and isinstance(zero.value, dict)):
        return True
    return "train_batch_size" in keys and bool(keys & _DEEPSPEED) and "output_dir" not in keys
