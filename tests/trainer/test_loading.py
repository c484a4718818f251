"""What trains is what was asked for: loaded whole, or said; in the dtypes, layers and adapters that the estimate counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from brim.errors import RunError, UnsupportedError, UsageError
from brim.memory.setup import Setup
from brim.memory.tracing.building import build_model
from brim.memory.tracing.quantized import QuantizedLinear
from brim.stitching.saving import save
from brim.trainer.loading import USED_CACHE, has_dropout, load_model, load_tokenizer
from brim.workload.resolve import Model, find_model
from brim.workload.settings import Settings
from tests.stitching.small import from_recipe, piece, recipe
from tests.trainer.small import VOCABULARY, llama, logged, pad, ragged, trainer_of, weights
from tests.trainer.words import TEXTS, tokenizer

WIDE = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.2}
"""Rows of at least one block of a quantised weight, and weights that have a say."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with its weights."""
    found = tmp_path_factory.mktemp("llama")
    llama(**WIDE, use_cache=True).save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    found = tmp_path_factory.mktemp("t5")
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.1
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(found)
    return found


def load(given: Path | Model | str, said: list[str] | None = None, **options: Any) -> Any:
    """As `brim train` loads it on the CPU; what is no setting goes to the loader."""
    names = ("labels", "from_scratch", "seed", "pad_token_id", "device")
    own = {name: options.pop(name) for name in names if name in options}
    model = given if isinstance(given, Model) else find_model(given)
    settings = Settings(**{"task": "causal-lm", **options})
    say = (lambda sentence: None) if said is None else said.append
    return load_model(model, settings, **{"device": "cpu", **own}, say=say)


def trained_names(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


# Where a model comes from.


def test_a_folder_is_loaded_bit_for_bit_and_says_nothing(folder: Path) -> None:
    said: list[str] = []
    found = load(folder, said)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(weights(found), weights(plain))
    assert found.training
    assert not said
    assert (found.config.use_cache, getattr(found, USED_CACHE)) == (False, True)


def test_a_config_without_weights_names_from_scratch(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    for given in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(UsageError, match="config.json and no weights") as caught:
            load(given)
        assert "--from-scratch" in (caught.value.hint or "")


def test_fresh_weights_are_drawn_by_the_seed_alone(folder: Path) -> None:
    first = load(folder / "config.json", from_scratch=True, seed=1)
    torch.rand(5)
    assert torch.equal(weights(first), weights(load(folder, from_scratch=True, seed=1)))
    assert not torch.equal(weights(first), weights(load(folder, from_scratch=True, seed=2)))


def test_shards_that_are_not_there_are_named(tmp_path: Path) -> None:
    llama(**WIDE).save_pretrained(tmp_path, max_shard_size="60KB")
    parts = sorted(tmp_path.glob("model-*.safetensors"))
    parts[0].unlink()
    with pytest.raises(UsageError, match=f"not complete: {parts[0].name} is missing"):
        load(tmp_path)


def test_weights_that_are_missing_or_cut_off_are_an_error(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunError, match=r"1 are missing or of another shape, model\.layers\.1\.mlp\.up_proj\.weight among them"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(RunError, match="cannot be loaded"):
        load(tmp_path)


def test_weights_of_another_shape_are_an_error(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(RunError, match="cannot be loaded|another shape"):
        load(tmp_path)


def test_a_catalogue_model_that_is_not_here_is_told_before_anything_is_read() -> None:
    with pytest.raises(RunError, match="it is not on this disk") as caught:
        load("qwen2.5-0.5b")
    assert "hf download Qwen/Qwen2.5-0.5B" in (caught.value.hint or "")


def test_a_hub_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    for name in ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "is_offline_mode", lambda: False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RunError, match=r"not on this disk, and http://127\.0\.0\.1:9 does not answer"):
        load("qwen2.5-0.5b")
    with pytest.raises(UsageError, match="does not answer"):
        load_tokenizer("somebody/a-tokenizer-that-is-not-here")


def test_a_model_in_the_hubs_cache_is_loaded_without_the_hub(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as constants

    snapshot = tmp_path / "models--us--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_bytes((folder / name).read_bytes())
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path))
    found = Model(
        given="us/tiny", origin="hub", name="us/tiny", config=json.loads((snapshot / "config.json").read_text()),
        class_name="LlamaForCausalLM", folder=snapshot, has_weights=True,
    )  # fmt: skip
    monkeypatch.setattr("brim.trainer.weights.why_no_hub", lambda name: pytest.fail("the Hub was asked"))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    loaded = load(found, method="lora")
    assert loaded.peft_config["default"].base_model_name_or_path == "us/tiny"


def build_it() -> nn.Module:
    """For `module:function`."""
    return llama()


def test_a_function_builds_its_own_model_and_is_not_changed() -> None:
    given = find_model("tests.trainer.test_loading:build_it")
    assert torch.equal(weights(load(given)), weights(llama()))
    for settings in (
        {"method": "lora"},
        {"freeze": ("embed",)},
        {"checkpointing": "full"},
        {"loss": "chunked"},
        {"precision": "bf16"},
    ):
        with pytest.raises(UsageError, match="property of the module|its own"):
            load(given, **settings)
    with pytest.raises(UsageError, match="eager was asked for"):
        load(given, attention="eager")


# Precision.


@pytest.mark.parametrize(
    ("settings", "base", "trained"),
    [
        ({"precision": "fp32"}, torch.float32, torch.float32),
        ({"precision": "bf16"}, torch.bfloat16, torch.bfloat16),
        ({"precision": "amp-bf16"}, torch.float32, torch.float32),
        ({"precision": "amp-bf16", "method": "lora"}, torch.bfloat16, torch.float32),
        ({"precision": "amp-bf16", "method": "lora", "base_dtype": "float32"}, torch.float32, torch.float32),
        ({"precision": "bf16", "method": "lora", "lora_dtype": "bfloat16"}, torch.bfloat16, torch.bfloat16),
    ],
    ids=["fp32", "bf16", "amp", "amp-lora", "amp-lora-float32-base", "bf16-adapters"],
)
def test_weights_are_held_as_the_estimate_counts_them(folder: Path, settings: Any, base: Any, trained: Any) -> None:
    said: list[str] = []
    found = load(folder, said, **settings)
    counted = build_model(
        Setup(config=json.loads((folder / "config.json").read_text()), task="causal-lm", micro_batch=1, length=8, **settings)
    )
    assert {name: (one.dtype, one.requires_grad) for name, one in found.named_parameters()} == {
        name: (one.dtype, one.requires_grad) for name, one in counted.named_parameters()
    }
    assert found.get_input_embeddings().weight.dtype == base
    assert {one.dtype for one in found.parameters() if one.requires_grad} == {trained}
    assert any("small steps are lost" in sentence for sentence in said) == (trained == torch.bfloat16)


@pytest.mark.parametrize(("device", "instead"), [("cpu", "fp32 or amp-bf16"), ("cuda", "amp-fp16")])
def test_half_precision_without_a_scaler_is_refused_with_what_the_device_can_do(folder: Path, device: str, instead: str) -> None:
    with pytest.raises(UnsupportedError, match="no scaler") as caught:
        load(folder, precision="fp16", device=device)
    assert instead in (caught.value.hint or "")


def test_half_precision_that_could_not_train_is_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="trains in float32 all the same"):
        load(folder, precision="amp-fp16")
    with pytest.raises(UnsupportedError, match="CUDA"):
        load(folder, precision="bf16", attention="flash2")


# Methods.


@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=pytest.mark.slow), "lora-8bit", "qlora"])
def test_every_method_learns_through_the_trainer(folder: Path, tmp_path: Path, method: str) -> None:
    model = load(
        folder,
        method=method,
        precision="fp32" if method == "full" else "amp-bf16",
        checkpointing="full",
        lora_rank=None if method == "full" else 4,
    )
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    rows = ragged(8)
    trainer = trainer_of(tmp_path, rows, model=model, num_train_epochs=3, learning_rate=1e-2, bf16=method != "full")
    trainer.train()
    losses = logged(trainer)
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    moved = {name for name, one in model.named_parameters() if not torch.equal(before[name], one)}
    assert moved == trained_names(model)
    assert all("lora_" in name for name in moved) == (method != "full")


@pytest.mark.parametrize("method", ["qlora", pytest.param("lora-8bit", marks=pytest.mark.slow)])
def test_an_evaluation_does_not_end_what_quantised_layers_learn(folder: Path, tmp_path: Path, method: str) -> None:
    """Without checkpointing, where the first layers' input needs no gradient: bitsandbytes would pack their weights for inference."""
    rows, runs = ragged(16), []
    for name, evaluates in (("quiet", {}), ("evaluated", {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True})):
        model = load(folder, method=method, precision="fp32", lora_rank=4)
        trainer = trainer_of(tmp_path / name, rows, model=model, num_train_epochs=2, eval_dataset=ragged(4, 9), **evaluates)
        trainer.evaluate()
        trainer.train()
        runs.append(logged(trainer) + logged(trainer, "grad_norm"))
    assert runs[0] == runs[1]
    assert min(runs[0]) > 0
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model(**pad(rows[:2])).loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in trained)


@pytest.mark.parametrize("method", ["qlora", pytest.param("lora-8bit", marks=pytest.mark.slow)])
def test_the_layers_that_are_quantised_are_those_of_the_estimate(folder: Path, t5: Path, method: Any) -> None:
    from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt

    cases: tuple[tuple[Path, Any, tuple[str, ...]], ...] = (
        (folder, "causal-lm", ()),
        (t5, "seq2seq", ()),
        (folder, "classification", ("a", "b", "c")),
    )
    for path, task, labels in cases:
        config = json.loads((path / "config.json").read_text())
        counted = build_model(
            Setup(config=config, task=task, micro_batch=1, length=8, method=method, num_labels=len(labels) or 2)
        )
        found = load(path, task=task, method=method, labels=labels)
        expected = {name for name, module in counted.named_modules() if isinstance(module, QuantizedLinear)}
        assert {name for name, module in found.named_modules() if isinstance(module, Linear4bit | Linear8bitLt)} == expected
        assert trained_names(found) == trained_names(counted)
        assert {one.dtype for one in found.parameters() if one.requires_grad} == {torch.float32}


def test_adapters_stand_where_peft_puts_them_with_an_alpha_of_twice_the_rank(folder: Path) -> None:
    usual = load(folder, method="lora").peft_config["default"]
    assert (usual.r, usual.lora_alpha, usual.lora_dropout, set(usual.target_modules)) == (8, 16, 0.0, {"q_proj", "v_proj"})
    everywhere = load(folder, method="lora", lora_targets=("all-linear",), lora_rank=2).peft_config["default"]
    assert (everywhere.r, everywhere.lora_alpha) == (2, 4)
    given = load(folder, method="lora", lora_alpha=24, lora_dropout=0.1)
    assert (given.peft_config["default"].lora_alpha, given.peft_config["default"].lora_dropout) == (24, 0.1)
    assert has_dropout(given)
    assert {"gate_proj", "o_proj"} < {name.rpartition(".")[2] for name in everywhere.target_modules}
    same = [load(folder, method="lora", seed=5) for _time in range(2)]
    assert torch.equal(weights(same[0]), weights(same[1]))


def test_what_lora_cannot_mean_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="random and saved nowhere"):
        load(folder, method="lora", from_scratch=True)
    with pytest.raises(UnsupportedError, match="target_modules|Target modules|not found"):
        load(folder, method="lora", lora_targets=("nothing_of_that_name",))


def test_weights_that_are_quantised_already_train_by_their_own_method(folder: Path, tmp_path: Path) -> None:
    quantization: Any = transformers.BitsAndBytesConfig
    stored = quantization(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=stored).save_pretrained(tmp_path)
    assert load(tmp_path, method="qlora").get_base_model().model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
    with pytest.raises(UnsupportedError, match="stored quantised"):
        load(tmp_path)


# Tasks.


def test_a_classifier_has_its_classes_by_name_and_a_head_that_is_told(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    model = load(folder, said, task="classification", labels=("bad", "fair", "good"), pad_token_id=3)
    assert said == [
        "New weights, drawn by the seed: score.weight.",
        "Weights in the file that this model does not have, and that are not used: lm_head.weight.",
    ]
    assert model.config.id2label == {0: "bad", 1: "fair", 2: "good"}
    assert model.config.label2id == {"bad": 0, "fair": 1, "good": 2}
    assert model.config.pad_token_id == 3
    model.save_pretrained(tmp_path)
    again = load(tmp_path, task="classification", labels=("bad", "fair", "good"))
    assert torch.equal(weights(model), weights(again))
    said.clear()
    assert load(tmp_path, said, task="classification", labels=("no", "yes")).score.weight.shape[0] == 2
    assert said[1:] == ["New weights, drawn by the seed: score.weight."]
    assert load(tmp_path, task="classification", from_scratch=True, labels=list("abcd")).config.id2label[3] == "d"


def test_a_head_for_other_classes_of_the_same_number_is_drawn_anew(folder: Path, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder, id2label={0: "good", 1: "bad"}, label2id={"good": 0, "bad": 1})
    trained = transformers.LlamaForSequenceClassification(config)  # type: ignore[no-untyped-call]
    torch.nn.init.ones_(trained.score.weight)
    trained.save_pretrained(tmp_path)
    said: list[str] = []
    kept = load(tmp_path, said, task="classification", labels=("good", "bad"))
    assert not said
    assert bool((kept.score.weight == 1).all())
    for labels in (("bad", "good"), ("no", "yes")):
        said.clear()
        drawn, again = (load(tmp_path, said, task="classification", labels=labels) for _time in range(2))
        assert not bool((drawn.score.weight == 1).any())
        assert torch.equal(drawn.score.weight, again.score.weight)
        assert said[:2] == [
            f"The model's head is for the classes good, bad, and the data's are {', '.join(labels)}: it is drawn anew.",
            "New weights, drawn by the seed: score.weight.",
        ]
        assert torch.equal(drawn.model.embed_tokens.weight, kept.model.embed_tokens.weight)


def test_an_encoder_that_never_had_a_pooler_is_told(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    said: list[str] = []
    load(tmp_path, said, task="classification", labels=("a", "b"))
    assert said[0].startswith("New weights, drawn by the seed: bert.pooler.dense.bias, bert.pooler.dense.weight, classifier.bias")
    with pytest.raises(UnsupportedError, match="no model of the type bert for the task seq2seq"):
        load(tmp_path, task="seq2seq")


@pytest.mark.parametrize(("word", "frozen"), [("encoder", "encoder.block"), ("embedding", "shared")])
def test_freeze_means_the_same_as_in_the_estimate(t5: Path, word: str, frozen: str) -> None:
    model = load(t5, task="seq2seq", freeze=(word,))
    named = dict(model.named_parameters())
    assert not any(one.requires_grad for name, one in named.items() if name.startswith(frozen))
    assert any(one.requires_grad for name, one in named.items() if name.startswith("decoder.block"))
    counted = build_model(
        Setup(config=json.loads((t5 / "config.json").read_text()), task="seq2seq", micro_batch=1, length=8, freeze=(word,))
    )
    assert trained_names(model) == trained_names(counted)


def test_nothing_to_train_is_an_error(folder: Path) -> None:
    with pytest.raises(UsageError, match="Nothing trains"):
        load(folder, freeze=(".",))


def test_a_stitched_model_trains_what_its_recipe_says(tmp_path: Path) -> None:
    stitch = from_recipe(recipe(piece("llama", 0, 1), piece("qwen2", 1, by="linear"), trains=("adapters", "norm")))
    path = save(stitch, tmp_path / "stitch")
    model = load(path)
    assert type(model).__name__ == "StitchedModel"
    assert trained_names(model) == trained_names(stitch)
    said: list[str] = []
    load(path, said, precision="bf16", freeze=("norm",))
    assert len(said) == 1
    assert said[0].startswith("What trains is held in bfloat16")
    with pytest.raises(UnsupportedError, match="recipe"):
        load(path, method="lora")
    with pytest.raises(UnsupportedError, match="--loss chunked"):
        load(path, loss="chunked")


# The chunked loss.


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_chunked_loss_has_the_gradient_of_the_standard_one(folder: Path, method: str) -> None:
    rows = pad([{"input_ids": row["input_ids"] * 9, "labels": row["labels"] * 9} for row in ragged(6)])
    assert (rows["labels"] != -100).sum() > 2 * 256
    models = [load(folder, method=method, loss=loss) for loss in ("standard", "chunked")]
    losses = []
    for model in models:
        for count in (None, torch.tensor(500)):
            loss = model(**rows, **({} if count is None else {"num_items_in_batch": count})).loss
            losses.append(float(loss.detach()))
            loss.backward()
    assert losses[2:] == pytest.approx(losses[:2], rel=1e-6)
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if one.requires_grad:
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-7, msg=name)
    with torch.no_grad():
        assert models[1](input_ids=rows["input_ids"]).logits.shape[-1] == VOCABULARY


def test_the_chunked_loss_trains_and_evaluates_as_the_standard_one(folder: Path, tmp_path: Path) -> None:
    curves = []
    for loss in ("standard", "chunked"):
        model = load(folder, loss=loss, checkpointing="full")
        trainer = trainer_of(
            tmp_path / loss, ragged(16), model=model, num_train_epochs=2, eval_dataset=ragged(4, 9), eval_strategy="epoch",
            prediction_loss_only=True,
        )  # fmt: skip
        trainer.train()
        curves.append([*logged(trainer), *logged(trainer, "eval_loss")])
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


def test_a_model_that_scales_its_logits_is_refused_a_chunked_loss(tmp_path: Path) -> None:
    config = transformers.GraniteConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, logits_scaling=4.0
    )
    transformers.GraniteForCausalLM(config).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    with pytest.raises(UnsupportedError, match="not the loss of this model"):
        load(tmp_path, loss="chunked")


# Dropout and tokenizers.


def test_dropout_is_found_wherever_it_is(folder: Path, t5: Path) -> None:
    assert not has_dropout(load(folder))
    assert not has_dropout(load(folder, method="lora"))
    assert has_dropout(load(t5, task="seq2seq"))
    assert has_dropout(llama(attention_dropout=0.1))
    assert has_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    assert not has_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))
    assert has_dropout(nn.MultiheadAttention(4, 2, dropout=0.1))


def test_a_tokenizer_is_found_in_a_folder_or_a_file(tmp_path: Path) -> None:
    words = tokenizer()
    words.save_pretrained(tmp_path)
    for place in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_tokenizer(str(place))(TEXTS[0])["input_ids"] == words(TEXTS[0])["input_ids"]
    (tmp_path / "empty").mkdir()
    for name in (str(tmp_path / "empty"), "no-such-tokenizer", "qwen2.5-0.5b"):
        with pytest.raises(UsageError, match="cannot be loaded") as caught:
            load_tokenizer(name)
        assert "--tokenizer" in (caught.value.hint or "")
