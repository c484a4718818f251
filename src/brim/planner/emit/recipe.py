"""What every format needs of a plan, worked out once: names, dtypes, the equal cut, and what must be said.

Words that mean different things to different engines are settled here. Under ZeRO, DeepSpeed holds half-precision weights and a float32
copy whatever the weights were loaded in; FSDP2 shards float32 and gathers in half precision; elsewhere `amp-*` means float32 weights
and autocast. See `brim.memory.parallel`, which the memory figures follow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.errors import UnsupportedError, UsageError
from brim.locale import _
from brim.planner.emit.equal import Equal, cut_note, equal_cut
from brim.records import Candidate, Plan
from brim.workload.cards import find_card
from brim.workload.reading import sources_in
from brim.workload.resolve import find_model
from brim.workload.settings import ALPHA_PER_RANK, DEFAULT_RANK, recorded_alpha

if TYPE_CHECKING:
    from collections.abc import Mapping

TRAINER_LEARNING_RATE = 5e-5
"""transformers/training_args.py: what the Trainer takes where nothing is said."""
_HALF = {"amp-bf16": "bf16", "amp-fp16": "fp16", "bf16": "bf16", "fp16": "fp16"}
_DTYPE = {"bf16": "bfloat16", "fp16": "float16"}
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flash2": "flash_attention_2"}
_QUANTISED_BITS = {"qlora": 4, "lora-8bit": 8}
_OPTIM = {
    "adamw": "adamw_torch", "adamw-fused": "adamw_torch_fused", "adamw-loop": "adamw_torch", "adamw-8bit": "adamw_bnb_8bit",
    "paged-adamw-8bit": "paged_adamw_8bit", "adafactor": "adafactor", "sgd": "sgd", "sgd-momentum": "sgd", "lion": "lion_32bit",
}  # fmt: skip
LION_BETA2 = 0.99
MOMENTUM = 0.9


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One plan, in the words that the formats share."""

    plan: Plan
    best: Candidate
    cut: Equal
    model: str
    """Hub id or folder; `module:function` where the model is the user's own code."""
    data: str | None
    learning_rate: float
    notes: tuple[str, ...]
    """What every format must say."""

    @property
    def is_function(self) -> bool:
        """Whether only the user's own code can build the model."""
        return _FUNCTION.fullmatch(self.plan.workload.model) is not None and not Path(self.plan.workload.model).exists()

    @property
    def gpus_per_node(self) -> int:
        """Processes on one node."""
        return max(1, self.best.world_size // self.plan.machine.nodes)

    @property
    def on_cpu(self) -> bool:
        """Whether the machine has no accelerator."""
        return not self.plan.machine.accelerators

    @property
    def zero_stage(self) -> int | None:
        """DeepSpeed's stage; None without ZeRO."""
        return int(self.best.sharding[-1]) if self.best.sharding.startswith("zero") else None

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP2 shards."""
        return self.best.sharding == "fsdp"

    @property
    def is_lora(self) -> bool:
        """Whether adapters train."""
        return self.best.method != "full"

    @property
    def quantised_bits(self) -> int | None:
        """4 or 8 bits of a quantised base."""
        return _QUANTISED_BITS.get(self.best.method)

    @property
    def half(self) -> str | None:
        """`bf16` or `fp16`, however it is used; None in float32."""
        return _HALF.get(self.best.precision)

    @property
    def mixed(self) -> str | None:
        """The half precision that the Trainer and accelerate are told: autocast, or what the engine makes of it."""
        return self.half if self.best.precision.startswith("amp-") or self.zero_stage is not None else None

    @property
    def dtype(self) -> str:
        """The dtype in which the weights are loaded."""
        if self.half is None:
            return self.plan.workload.base_dtype or "float32" if self.is_lora else "float32"
        half = _DTYPE[self.half]
        if self.is_lora:
            return self.plan.workload.base_dtype or half
        return "float32" if self.best.precision.startswith("amp-") and self.zero_stage is None else half

    @property
    def attention(self) -> str:
        """As transformers spells it."""
        return _ATTENTION[self.best.attention]

    @property
    def checkpoints(self) -> bool:
        """Whether any layer is checkpointed."""
        return self.best.checkpointing != "none"

    @property
    def every(self) -> int | None:
        """N of `every:N`."""
        word = self.best.checkpointing
        return int(word.partition(":")[2]) if word.startswith("every:") else None

    @property
    def lora_rank(self) -> int:
        """Of the adapters."""
        return self.plan.workload.lora_rank or DEFAULT_RANK

    @property
    def lora_alpha(self) -> int:
        """The adapters are scaled by alpha / rank."""
        return recorded_alpha(self.plan.workload) or ALPHA_PER_RANK * self.lora_rank

    @property
    def lora_dropout(self) -> float:
        """Of what goes into the adapters."""
        return self.plan.workload.lora_dropout

    @property
    def lora_targets(self) -> list[str] | str:
        """Modules, or `all-linear`: what was said, else peft's choice for the model, else every linear layer."""
        given = self.plan.workload.lora_targets
        if given:
            return "all-linear" if given == ("all-linear",) else list(given)
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

        config = self.config() or {}
        known: Any = KNOWN.get(str(config.get("model_type")), "all-linear")
        return known if isinstance(known, str) else sorted(known)

    @property
    def optim(self) -> str:
        """As transformers spells the optimizer."""
        # The Trainer cannot be told to loop; the fused kernel computes the same and takes no temporaries either.
        if self.best.optimizer == "adamw-loop" and not self.on_cpu:
            return "adamw_torch_fused"
        return _OPTIM[self.best.optimizer]

    @property
    def eval_batch(self) -> int:
        """Sequences per rank in evaluation."""
        return self.best.eval_batch or self.cut.micro_batch

    @property
    def max_grad_norm(self) -> float:
        """0 means off, to all of these tools."""
        return self.plan.workload.max_grad_norm or 0.0

    def config(self) -> Mapping[str, Any] | None:
        """The model's config.json; None where it is out of reach."""
        if self.is_function:
            return None
        try:
            return find_model(self.plan.workload.model).config
        except UsageError:
            return None


def recipe_of(plan: Plan, data: str | None = None) -> Recipe:
    """The plan's words; refused where nothing fits, or where equal micro-batches cannot say its batch."""
    if plan.best is None:
        raise UnsupportedError(
            _("Nothing fits, so there is no configuration to write down."), hint=_("Plan for another machine.")
        )
    best = plan.best
    cut = equal_cut(best)
    rate = best.learning_rate or plan.workload.learning_rate
    notes = [cut_note(best, cut)]
    if rate is None:
        notes.append(
            _("No learning rate was given: {rate} is what the Trainer takes by itself.").format(rate=TRAINER_LEARNING_RATE)
        )
    if best.optimizer == "adamw-loop" and plan.machine.accelerators:
        notes.append(_("The Trainer has no for-loop AdamW: the fused one computes the same and needs no more memory."))
    return Recipe(
        plan=plan, best=best, cut=cut, model=_model_name(plan.workload.model), data=_data_name(plan, data),
        learning_rate=rate or TRAINER_LEARNING_RATE, notes=tuple(note for note in notes if note),
    )  # fmt: skip


def _model_name(given: str) -> str:
    """A folder by its full path, a catalogue name by its Hub id, all else as it was typed."""
    path = Path(given).expanduser()
    if (path / "config.json").is_file():
        return str(path.resolve())
    if path.name == "config.json" and path.is_file():
        return str(path.parent.resolve())
    card = find_card(given)
    return card.hub_id if card is not None else given


def _data_name(plan: Plan, data: str | None) -> str | None:
    given = data or (plan.data.source if plan.data is not None else None)
    if not given or len(sources_in(given)) > 1:
        return None
    path = Path(given).expanduser()
    return str(path.resolve()) if path.exists() else given
