"""The closed formulas count what transformers builds, to the digit."""

from __future__ import annotations

import logging
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings, strategies as st

import brim.workload.parameters as module
from brim.errors import UsageError
from brim.workload.parameters import count_parameters, supported_model_types
from brim.workload.resolve import find_model

if TYPE_CHECKING:
    from collections.abc import Iterator

Config = dict[str, Any]

CATALOGUE = Path(module.__file__).parent / "catalogue"


def catalogue() -> Iterator[Any]:
    for file in sorted(CATALOGUE.glob("*.toml")):
        for model in tomllib.loads(file.read_text(encoding="utf-8"))["model"]:
            yield pytest.param(model, id=model["name"])


def build(config: Config, class_name: str) -> Any:
    """The class as transformers builds it, without memory."""
    with torch.device("meta"):
        model = getattr(transformers, class_name)(transformers.AutoConfig.for_model(**config))
    model.tie_weights()
    return model


def built_count(config: Config, class_name: str) -> int:
    """Every parameter, tied ones once.

    T5 is built with its output tied whatever the config says. Where the config says otherwise, the output layer of the
    checkpoint comes beside it on loading; `test_a_t5_checkpoint_with_an_output_of_its_own_is_loaded_untied` shows it.
    """
    model = build(config, class_name)
    count: int = sum(parameter.numel() for parameter in model.parameters())
    unties_on_loading = config["model_type"] in {"t5", "mt5"} and config.get("tie_word_embeddings") is False
    if unties_on_loading and hasattr(model, "lm_head"):
        count += model.lm_head.weight.numel()
    return count


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Configs this small have token ids beyond their vocabulary, and transformers says so each time."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)
    yield
    transformers.logging.set_verbosity(before)


@pytest.mark.parametrize("model", list(catalogue()))
def test_formula_catalogue_and_module_agree_on(model: Config) -> None:
    config, class_name = model["config"], model["class"]
    assert count_parameters(config, class_name) == model["parameters"]
    module = find_model(model["name"]).build("meta")
    assert sum(parameter.numel() for parameter in module.parameters()) == model["parameters"]
    assert all(parameter.is_meta for parameter in module.parameters())


def test_every_model_type_of_the_catalogue_has_a_formula() -> None:
    types = {parameter.values[0]["config"]["model_type"] for parameter in catalogue()}
    assert types <= supported_model_types()


SMALL: Config = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 50,
    "pad_token_id": 0,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
GPT: Config = {"vocab_size": 101, "n_embd": 48, "n_head": 4, "n_layer": 3, "n_positions": 50, "rotary_dim": 4}
BART: Config = {
    "vocab_size": 101,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 96,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "max_position_embeddings": 50,
    "pad_token_id": 0,
}
T5: Config = {
    "vocab_size": 101,
    "d_model": 48,
    "d_kv": 10,
    "d_ff": 80,
    "num_heads": 3,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "relative_attention_num_buckets": 9,
}
RELATIVE: Config = {"relative_attention": True, "position_biased_input": False, "type_vocab_size": 0}

# model type, class, what is small, and what is odd about it
VARIANTS: list[tuple[str, str, Config, Config]] = [
    ("llama", "LlamaForCausalLM", GROUPED, {"attention_bias": True, "mlp_bias": True}),
    ("llama", "LlamaForCausalLM", SMALL, {"tie_word_embeddings": True}),
    ("llama", "LlamaModel", GROUPED, {"head_dim": 20}),
    ("mistral", "MistralForCausalLM", GROUPED, {"head_dim": 20, "attention_bias": True}),
    ("mixtral", "MixtralForCausalLM", GROUPED, {"num_local_experts": 3}),
    ("qwen2", "Qwen2ForCausalLM", GROUPED, {"tie_word_embeddings": True, "attention_bias": True}),
    ("qwen3", "Qwen3ForCausalLM", GROUPED, {}),
    ("qwen3", "Qwen3ForCausalLM", GROUPED, {"head_dim": 20, "attention_bias": True}),
    (
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        GROUPED,
        {"num_experts": 3, "moe_intermediate_size": 24, "decoder_sparse_step": 2},
    ),
    (
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        GROUPED,
        {"num_experts": 3, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    ),
    ("gpt_oss", "GptOssForCausalLM", GROUPED, {"num_local_experts": 3}),
    ("gemma", "GemmaForCausalLM", GROUPED, {"head_dim": 20}),
    ("gemma2", "Gemma2ForCausalLM", GROUPED, {"head_dim": 20, "attention_bias": True}),
    ("gemma3_text", "Gemma3ForCausalLM", GROUPED, {"head_dim": 20, "tie_word_embeddings": False}),
    ("phi", "PhiForCausalLM", GROUPED, {"tie_word_embeddings": True}),
    ("phi", "PhiForCausalLM", SMALL, {"qk_layernorm": True}),
    ("phi3", "Phi3ForCausalLM", GROUPED, {"tie_word_embeddings": True}),
    ("stablelm", "StableLmForCausalLM", GROUPED, {"use_qkv_bias": True, "use_parallel_residual": True}),
    ("stablelm", "StableLmForCausalLM", GROUPED, {"qk_layernorm": True}),
    ("smollm3", "SmolLM3ForCausalLM", GROUPED, {"attention_bias": True, "mlp_bias": True}),
    ("granite", "GraniteForCausalLM", GROUPED, {"attention_bias": True, "mlp_bias": True}),
    ("glm", "GlmForCausalLM", GROUPED, {}),
    ("glm4", "Glm4ForCausalLM", GROUPED, {"head_dim": 20, "attention_bias": False}),
    ("olmo", "OlmoForCausalLM", GROUPED, {"attention_bias": True}),
    ("olmo2", "Olmo2ForCausalLM", GROUPED, {"attention_bias": True}),
    ("starcoder2", "Starcoder2ForCausalLM", GROUPED, {"use_bias": False, "tie_word_embeddings": False}),
    ("gpt2", "GPT2LMHeadModel", GPT, {"n_inner": 80}),
    ("gpt2", "GPT2LMHeadModel", GPT, {"tie_word_embeddings": False}),
    ("gptj", "GPTJForCausalLM", GPT, {"tie_word_embeddings": True}),
    ("codegen", "CodeGenForCausalLM", GPT, {"n_inner": 80}),
    (
        "gpt_neo",
        "GPTNeoForCausalLM",
        {"vocab_size": 101, "hidden_size": 48, "num_heads": 4, "num_layers": 2, "max_position_embeddings": 50},
        {"attention_types": [[["global", "local"], 1]], "intermediate_size": 80},
    ),
    ("gpt_neox", "GPTNeoXForCausalLM", SMALL, {"attention_bias": False, "tie_word_embeddings": True}),
    ("opt", "OPTForCausalLM", SMALL | {"ffn_dim": 80}, {"word_embed_proj_dim": 24, "do_layer_norm_before": False}),
    ("opt", "OPTForCausalLM", SMALL | {"ffn_dim": 80}, {"word_embed_proj_dim": 48, "enable_bias": False}),
    ("bloom", "BloomForCausalLM", {"vocab_size": 101, "hidden_size": 48, "n_layer": 3, "n_head": 4}, {}),
    ("falcon", "FalconForCausalLM", SMALL, {"multi_query": True, "ffn_hidden_size": 80}),
    ("falcon", "FalconForCausalLM", SMALL, {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True}),
    ("falcon", "FalconForCausalLM", SMALL, {"new_decoder_architecture": True, "num_kv_heads": 2}),
    (
        "falcon",
        "FalconForCausalLM",
        SMALL,
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    (
        "xglm",
        "XGLMForCausalLM",
        {"vocab_size": 101, "d_model": 48, "ffn_dim": 80, "num_layers": 3, "attention_heads": 4},
        {"tie_word_embeddings": False},
    ),
    ("bart", "BartForConditionalGeneration", BART, {}),
    ("bart", "BartForConditionalGeneration", BART, {"tie_word_embeddings": False}),
    ("mbart", "MBartForConditionalGeneration", BART, {}),
    ("pegasus", "PegasusForConditionalGeneration", BART, {}),
    ("marian", "MarianMTModel", BART, {"decoder_start_token_id": 0}),
    ("m2m_100", "M2M100Model", BART, {}),
    ("t5", "T5ForConditionalGeneration", T5, {"feed_forward_proj": "relu"}),
    ("t5", "T5ForConditionalGeneration", T5, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    ("mt5", "MT5Model", T5, {}),
    ("bert", "BertForMaskedLM", SMALL, {"type_vocab_size": 3, "tie_word_embeddings": False}),
    ("bert", "BertForPreTraining", SMALL, {}),
    ("bert", "BertModel", SMALL, {}),
    ("roberta", "RobertaForMaskedLM", SMALL, {"type_vocab_size": 1, "tie_word_embeddings": False}),
    ("xlm-roberta", "XLMRobertaModel", SMALL, {"type_vocab_size": 1}),
    (
        "distilbert",
        "DistilBertForMaskedLM",
        {"vocab_size": 101, "dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 50},
        {"tie_word_embeddings": False},
    ),
    ("albert", "AlbertForMaskedLM", SMALL, {"embedding_size": 16, "num_hidden_groups": 3, "inner_group_num": 2}),
    ("albert", "AlbertModel", SMALL, {"embedding_size": 16}),
    ("electra", "ElectraForMaskedLM", SMALL, {"embedding_size": 16, "tie_word_embeddings": False}),
    ("electra", "ElectraForPreTraining", SMALL, {"embedding_size": 48}),
    ("deberta", "DebertaForMaskedLM", SMALL, RELATIVE | {"pos_att_type": "c2p|p2c", "max_relative_positions": 9}),
    ("deberta", "DebertaModel", SMALL, {"relative_attention": False, "type_vocab_size": 2}),
    (
        "deberta-v2",
        "DebertaV2ForMaskedLM",
        SMALL,
        RELATIVE | {"pos_att_type": ["c2p", "p2c"], "position_buckets": 8, "norm_rel_ebd": "layer_norm"},
    ),
    (
        "deberta-v2",
        "DebertaV2ForMaskedLM",
        SMALL,
        RELATIVE | {"pos_att_type": ["p2c"], "share_att_key": True, "conv_kernel_size": 3, "legacy": False},
    ),
    ("modernbert", "ModernBertForMaskedLM", SMALL, {"decoder_bias": False, "norm_bias": True, "classifier_bias": True}),
    ("modernbert", "ModernBertModel", SMALL, {"attention_bias": True, "mlp_bias": True}),
]


@pytest.mark.parametrize(
    ("config", "class_name"),
    [
        pytest.param({"model_type": model_type} | small | odd, class_name, id=f"{class_name}-{','.join(odd) or 'plain'}")
        for model_type, class_name, small, odd in VARIANTS
    ],
)
def test_an_odd_relative_is_counted_as_it_is_built(config: Config, class_name: str) -> None:
    assert count_parameters(config, class_name) == built_count(config, class_name)


CLASSIFIERS: list[tuple[str, str, Config]] = [
    ("llama", "LlamaForSequenceClassification", GROUPED),
    ("qwen2", "Qwen2ForSequenceClassification", GROUPED),
    ("gemma2", "Gemma2ForSequenceClassification", GROUPED),
    ("gpt2", "GPT2ForSequenceClassification", GPT | {"pad_token_id": 0}),
    ("opt", "OPTForSequenceClassification", SMALL | {"ffn_dim": 80, "word_embed_proj_dim": 24}),
    ("phi", "PhiForSequenceClassification", SMALL),
    ("bert", "BertForSequenceClassification", SMALL),
    ("roberta", "RobertaForSequenceClassification", SMALL | {"type_vocab_size": 1}),
    ("distilbert", "DistilBertForSequenceClassification", {"dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 4}),
    ("albert", "AlbertForSequenceClassification", SMALL | {"embedding_size": 16}),
    ("electra", "ElectraForSequenceClassification", SMALL | {"embedding_size": 16}),
    ("deberta-v2", "DebertaV2ForSequenceClassification", SMALL | {"type_vocab_size": 0}),
    ("modernbert", "ModernBertForSequenceClassification", SMALL),
    ("bart", "BartForSequenceClassification", BART),
    ("t5", "T5ForSequenceClassification", T5),
]


@pytest.mark.parametrize("labels", [{}, {"num_labels": 1}, {"num_labels": 7}, {"id2label": {0: "a", 1: "b", 2: "c"}}])
@pytest.mark.parametrize(("model_type", "class_name", "small"), CLASSIFIERS)
def test_a_classifier_is_counted_with_its_labels(model_type: str, class_name: str, small: Config, labels: Config) -> None:
    config = {"model_type": model_type, "vocab_size": 101, "max_position_embeddings": 50} | small | labels
    assert count_parameters(config, class_name) == built_count(config, class_name)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from([("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3")]),
    groups=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([2, 6, 8]),
    sizes=st.fixed_dictionaries(
        {
            "hidden_size": st.sampled_from([36, 72]),
            "intermediate_size": st.integers(1, 99),
            "vocab_size": st.integers(3, 999),
            "num_hidden_layers": st.integers(1, 5),
            "tie_word_embeddings": st.booleans(),
        }
    ),
)
def test_any_rotary_decoder_is_counted_as_it_is_built(
    family: tuple[str, str], groups: int, kv_heads: int, head_dim: int, sizes: Config
) -> None:
    model_type, prefix = family
    heads = {"num_attention_heads": groups * kv_heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    config = {"model_type": model_type, "pad_token_id": 0, **sizes, **heads}
    assert count_parameters(config, f"{prefix}ForCausalLM") == built_count(config, f"{prefix}ForCausalLM")


@pytest.mark.parametrize(("model_type", "prefix"), [("t5", "T5"), ("mt5", "MT5")])
def test_a_t5_checkpoint_with_an_output_of_its_own_is_loaded_untied(model_type: str, prefix: str, tmp_path: Path) -> None:
    config: Config = {"model_type": model_type, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False} | T5
    class_ = getattr(transformers, f"{prefix}ForConditionalGeneration")
    model = class_(transformers.AutoConfig.for_model(**config))
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.all_tied_weights_keys.pop("lm_head.weight")  # else saving would drop it as a copy of the embedding
    model.save_pretrained(tmp_path)

    loaded = class_.from_pretrained(tmp_path)

    assert loaded.num_parameters() == count_parameters(config, class_.__name__)


def test_an_unknown_model_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'mamba' model; known types are albert, bart"):
        count_parameters({"model_type": "mamba"}, "MambaForCausalLM")


@pytest.mark.parametrize("class_name", ["T5EncoderModel", "T5ForTokenClassification", "T5"])
def test_a_class_without_a_formula_is_refused_by_name(class_name: str) -> None:
    with pytest.raises(UsageError, match=class_name):
        count_parameters({"model_type": "t5"} | T5, class_name)


def test_a_missing_fact_is_named() -> None:
    with pytest.raises(UsageError, match=r"'llama' model needs 'intermediate_size'"):
        count_parameters({"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "num_attention_heads": 1}, "LlamaModel")


def test_a_fact_of_the_wrong_kind_is_named() -> None:
    with pytest.raises(UsageError, match=r"hidden_size should be a whole number, and is '4096'"):
        count_parameters({"model_type": "llama"} | SMALL | {"hidden_size": "4096"}, "LlamaModel")


def test_counting_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, brim.workload.parameters; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("config", "class_name"),
    [
        ({"model_type": "llama"}, "NoSuchForCausalLM"),
        ({"model_type": "llama"}, "Qwen2ForCausalLM"),
        ({"model_type": "bart"}, "BartForCausalLM"),
        ({"model_type": "gpt2"}, "GPT2DoubleHeadsModel"),
        ({"model_type": "bert", "add_cross_attention": True}, "BertModel"),
        ({"model_type": "llama", "tie_word_embeddings": "false"}, "LlamaForCausalLM"),
        ({"model_type": "mistral"}, "MistralForCausalLM"),  # without num_key_value_heads, which transformers then sets itself
    ],
)
def test_what_no_formula_knows_is_refused_and_never_guessed(config: Config, class_name: str) -> None:
    with pytest.raises(UsageError):
        count_parameters({**SMALL, **config}, class_name)
