"""A stitched model: pieces of several donors, each run by its donor's own code, as one `PreTrainedModel`.

    tokens -> embedding -> part 0 -> adapter -> part 1 -> adapter -> ... -> last part, with its norm and head -> logits

All parts are handed the same 2-D mask and the same positions, and make of them what their family and their attention need: rotary
angles, sliding windows, the borders of packed sequences. So the mask of the model never meets a layer, and a row of a batch is what it
would be alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple

from brim.errors import RunError, UnsupportedError, UsageError
from brim.locale import _
from brim.stitching.adapters import AdapterModule, build_adapter
from brim.stitching.angles import outlived_at
from brim.stitching.caching import fit, new_cache, refuse_other_kinds, views
from brim.stitching.checking import check_config
from brim.stitching.config import MODEL_TYPE, StitchedConfig
from brim.stitching.freezing import freeze
from brim.stitching.parts import build_part, name_within

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

# Typed as of one release of transformers; several are supported.
_Pretrained: Any = PreTrainedModel
_Generating: Any = GenerationMixin

_OF_THE_LOSS: Final = ("num_items_in_batch", "ignore_index", "shift_labels")


class StitchedModel(_Pretrained, _Generating):  # type: ignore[misc]
    """Built from its config alone, with fresh weights; `brim.stitching.assembling` builds it from donors."""

    config_class = StitchedConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: StitchedConfig) -> None:
        check_config(config)
        attention, last = config._attn_implementation, len(config.parts) - 1  # noqa: SLF001
        super().__init__(config)
        self.loss_type = "ForCausalLM"
        self.parts: Any = nn.ModuleList(
            build_part(facts, is_first=index == 0, is_last=index == last, attention=attention)
            for index, facts in enumerate(config.parts)
        )
        self.adapters: Any = nn.ModuleList(build_adapter(facts) for facts in config.adapters)
        kinds = {one._attn_implementation for one in self._configs}  # noqa: SLF001
        if len(kinds) == 1:  # unasked, each family takes what it can: Gemma 2 has no sdpa
            config._attn_implementation = kinds.pop()  # noqa: SLF001
        self._tied_weights_keys = self._tied_names() if config.tie_word_embeddings else None
        # What the parts say to accelerate and to the loader; transformers collects it from children, and a list is not one.
        for name in ("_no_split_modules", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_skip_keys_device_placement"):
            setattr(self, name, {one for part in self.parts for one in getattr(part, name, None) or ()})
        self.post_init()
        freeze(self)

    @classmethod
    def from_pretrained(cls, *args: Any, **keywords: Any) -> Any:
        """As of any model; what was frozen when it was saved is frozen again, and weights that are not there are not drawn at random."""
        wants_told = keywords.pop("output_loading_info", False)
        loaded, told = super().from_pretrained(*args, output_loading_info=True, **keywords)
        if not keywords.get("ignore_mismatched_sizes"):
            _refuse_half_a_model(told)
        freeze(loaded)
        return (loaded, told) if wants_told else loaded

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits for each token, and the loss where there are labels; `attention_mask` is 2-D, ones for tokens and zeros for padding."""
        if (input_ids is None) == (inputs_embeds is None):
            raise UsageError(_("A model needs either input_ids or inputs_embeds, and not both."))
        if attention_mask is not None and getattr(attention_mask, "ndim", 0) != 2:
            text = _("A stitched model makes the masks of its layers itself, of a 2-D mask: ones for tokens, zeros for padding.")
            raise UnsupportedError(text, hint=_("For packed rows leave the mask out, and give position_ids that begin anew."))
        hidden: Tensor = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache_for(past_key_values, use_cache, attention_mask, position_ids, labels)
        if position_ids is None:
            position_ids = _positions(hidden, attention_mask, cache)
        of_loss = {name: kwargs.pop(name) for name in _OF_THE_LOSS if name in kwargs}
        shared = {"attention_mask": attention_mask, "position_ids": position_ids, "return_dict": True, **kwargs}
        outputs = self._run(hidden, shared, cache, logits_to_keep)
        logits = outputs[-1].logits
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **of_loss)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=cache,
            hidden_states=_joined(outputs, "hidden_states"), attentions=_joined(outputs, "attentions"),
        )  # fmt: skip

    def _run(self, hidden: Tensor, shared: dict[str, Any], cache: Any, logits_to_keep: int | Tensor) -> list[Any]:
        """The outputs of all parts."""
        pasts = [None] * len(self.parts) if cache is None else views(cache, self._configs)
        checkpoints = self._checkpoints
        outputs: list[Any] = []
        for index, (part, past) in enumerate(zip(self.parts, pasts, strict=True)):
            if index:
                hidden = self.adapters[index - 1](outputs[-1].last_hidden_state)
            given = {**shared, "past_key_values": past, "use_cache": past is not None}
            if not part.config.num_hidden_layers:
                given["attention_mask"] = None  # nobody attends there, and a mask would have to fit a cache that it has not
            if index == len(self.parts) - 1:
                given["logits_to_keep"] = logits_to_keep
            outputs.append(part(inputs_embeds=_ready(hidden, part) if checkpoints else hidden, **given))
        return outputs

    def _cache_for(
        self, past: Any, use_cache: bool | None, mask: Tensor | None, position_ids: Tensor | None, labels: Tensor | None
    ) -> Any:
        """The cache to fill, if any: none is made in training, nor for packed sequences, whose borders a cache would hide."""
        if self._checkpoints:
            return None
        is_packed = mask is None and position_ids is not None and _restarts(position_ids)
        if past is not None:
            if is_packed:
                raise UsageError(_("Several sequences in one row (position_ids that begin anew) cannot share a cache."))
            fit(past, self._configs)
            return past
        wanted = self.config.use_cache and labels is None and not self.training if use_cache is None else use_cache
        if not wanted or is_packed:
            return None
        return new_cache(self._configs)

    @property
    def _checkpoints(self) -> bool:
        return bool(self.training and self.is_gradient_checkpointing)

    @property
    def _configs(self) -> list[Any]:
        return [part.config for part in self.parts]

    @property
    def trainable_parameters(self) -> int:
        """How many parameters are not frozen; 0 where nothing can be trained, as in a stitch by identity alone."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)

    def freeze(self) -> None:
        """Freeze all but what the config's `trains` names."""
        freeze(self)

    def get_input_embeddings(self) -> Any:
        """The first part's."""
        return self.parts[0].get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Put another one in its place."""
        self.parts[0].set_input_embeddings(value)

    def get_output_embeddings(self) -> Any:
        """The last part's head."""
        return self.parts[-1].get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Put another one in its place."""
        self.parts[-1].set_output_embeddings(new_embeddings)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *_args: Any, **_keywords: Any) -> Any:
        """Refused: the sizes stand in the config of each part."""
        if new_num_tokens not in {None, self.config.vocab_size}:
            raise UnsupportedError(
                _("The vocabulary of a stitched model cannot be resized."), hint=_("Resize the donors first, then stitch them.")
            )
        return self.get_input_embeddings()

    def enable_input_require_grads(self) -> None:
        """Nothing to do: `forward` sees to it where a part trains, so that frozen layers in front are not run backward for nothing."""

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As of any model; a cache that has become wrong is made anew."""
        positions = kwargs.get("position_ids")
        if positions is None:  # older releases leave them to the model
            positions = _positions(input_ids, attention_mask, None)
        if past_key_values is not None and self._is_outlived(past_key_values, positions):
            past_key_values, kwargs["next_sequence_length"] = None, None
            if inputs_embeds is not None:  # of the prompt: what was said since is in the tokens
                said = input_ids[:, input_ids.shape[1] + inputs_embeds.shape[1] - positions.shape[-1] :]
                inputs_embeds = torch.cat([inputs_embeds, self.get_input_embeddings()(said)], dim=1)
                kwargs["is_first_iteration"] = True
        return super().prepare_inputs_for_generation(
            input_ids, past_key_values=past_key_values, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
        )

    def _is_outlived(self, cache: Any, positions: Tensor) -> bool:
        """Whether the longest row, without its padding, now crosses a border of LongRoPE."""
        borders = outlived_at(self._configs)
        length = int(positions.max()) + 1 if borders else 0
        before = length - (positions.shape[-1] - cache.get_seq_length())
        return any(before <= border < length for border in borders)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **keywords: Any
    ) -> None:
        refuse_other_kinds(generation_config.cache_implementation)
        if getattr(generation_config, "prefill_chunk_size", None) and outlived_at(self._configs):
            text = _("A model with LongRoPE cannot read its prompt in chunks: the first ones would be turned by other angles.")
            raise UnsupportedError(text, hint=_("Leave prefill_chunk_size out."))
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **keywords)
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            fit(cache, self._configs)
            if getattr(generation_config, "is_assistant", False):
                cache.activate_past_recording()

    def _init_weights(self, module: nn.Module) -> None:
        """Only what is our own: each part begins as its family does."""
        if isinstance(module, AdapterModule):
            module.reset()

    def _tied_names(self) -> dict[str, str]:
        head = name_within(self, self.get_output_embeddings())
        return {f"{head}.weight": f"{name_within(self, self.get_input_embeddings())}.weight"}

    def untie(self) -> Self:
        """Give the head weights of its own, where donor and config disagree about that."""
        head = self.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
        self.config.tie_word_embeddings = False
        self._tied_weights_keys = None
        self.all_tied_weights_keys: dict[str, str] = {}
        return self


def register() -> None:
    """Let transformers find a stitched model by its config: `AutoModelForCausalLM.from_pretrained(folder)`."""
    AutoConfig.register(MODEL_TYPE, StitchedConfig, exist_ok=True)
    AutoModelForCausalLM.register(StitchedConfig, StitchedModel, exist_ok=True)
    # Where the Trainer looks up, by its name, whether labels of a class are to be shifted when they are smoothed.
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(MODEL_TYPE, StitchedModel.__name__)


def _refuse_half_a_model(told: Mapping[str, Any]) -> None:
    """What a file does not hold, transformers draws at random: it warns and goes on."""
    texts = {
        "missing_keys": _("The weights of this stitched model are not complete: {count} are missing, {first} among them."),
        "mismatched_keys": _(
            "The weights of this stitched model have other shapes than its config says: {count}, {first} among them."
        ),
        "unexpected_keys": _("The file of this stitched model holds weights that it does not have: {count}, {first} among them."),
    }
    for kind, text in texts.items():
        names = sorted(str(name[0] if isinstance(name, tuple) else name) for name in told.get(kind) or ())
        if names:
            raise RunError(text.format(count=len(names), first=names[0]), hint=_("Copy or stitch it anew."))


def _positions(hidden: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
    """The place of each token (or hidden state) in its sequence: padding does not count, and what is in the cache does."""
    length = hidden.shape[1]
    if mask is not None and mask.ndim == 2:
        places: Tensor = mask.long().cumsum(-1) - 1
        return places.clamp(min=0)[:, -length:].to(hidden.device)
    past = 0 if cache is None else cache.get_seq_length()
    return torch.arange(past, past + length, device=hidden.device).unsqueeze(0)


def _restarts(position_ids: Tensor) -> bool:
    """Whether positions begin anew within a row: several sequences packed into one."""
    return bool((position_ids.diff(dim=-1) != 1).any())


def _ready(hidden: Tensor, part: nn.Module) -> Tensor:
    """Reentrant checkpointing loses the gradients of a layer none of whose inputs require one."""
    if torch.is_grad_enabled() and not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_(any(parameter.requires_grad for parameter in part.parameters()))
    return hidden


def _joined(outputs: list[Any], name: str) -> tuple[Any, ...] | None:
    """What was recorded in each part, one after the other; before and after an adapter both stand there."""
    found = [getattr(output, name, None) for output in outputs]
    return None if any(one is None for one in found) else tuple(value for one in found for value in one or ())


register()
