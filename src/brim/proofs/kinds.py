"""What a model is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from brim.errors import UnsupportedError
from brim.locale import _
from brim.proofs.modules import inner_model

if TYPE_CHECKING:
    from torch import nn

Kind = Literal["causal-lm", "masked-lm", "seq2seq", "classification"]
_BOTH_WAYS = ("xlnet",)
"""Not among transformers' masked models, and not causal."""


def kind_of(model: nn.Module) -> Kind:
    """What a model of transformers is for; anybody's own is taken for a causal language model."""
    inner: Any = inner_model(model)
    config = getattr(inner, "config", None)
    library = next((each for each in type(inner).__mro__ if each.__module__.startswith("transformers.models.")), None)
    if config is None or not hasattr(config, "model_type"):
        return "causal-lm"
    is_pair = bool(getattr(config, "is_encoder_decoder", False))
    if library is None:
        return "seq2seq" if is_pair else "causal-lm"
    from transformers.models.auto import modeling_auto

    name, masked = library.__name__, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if is_pair and not (name.endswith("ForSequenceClassification") or "QuestionAnswering" in name):
        return "seq2seq"
    if name.endswith("ForSequenceClassification") and not is_pair:
        return "classification"
    if name in masked.values() or name.endswith(("ForMaskedLM", "ForTokenClassification", "EncoderModel", "Encoder")):
        return "masked-lm"
    if "For" in name and not name.endswith(("ForCausalLM", "ForConditionalGeneration")):
        raise UnsupportedError(
            _("The head of {name} is none that can be verified.").format(name=type(inner).__name__),
            hint=_("Verify the same model with its head for language modelling, or for the classification of sequences: --task."),
        )
    is_encoder = (config.model_type in masked and not getattr(config, "is_decoder", False)) or config.model_type in _BOTH_WAYS
    return "masked-lm" if is_encoder else "causal-lm"
