"""A config that does not fit, or wastes the card, is found with the cut that fits; what cannot be predicted is noted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from brim.audit.found import Found
from tests.audit.config.parts import ACCELERATE, ARGUMENTS, AXOLOTL, DEEPSPEED, LLAMA_FACTORY, TRL, examined, mended, rules

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 4000, "num_hidden_layers": 4, "intermediate_size": 256,
}  # fmt: skip


@pytest.fixture
def llama(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    return str(folder)


def predicted(text: str, notes: list[str] | None = None, *, gpu: str = "1GiB", gpus: int | None = None) -> list[Found]:
    return examined(text, gpu=gpu, gpus=gpus, predict=True, notes=notes)


def config(model: str, micro: int, accumulation: int) -> str:
    text = LLAMA_FACTORY.replace("gpt2", model) + "disable_gradient_checkpointing: true\n"
    return text.replace("batch_size: 4", f"batch_size: {micro}").replace("steps: 8", f"steps: {accumulation}")


def test_too_large_a_micro_batch_is_found_with_the_largest_that_fits(llama: str) -> None:
    text = config(llama, 64, 1)
    [found] = predicted(text)
    assert (found.rule, found.line, found.confidence) == ("config-over-memory", 2, "medium")
    assert not found.in_force, "an out-of-memory is nothing that is in force"
    best = int(found.edits[0].text)
    assert 1 <= best < 64
    assert f"at the same effective batch of 64 is {best}, with accumulation {64 // best}" in found.message
    assert "config-over-memory" not in rules(predicted(mended(text, found)))


def test_a_card_that_is_mostly_idle_is_found_and_one_that_cannot_be_filled_is_not(llama: str) -> None:
    text = config(llama, 1, 4)
    [found] = predicted(text, gpu="8GiB")
    assert found.rule == "config-under-used"
    assert "is 4, with accumulation 1" in found.message
    assert predicted(mended(text, found), gpu="8GiB") == []


def test_the_memory_of_other_formats_is_predicted_too(llama: str) -> None:
    text = AXOLOTL.replace("gpt2", llama).replace("micro_batch_size: 2", "micro_batch_size: 512")
    assert rules(predicted(text)) == ["config-over-memory"]


def test_the_dropout_of_adapters_counts_and_trl_has_some_by_default(llama: str) -> None:
    text = TRL.replace("gpt2", llama).replace("use_peft: false", "use_peft: true").replace("batch_size: 4", "batch_size: 512")
    text += "gradient_checkpointing: false\n"
    messages = [predicted(text + line)[0].message for line in ("", "lora_dropout: 0.05\n", "lora_dropout: 0\n")]
    assert messages[0] == messages[1] != messages[2]


def test_processes_share_the_effective_batch(llama: str) -> None:
    [found] = predicted(config(llama, 64, 1), gpu="2GiB", gpus=2)
    assert "at the same effective batch of 128" in found.message


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (LLAMA_FACTORY.replace("gpt2", "nobody/knows-this"), "neither in the catalogue nor in a folder here"),
        (LLAMA_FACTORY + "optim: galore_adamw\n", "no memory figures for the optimizer galore_adamw"),
        (LLAMA_FACTORY.replace("finetuning_type: full", "finetuning_type: freeze"), "no memory figures for freeze"),
        (LLAMA_FACTORY.replace("stage: sft", "stage: dpo"), "supervised training only"),
        (TRL + "num_generations: 4\n", "supervised training only"),
        (LLAMA_FACTORY.replace("cutoff_len: 512", "cutoff_len: many"), "how long the sequences are"),
        (LLAMA_FACTORY.replace("model_name_or_path: gpt2", "model_name_or_path:"), "names no model"),
        (AXOLOTL + "attn_implementation: flex_attention\n", "no memory figures for flex attention"),
    ],
)
def test_what_cannot_be_predicted_is_noted(text: str, why: str) -> None:
    notes: list[str] = []
    assert predicted(text, notes) == []
    [note] = notes
    assert why in note


def test_a_model_may_be_named_from_outside(llama: str) -> None:
    text = config("nobody/knows-this", 64, 1)
    assert rules(examined(text, gpu="1GiB", predict=True, model=llama)) == ["config-over-memory"]


def test_a_fit_gives_a_number(llama: str) -> None:
    notes: list[str] = []
    assert predicted(config(llama, 4, 1), notes) == []
    [note] = notes
    assert re.search(
        r"a\.yaml: it fits\. .* is predicted to need [0-9.]+ [MG]iB, which is [0-9]+% of the [0-9.]+ [MG]iB of", note
    )


@pytest.mark.parametrize("key", ["max_length", "max_seq_length", "model_max_length", "cutoff_len", "block_size"])
def test_plain_arguments_say_the_length_in_many_words(llama: str, key: str) -> None:
    text = ARGUMENTS.replace("batch_size: 4", "batch_size: 512") + f"model_name_or_path: {llama}\n{key}: 512\n"
    [found] = [each for each in predicted(text) if each.rule == "config-over-memory"]
    assert "512 of 512 tokens" in found.message


def test_a_length_may_be_named_from_outside_and_the_file_goes_first(llama: str) -> None:
    text = ARGUMENTS.replace("batch_size: 4", "batch_size: 512") + f"model_name_or_path: {llama}\n"
    notes: list[str] = []
    assert predicted(text, notes) == []
    assert "--seq-len" in notes[0]
    [found] = examined(text, gpu="1GiB", predict=True, seq_len=256)
    assert "of 256 tokens" in found.message
    [found] = examined(text + "max_length: 512\n", gpu="1GiB", predict=True, seq_len=256)
    assert "of 512 tokens" in found.message


@pytest.mark.parametrize(("text", "tool"), [(DEEPSPEED, "DeepSpeed"), (ACCELERATE, "accelerate")])
def test_a_file_that_does_not_say_what_is_trained_is_noted_where_a_card_was_named(text: str, tool: str) -> None:
    notes: list[str] = []
    predicted(text, notes, gpu="t4")
    assert notes[-1].endswith(f"a file of {tool} does not say what is trained.")


def test_a_model_without_a_card_is_noted() -> None:
    notes: list[str] = []
    assert examined(LLAMA_FACTORY, predict=True, model="gpt2", notes=notes) == []
    assert notes == ["No memory was predicted: no card is named. Give one with --gpu."]


def test_what_takes_a_moment_is_told(llama: str) -> None:
    told: list[str] = []
    examined(config(llama, 4, 1), gpu="1GiB", predict=True, tell=told.append)
    assert told == ["Predicting memory for a.yaml ..."]
