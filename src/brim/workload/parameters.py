"""How many parameters a model has, by a closed formula from its config.json alone.

Counted is every parameter of the named transformers class: the body, and the head that the class puts on it. Weights
that are tied (an output layer that is the embedding again) count once. Buffers (rotary tables, masks, BART's logits
bias) do not count. Sinusoidal tables that a class registers as parameters and never trains (Marian, Pegasus) do, as in
`model.num_parameters()`.

The formula takes `tie_word_embeddings` at its word. transformers 5 does not for T5 and mT5: built from a config it ties
their output layer always, and unties it again when the checkpoint that it loads has an output layer of its own.

The count needs neither torch nor transformers, takes microseconds, and is exact: the tests compare it to the digit with
what transformers builds, for every model of the catalogue. Bodies are in `brim.workload.architectures`; here are the
heads, and the table of what is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from brim.errors import UsageError
from brim.locale import _
from brim.workload import architectures as body
from brim.workload.architectures import linear, norm
from brim.workload.facts import Facts

Formula = Callable[[Facts], int]


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture: how its classes are called, its body, and what each class puts on it."""

    prefix: str
    body: Formula
    heads: Mapping[str, Formula]
    """By what follows the prefix: `ForCausalLM`. A class that is not named here is counted by no formula, and built instead."""


def count_parameters(config: Mapping[str, Any], class_name: str) -> int:
    """Count the parameters of the transformers class `class_name` for this config (the content of a config.json)."""
    facts = Facts(config)
    family = _FAMILIES.get(facts.model_type)
    if family is None:
        known = ", ".join(sorted(_FAMILIES))
        text = _("No formula counts the parameters of a {model_type!r} model; known types are {known}.")
        raise UsageError(text.format(model_type=facts.model_type, known=known))
    head = family.heads.get(class_name.removeprefix(family.prefix)) if class_name.startswith(family.prefix) else None
    if head is None or facts.flag("add_cross_attention", default=False):
        text = _("No formula counts the parameters of the {model_type!r} class {class_name!r}.")
        raise UsageError(text.format(model_type=facts.model_type, class_name=class_name))
    return family.body(facts) + head(facts)


def supported_model_types() -> frozenset[str]:
    """The values of config.json's `model_type` that `count_parameters` knows."""
    return frozenset(_FAMILIES)


def _nothing(_: Facts) -> int:
    return 0


def _decoder(prefix: str, formula: Formula, *, tied: bool, bias: bool = False) -> Family:
    """A causal language model. `tied` is what its architecture does where config.json is silent."""

    def output(c: Facts) -> int:
        return c.size("word_embed_proj_dim", default=c.width)

    def language_model(c: Facts) -> int:
        weight = 0 if c.flag("tie_word_embeddings", default=tied) else linear(output(c), c.vocabulary)
        return weight + (c.vocabulary if bias else 0)

    def classifier(c: Facts) -> int:
        return linear(output(c), c.labels)

    heads = {"Model": _nothing, "ForCausalLM": language_model, "ForSequenceClassification": classifier}
    return Family(prefix, formula, heads | ({"LMHeadModel": language_model} if prefix == "GPT2" else {}))


def _seq2seq(prefix: str, formula: Formula, *, classified: bool = False) -> Family:
    """An encoder and a decoder. Some have a classifier too, which reads the decoder's last state."""

    def language_model(c: Facts) -> int:
        return 0 if c.flag("tie_word_embeddings", default=True) else linear(c.width, c.vocabulary)

    heads: dict[str, Formula] = {"Model": _nothing, "ForConditionalGeneration": language_model, "MTModel": language_model}
    return Family(prefix, formula, heads | ({"ForSequenceClassification": _two_layers} if classified else {}))


def _encoder(
    prefix: str, formula: Formula, *, bare: Formula, masked: Formula, classifier: Formula, pretraining: Formula | None = None
) -> Family:
    """An encoder."""
    heads = {"Model": bare, "ForMaskedLM": masked, "ForSequenceClassification": classifier}
    return Family(prefix, formula, heads | ({"ForPreTraining": pretraining} if pretraining is not None else {}))


def _pooler(c: Facts) -> int:
    return linear(c.width, c.width, bias=True)


def _pooled_classifier(c: Facts) -> int:
    """BERT's: the pooler, then a layer."""
    return _pooler(c) + linear(c.width, c.labels, bias=True)


def _two_layers(c: Facts) -> int:
    """RoBERTa's classifier, on a body without a pooler: a layer, and the labels."""
    return linear(c.width, c.width, bias=True) + linear(c.width, c.labels, bias=True)


def _masked_lm(c: Facts, *, biases_if_untied: int = 2) -> int:
    """A layer back to the width of the embedding, a norm, and the words: the embedding again, and a bias.

    BERT's head registers the bias a second time in its output layer; only tying makes the two one. DeBERTa's newer head
    (`legacy` false) has no output layer of its own, tied or not.
    """
    width = c.size("embedding_size", default=c.width)
    transform = linear(c.width, width, bias=True) + norm(width, bias=True)
    if c.flag("tie_word_embeddings", default=True) or not c.flag("legacy", default=True):
        return transform + c.vocabulary
    return transform + linear(width, c.vocabulary) + biases_if_untied * c.vocabulary


def _masked_lm_with_one_bias(c: Facts) -> int:
    return _masked_lm(c, biases_if_untied=1)


def _bert_pretraining(c: Facts) -> int:
    """Masked words, and whether the second sentence follows the first."""
    return _pooler(c) + _masked_lm(c) + linear(c.width, 2, bias=True)


def _electra_pretraining(c: Facts) -> int:
    """For each token, whether it was replaced."""
    return linear(c.width, c.width, bias=True) + linear(c.width, 1, bias=True)


def _modernbert_transform(c: Facts) -> int:
    dense = linear(c.width, c.width, bias=c.flag("classifier_bias", default=False))
    return dense + norm(c.width, bias=c.flag("norm_bias", default=False))


def _modernbert_masked_lm(c: Facts) -> int:
    weight = 0 if c.flag("tie_word_embeddings", default=True) else linear(c.width, c.vocabulary)
    return _modernbert_transform(c) + weight + (c.vocabulary if c.flag("decoder_bias", default=True) else 0)


def _modernbert_classifier(c: Facts) -> int:
    return _modernbert_transform(c) + linear(c.width, c.labels, bias=True)


_ROBERTA = _encoder("Roberta", body.bert, bare=_pooler, masked=_masked_lm, classifier=_two_layers)

_FAMILIES: Mapping[str, Family] = {
    "bloom": _decoder("Bloom", body.bloom, tied=True),
    "codegen": _decoder("CodeGen", body.gptj, tied=False, bias=True),
    "falcon": _decoder("Falcon", body.falcon, tied=True),
    "gemma": _decoder("Gemma", body.gemma, tied=True),
    "gemma2": _decoder("Gemma2", body.gemma2, tied=True),
    "gemma3_text": _decoder("Gemma3", body.gemma3_text, tied=True),
    "glm": _decoder("Glm", body.glm, tied=False),
    "glm4": _decoder("Glm4", body.glm4, tied=False),
    "gpt2": _decoder("GPT2", body.gpt2, tied=True),
    "gpt_neo": _decoder("GPTNeo", body.gpt_neo, tied=True),
    "gpt_neox": _decoder("GPTNeoX", body.gpt_neox, tied=False),
    "gpt_oss": _decoder("GptOss", body.gpt_oss, tied=False),
    "gptj": _decoder("GPTJ", body.gptj, tied=False, bias=True),
    "granite": _decoder("Granite", body.llama, tied=False),
    "llama": _decoder("Llama", body.llama, tied=False),
    "mistral": _decoder("Mistral", body.mistral, tied=False),
    "mixtral": _decoder("Mixtral", body.mixtral, tied=False),
    "olmo": _decoder("Olmo", body.olmo, tied=False),
    "olmo2": _decoder("Olmo2", body.olmo2, tied=False),
    "opt": _decoder("OPT", body.opt, tied=True),
    "phi": _decoder("Phi", body.phi, tied=False, bias=True),
    "phi3": _decoder("Phi3", body.mistral, tied=False),
    "qwen2": _decoder("Qwen2", body.qwen2, tied=False),
    "qwen3": _decoder("Qwen3", body.qwen3, tied=False),
    "qwen3_moe": _decoder("Qwen3Moe", body.qwen3_moe, tied=False),
    "smollm3": _decoder("SmolLM3", body.llama, tied=True),
    "stablelm": _decoder("StableLm", body.stablelm, tied=False),
    "starcoder2": _decoder("Starcoder2", body.starcoder2, tied=True),
    "xglm": _decoder("XGLM", body.xglm, tied=True),
    "bart": _seq2seq("Bart", body.bart, classified=True),
    "m2m_100": _seq2seq("M2M100", body.m2m_100),
    "marian": _seq2seq("Marian", body.marian),
    "mbart": _seq2seq("MBart", body.mbart, classified=True),
    "mt5": _seq2seq("MT5", body.t5, classified=True),
    "pegasus": _seq2seq("Pegasus", body.pegasus),
    "t5": _seq2seq("T5", body.t5, classified=True),
    "albert": _encoder("Albert", body.albert, bare=_pooler, masked=_masked_lm, classifier=_pooled_classifier),
    "bert": _encoder(
        "Bert", body.bert, bare=_pooler, masked=_masked_lm, classifier=_pooled_classifier, pretraining=_bert_pretraining
    ),
    "deberta": _encoder("Deberta", body.deberta, bare=_nothing, masked=_masked_lm, classifier=_pooled_classifier),
    "deberta-v2": _encoder("DebertaV2", body.deberta_v2, bare=_nothing, masked=_masked_lm, classifier=_pooled_classifier),
    "distilbert": _encoder("DistilBert", body.distilbert, bare=_nothing, masked=_masked_lm_with_one_bias, classifier=_two_layers),
    "electra": _encoder(
        "Electra",
        body.electra,
        bare=_nothing,
        masked=_masked_lm_with_one_bias,
        classifier=_two_layers,
        pretraining=_electra_pretraining,
    ),
    "modernbert": _encoder(
        "ModernBert", body.modernbert, bare=_nothing, masked=_modernbert_masked_lm, classifier=_modernbert_classifier
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": replace(_ROBERTA, prefix="XLMRoberta"),
}
