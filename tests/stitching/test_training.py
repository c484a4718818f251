"""Training moves what the recipe names and nothing else, and an optimizer step is the same however it is sliced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from brim.errors import UsageError
from brim.stitching.model import StitchedModel
from tests.stitching.small import STITCHES, donor, from_recipe, padded, piece, recipe, some, stitched, tokens

WITH_ADAPTERS = sorted(set(STITCHES) - {"same-family"})


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def without_dropout(model: StitchedModel) -> StitchedModel:
    """In training mode, so that checkpointing is on, and still without noise (GPT-2 drops a tenth)."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    return model


def ragged(left: bool = False) -> dict[str, Tensor]:
    """Eight sequences of different length, of which only a part is learned."""
    ids, mask = padded([tokens(1, length, seed=length)[0] for length in (12, 3, 9, 7, 12, 5, 2, 10)], left=left)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-4) -> None:
    assert ours.keys() == theirs.keys()
    assert ours
    scale = max(float(one.abs().max()) for one in theirs.values())
    for name, gradient in ours.items():
        assert float((gradient - theirs[name]).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize("name", some("three-donors", of=WITH_ADAPTERS))
@pytest.mark.parametrize("trains", ["adapters", "all"])
def test_an_effective_batch_of_eight_has_one_gradient_however_it_is_sliced(name: str, trains: str) -> None:
    model = without_dropout(stitched(name, trains=(trains,)))
    batch = ragged()
    items = (batch["labels"][:, 1:] != -100).sum()
    found = []
    for size in (1, 2, 4, 8):
        for first in range(0, 8, size):
            share = {key: value[first : first + size] for key, value in batch.items()}
            model(**share, num_items_in_batch=items).loss.backward()
        found.append(gradients(model))
    for sliced in found[:-1]:
        assert_close(sliced, found[-1])


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize("name", some("gpt2-llama-mlp"))
def test_checkpointing_changes_no_gradient(name: str, reentrant: bool, attention: str) -> None:
    batch = ragged(left=True)
    for trains in (("adapters",), ("layers",), ("all",), (STITCHES[name].pieces[0].donor,)):
        if name == "same-family" and trains == ("adapters",):
            continue
        model = without_dropout(stitched(name, attention, trains=trains))
        loss = model(**batch).loss
        loss.backward()
        expected = gradients(model)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        again = model(**batch, use_cache=True).loss
        again.backward()
        torch.testing.assert_close(again, loss)
        found = gradients(model)
        assert found.keys() == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert_close(found, expected, 1e-5)


def test_frozen_layers_in_front_of_what_trains_are_not_run_backward() -> None:
    model = without_dropout(stitched("llama-qwen2-linear"))
    model.gradient_checkpointing_enable({"use_reentrant": True})
    seen: list[bool] = []
    model.adapters[0].register_forward_hook(lambda _module, given, _output: seen.append(given[0].requires_grad))
    model(**ragged()).loss.backward()
    assert seen == [False]


@pytest.mark.parametrize("name", some("three-donors", of=WITH_ADAPTERS))
def test_training_the_adapters_lowers_the_loss_and_moves_nothing_else(name: str) -> None:
    model = stitched(name).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    ids = tokens(8, 1).expand(8, 12) + torch.arange(12) % 4  # a pattern that can be learned
    losses = []
    for _step in range(25):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == {key for key in before if key.startswith("adapters.")}


def test_packed_training_has_the_gradient_of_the_sequences_alone() -> None:
    for name in ("three-donors", "gpt2-llama-mlp"):
        model = without_dropout(stitched(name))
        sequences = [tokens(1, length, seed=length)[0] for length in (6, 9, 4)]
        items = torch.tensor(sum(len(one) - 1 for one in sequences))
        for one in sequences:
            model(input_ids=one[None], labels=one[None], num_items_in_batch=items).loss.backward()
        expected = gradients(model)
        ids = torch.cat(sequences)[None]
        positions = torch.cat([torch.arange(len(one)) for one in sequences])[None]
        labels = ids.masked_fill(positions == 0, -100)
        model(input_ids=ids, labels=labels, position_ids=positions, num_items_in_batch=items).loss.backward()
        assert_close(gradients(model), expected)


def test_smoothed_labels_are_those_of_the_next_token(tmp_path: Path) -> None:
    """The Trainer knows by the name of a class whether labels are to be shifted."""
    model = from_recipe(recipe(piece("llama", 0, 1, 2), trains=("all",)))
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, report_to=[], use_cpu=True)
    batch = ragged()
    batch["labels"][:, 5] = -100
    items = (batch["labels"][:, 1:] != -100).sum()
    tuned: Any = get_peft_model(from_recipe(STITCHES["same-family"]), LoraConfig(r=2, target_modules=["q_proj"]))
    untuned = from_recipe(STITCHES["same-family"])
    for ours, theirs in ((model, donor("llama")), (tuned, untuned)):
        for count in (None, items, items * 2):
            losses = [Trainer(one, arguments).compute_loss(one, dict(batch), num_items_in_batch=count) for one in (ours, theirs)]
            torch.testing.assert_close(*losses)
    plain = model(**batch).loss
    assert abs(float(Trainer(model, arguments).compute_loss(model, dict(batch)) - plain)) < 0.5


@pytest.mark.parametrize(
    ("trains", "expected"),
    [
        (("embedding",), ("parts.0.wte.", "parts.0.wpe.")),
        (("head",), ("parts.1.lm_head.",)),
        (("norm",), ("parts.1.model.norm.",)),
        (("layers",), ("parts.0.h.", "parts.1.model.layers.")),
        (("gpt2",), ("parts.0.h.",)),
        (("llama", "adapters"), ("parts.1.model.layers.", "adapters.")),
        (("all",), ("parts.", "adapters.")),
        ((), ("nothing",)),
    ],
    ids=["embedding", "head", "norm", "layers", "gpt2", "llama+adapters", "all", "nothing"],
)
def test_only_what_is_named_trains(trains: tuple[str, ...], expected: tuple[str, ...]) -> None:
    model = stitched("gpt2-llama-mlp", trains=trains)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == name.startswith(expected), name


def test_a_name_that_is_nothing_in_the_stitch_is_refused_with_those_that_are() -> None:
    with pytest.raises(UsageError, match="Nothing in this stitch is called 'heads'") as refused:
        stitched("gpt2-llama-mlp", trains=("heads",))
    assert refused.value.hint == "What can train: adapters, embedding, norm, head, layers, all, gpt2, llama."


def test_a_tied_table_trains_if_either_of_its_names_is_given() -> None:
    for trains in ("embedding", "head"):
        model = from_recipe(recipe(piece("qwen3", 0), piece("qwen3", 1), trains=(trains,)))
        assert [name for name, one in model.named_parameters() if one.requires_grad] == ["parts.0.embed_tokens.weight"]


def test_a_stitch_by_identity_alone_has_nothing_to_train_and_says_so() -> None:
    assert stitched("same-family").trainable_parameters == 0
    assert stitched("llama-qwen2-linear").trainable_parameters == 32 * 48 + 48


def test_peft_trains_the_adapters_as_well_where_it_is_told_to() -> None:
    settings = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["adapters.0", "adapters.1"], task_type="CAUSAL_LM")
    tuned: Any = get_peft_model(stitched("three-donors"), settings)
    batch = ragged()
    tuned(**batch).loss.backward()
    learned = {name for name, parameter in tuned.named_parameters() if parameter.grad is not None}
    assert any(".adapters.0.modules_to_save." in name for name in learned)
    assert all("lora_" in name or ".modules_to_save." in name for name in learned)


@pytest.mark.parametrize("name", ["three-donors", pytest.param("back-to-the-first-head", marks=pytest.mark.slow)])
def test_peft_trains_on_top(name: str, tmp_path: Any) -> None:
    model = stitched(name)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    targets = [one for one, module in model.named_modules() if one.endswith(("q_proj", "v_proj", "c_attn"))]
    tuned: Any = get_peft_model(model, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    before = {key: value.clone() for key, value in tuned.state_dict().items()}
    optimizer = torch.optim.AdamW([one for one in tuned.parameters() if one.requires_grad], lr=1e-2)
    tuned.train()
    losses = []
    ids = tokens(4, 1).expand(4, 12) + torch.arange(12) % 4
    for _step in range(15):
        loss = tuned(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    moved = {key for key, value in tuned.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == {key for key in before if "lora_" in key}
    tuned.eval()
    merged = tuned.merge_and_unload()
    assert type(merged) is StitchedModel
    merged.save_pretrained(tmp_path)
    again = StitchedModel.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, merged.eval()(ids).logits)
