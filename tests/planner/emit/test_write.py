"""Files are written whole; what a format cannot say is refused, skipped with a reason, or noted: never dropped in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from brim import UnknownNameError, UnsupportedError, doctor
from brim.planner.emit.write import FORMATS, emit, files_of
from tests.planner.emit.plans import LORA, PLANS, make_plan, without_best

FIRST = {
    "transformers": "training_arguments.py", "accelerate": "accelerate.yaml", "deepspeed": "deepspeed.json", "trl": "trl_sft.yaml",
    "axolotl": "axolotl.yaml", "llama-factory": "llama_factory.yaml", "torchrun": "torchrun.sh", "slurm": "slurm.sh",
}  # fmt: skip


def test_all_writes_every_format_that_can_say_the_plan(tmp_path: Path) -> None:
    emitted = emit(make_plan(**LORA), ["all"], tmp_path)
    assert set(FIRST.values()) <= {path.name for path in emitted.paths}
    assert not emitted.skipped
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == sorted(path.name for path in emitted.paths)


@pytest.mark.parametrize("name", sorted(PLANS))
def test_the_doctor_finds_nothing_in_what_is_written(name: str, tmp_path: Path) -> None:
    emit(PLANS[name], ["all"], tmp_path)
    assert [(found.file, found.line, found.rule, found.message) for found in doctor(tmp_path).findings] == []


def test_all_skips_and_says_why(tmp_path: Path) -> None:
    emitted = emit(PLANS["adafactor, seq2seq"], ["all"], tmp_path)
    assert set(emitted.skipped) == {"trl", "axolotl", "llama-factory"}
    assert "decoder-only" in emitted.skipped["trl"]
    assert not (tmp_path / "trl_sft.yaml").exists()


@pytest.mark.parametrize("format_name", FORMATS)
def test_seven_on_two_gpus_is_refused_in_every_format(format_name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=format_name) as caught:
        emit(make_plan(7, 4), [format_name], tmp_path / "out")
    assert "6 or 8" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()


def test_all_writes_nothing_and_says_why_where_no_format_can_say_the_plan(tmp_path: Path) -> None:
    made = emit(make_plan(7, 4), ["all"], tmp_path / "out")
    assert set(made.skipped) == set(FORMATS)
    assert all("6 or 8" in reason for reason in made.skipped.values())
    assert not made.paths
    assert not (tmp_path / "out").exists()


def test_a_named_format_is_refused_even_beside_all(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="decoder-only"):
        emit(PLANS["adafactor, seq2seq"], ["all", "trl"], tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_that_fits_is_nothing_to_write(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="Nothing fits"):
        emit(without_best(make_plan()), ["transformers"], tmp_path)


def test_an_unknown_format_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError) as caught:
        emit(make_plan(), ["axolot"], tmp_path)
    assert caught.value.nearest == ("axolotl",)


@pytest.mark.parametrize("name", list(PLANS))
def test_the_formats_agree_where_they_share_a_file(name: str) -> None:
    seen: dict[str, str] = {}
    for format_name in FORMATS:
        try:
            texts = files_of(PLANS[name], format_name)
        except UnsupportedError:
            continue
        for file, text in texts.items():
            assert seen.setdefault(file, text) == text
    assert "training_arguments.py" in seen


def test_uneven_slices_become_equal_ones_with_a_note_and_a_comment(tmp_path: Path) -> None:
    emitted = emit(PLANS["uneven, 50 by 8"], ["transformers"], tmp_path)
    assert any("5 x 10" in note for note in emitted.notes)
    text = (tmp_path / "training_arguments.yaml").read_text()
    assert "5 x 10" in text
    settings = yaml.safe_load(text)
    assert (settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]) == (5, 10)


def test_what_is_done_otherwise_is_noted_and_stands_in_the_file(tmp_path: Path) -> None:
    def noted(words: str, *formats: str, **settings: Any) -> bool:
        emitted = emit(make_plan(**settings), formats, tmp_path)
        files = " ".join(" ".join(path.read_text().replace("\n#  ", "").split()) for path in emitted.paths)
        return any(words in note for note in emitted.notes) and (words in files or formats == ("deepspeed",))

    assert noted("Liger", "transformers", loss="chunked")
    assert noted("Liger", "axolotl", loss="chunked", precision="bf16")
    assert noted("Liger", "llama-factory", loss="chunked")
    assert noted("in chunks", "trl")
    assert noted("all layers or none", "trl", checkpointing="every:2")
    assert noted("for-loop AdamW", "transformers", optimizer="adamw-loop")
    assert noted("No learning rate", "torchrun")
    assert noted("pip install bitsandbytes", "transformers", optimizer="paged-adamw-8bit")
    assert noted("does not build adafactor", "deepspeed", optimizer="adafactor", sharding="zero2")
    assert noted("adapters' dtype", "trl", lora_dtype="bfloat16", **LORA)
    assert noted("No data was named", "axolotl", precision="bf16")


def test_ranks_that_run_out_of_data_are_mentioned() -> None:
    def text(**settings: Any) -> str:
        return files_of(make_plan(**settings), "transformers")["training_arguments.yaml"]

    assert "count twice" in text(samples=101)
    assert "count twice" not in text(samples=640)
    assert "count twice" not in text(samples=101, gpus="t4", precision="amp-fp16")
    assert "steps what is left" not in text(samples=640)


def test_catalogue_names_become_hub_ids_and_folders_full_paths(tmp_path: Path) -> None:
    assert "MODEL = 'meta-llama/Llama-3.1-8B'" in files_of(make_plan(), "transformers")["training_arguments.py"]
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert f"MODEL = {str(tmp_path)!r}" in files_of(make_plan(model=str(tmp_path)), "transformers")["training_arguments.py"]


def test_names_that_look_like_code_stay_names(tmp_path: Path) -> None:
    odd = 'owner/x"; import os #\n: {'
    plan = make_plan(model=odd, lora_targets=("q_proj",), **LORA)
    for format_name in ("trl", "axolotl", "llama-factory"):
        settings = yaml.safe_load(files_of(plan, format_name)[FIRST[format_name]])
        assert odd in settings.values()
    compile(files_of(plan, "transformers")["training_arguments.py"], "training_arguments.py", "exec")


def test_nothing_of_brim_is_imported() -> None:
    for text in files_of(PLANS["lora, every second layer"], "transformers").values():
        assert "import brim" not in text
        assert "from brim" not in text
