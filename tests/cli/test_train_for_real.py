"""`brim train` on real data: other tasks, other memory, two processes, and kills at random moments. Minutes, not seconds."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from brim.records import TrainingResult
from brim.step.checker import check_ledger
from brim.step.ledger import read_ledger
from brim.workload.embedded import data_file, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SFT = Path(__file__).parents[2].parent / "shared" / "data" / "sft"
needs_data = pytest.mark.skipif(not SFT.is_dir(), reason="the real data set ../shared/data/sft is not here")
ON_CPU = ("--device", "cpu", "--workers", "0", "--no-probe", "--precision", "fp32", "--json")


def brim(*words: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, *launcher, "-m", "brim", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def trained(*words: str, launcher: tuple[str, ...] = ()) -> TrainingResult:
    process = brim("train", *words, launcher=launcher)
    out, err = process.communicate(timeout=800)
    assert process.returncode == 0, err[-4000:]
    return TrainingResult.from_json(out)


def tokenizer_of(texts: list[str], size: int, *, ends: bool) -> Any:
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "</s>", "<unk>"]
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    if ends:
        made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")  # type: ignore[no-untyped-call]


def llama_of(tokenizer: Any, folder: Path, **changes: Any) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    options = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 1024, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
    }  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**{**options, **changes})).save_pretrained(folder)  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(folder)
    return folder


def is_well(result: TrainingResult) -> None:
    assert result.finished
    assert result.promise_kept
    assert result.first_loss is not None
    assert result.last_loss is not None
    assert result.last_loss < result.first_loss
    assert result.evaluation is not None
    assert result.evaluation.loss is not None
    assert not check_ledger(read_ledger(Path(result.folder) / "ledger.jsonl"))


@needs_data
def test_a_small_llama_on_alpaca(tmp_path: Path) -> None:
    rows = json.loads((SFT / "alpaca_en_1k.json").read_text(encoding="utf-8"))
    model = llama_of(tokenizer_of([row["instruction"] + row["output"] for row in rows], 2000, ends=False), tmp_path / "model")
    result = trained(
        str(model), "--data", str(SFT / "alpaca_en_1k.json"), "--eval-split", "32", "--max-steps", "8", "--learning-rate", "3e-3",
        "--memory", "400MiB", *ON_CPU, "-o", str(tmp_path / "run"),
    )  # fmt: skip
    is_well(result)
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert loaded(torch.tensor([[5, 6, 7]])).logits.isfinite().all()


@needs_data
def test_a_small_t5_on_chinese_questions_with_its_encoder_frozen(tmp_path: Path) -> None:
    import pyarrow.parquet as pq  # type: ignore[import-untyped]
    from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

    rows = pq.read_table(SFT / "chatlm_zh_train_3k.parquet").to_pylist()
    tokenizer = tokenizer_of([row["prompt"] + row["response"] for row in rows[:1000]], 2000, ends=True)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, **sizes)
    config.decoder_start_token_id = 0
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    result = trained(
        str(tmp_path / "model"), "--data", str(SFT / "chatlm_zh_train_3k.parquet"), "--eval-data",
        str(SFT / "chatlm_zh_valid_1k.parquet"), "--max-steps", "6", "--learning-rate", "5e-3", "--freeze", "encoder", "--max-length",
        "128", "--target-len", "128", *ON_CPU, "-o", str(tmp_path / "run"),
    )  # fmt: skip
    is_well(result)
    before, after = (AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name) for name in ("model", "run"))
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    assert torch.equal(before.get_parameter(name), after.get_parameter(name))
    name = name.replace("encoder", "decoder")
    assert not torch.equal(before.get_parameter(name), after.get_parameter(name))


def test_a_classifier_on_a_csv(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

    random.seed(0)
    words = {"good": ["bright", "warm", "kind"], "bad": ["cold", "grey", "harsh"]}
    rows = [(" ".join(random.choices(words[label], k=5)), label) for label in words for _row in range(60)]
    random.shuffle(rows)
    with (tmp_path / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    tokenizer = tokenizer_of([text for text, _label in rows], 300, ends=True)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        pad_token_id=0,
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path / "model")  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(tmp_path / "model")
    result = trained(
        str(tmp_path / "model"), "--data", str(tmp_path / "rows.csv"), "--eval-split", "0.2", "--epochs", "6", "--effective-batch",
        "16", "--learning-rate", "5e-3", *ON_CPU, "-o", str(tmp_path / "run"),
    )  # fmt: skip
    is_well(result)
    assert result.evaluation is not None
    assert result.evaluation.metrics["accuracy"] > 0.9
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run")
    assert loaded.config.id2label == {0: "bad", 1: "good"}


def test_a_stitched_model(tmp_path: Path) -> None:
    texts = data_file().read_text(encoding="utf-8").splitlines()
    tokenizer = tokenizer_of(texts, 1000, ends=False)
    for name, layers in (("one", 2), ("two", 3)):
        llama_of(tokenizer, tmp_path / name, num_hidden_layers=layers)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"donors: {{one: {tmp_path / 'one'}, two: {tmp_path / 'two'}}}\n"
        "layers: [{donor: one, layers: 0-1}, {donor: two, layers: 1-2}]\ntrain: [layers, head]\n",
        encoding="utf-8",
    )
    stitched = brim("stitch", str(recipe), "-o", str(tmp_path / "stitched"))
    _out, err = stitched.communicate(timeout=300)
    assert stitched.returncode == 0, err
    result = trained(
        str(tmp_path / "stitched"), "--data", str(data_file()), "--eval-split", "32", "--max-steps", "8", "--learning-rate", "3e-3",
        *ON_CPU, "-o", str(tmp_path / "run"),
    )  # fmt: skip
    is_well(result)
    import brim as library

    loaded = library.StitchedModel.from_pretrained(tmp_path / "run")
    assert loaded(torch.tensor([[5, 6, 7]])).logits.isfinite().all()


def test_other_memory_and_two_processes_give_the_same_curve(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    asked = (
        str(model), "--data", str(data_file()), "--effective-batch", "32", "--max-steps", "8", "--learning-rate", "2e-3", "--device", "cpu",
        "--workers", "0", "--precision", "fp32", "--no-verify", "--json", "--checkpointing", "none",
    )  # fmt: skip
    two = (
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "0",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    )
    folders = {name: tmp_path / name for name in ("tight", "roomy", "together")}
    trained(*asked, "--memory", "120MiB", "-o", str(folders["tight"]))
    trained(*asked, "--memory", "360MiB", "-o", str(folders["roomy"]))
    together = brim("train", *asked, "--memory", "200MiB", "--no-probe", "-o", str(folders["together"]), launcher=two)
    _out, err = together.communicate(timeout=600)
    assert together.returncode == 0, err[-4000:]
    steps = {name: list(read_ledger(folder / "ledger.jsonl").steps) for name, folder in folders.items()}
    first = steps["tight"]
    for name in ("roomy", "together"):
        assert len(steps[name]) == len(first) == 8
        for one, other in zip(first, steps[name], strict=True):
            assert sorted(one.sequence_ids) == sorted(other.sequence_ids)
            assert one.loss == pytest.approx(other.loss, abs=1e-3)
    slices = {name: [[part.sequences for part in entry.slices] for entry in entries] for name, entries in steps.items()}
    assert slices["tight"] != slices["roomy"] != slices["together"]


def test_an_out_of_memory_under_a_pinned_slice_splits_that_one_and_is_told(tmp_path: Path) -> None:
    """Rows of one length, and a limit at the prediction itself: the process needs a little more, so memory really runs out."""
    model = write_model(tmp_path / "model")
    rows = [json.dumps({"prompt": f"{number} " + "one two three " * 60, "response": "four " * 40}) for number in range(32)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    asked = (
        "train", str(model), "--data", str(tmp_path / "rows.jsonl"), "--micro-batch", "8", "--accumulation", "2", "--max-steps", "2",
        "--device", "cpu", "--workers", "0", "--no-verify", "--precision", "fp32", "--checkpointing", "none",
    )  # fmt: skip
    refused = brim(*asked, "--memory", "60MiB", "-o", str(tmp_path / "refused"))
    _out, err = refused.communicate(timeout=200)
    assert refused.returncode == 1
    needed = float(err.partition("needs ")[2].partition(" MiB")[0])
    process = brim(*asked, "--memory", f"{int(needed) + 1}MiB", "-o", str(tmp_path / "run"))
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    steps = list(read_ledger(tmp_path / "run" / "ledger.jsonl").steps)
    splits = [split for entry in steps for split in entry.splits]
    assert splits
    assert {split.sequences for split in splits} <= {8, 4}
    assert all(entry.limit == 8 and sum(part.sequences for part in entry.slices) == 16 for entry in steps)
    assert "out of memory in" in err
    assert "Memory ran out" in out


def test_ten_kills_at_random_moments_cost_nothing(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    asked = (
        "train", str(model), "--data", str(data_file()), "--effective-batch", "16", "--max-steps", "60", "--learning-rate", "2e-3",
        "--save-steps", "3", "--no-verify", "--device", "cpu", "--memory", "160MiB", "--workers", "0", "--no-probe", "--precision",
        "fp32",
    )  # fmt: skip
    whole = brim(*asked, "-o", str(tmp_path / "whole"))
    _out, err = whole.communicate(timeout=600)
    assert whole.returncode == 0, err[-4000:]
    folder = tmp_path / "killed"
    luck = random.Random(5)
    process = brim(*asked, "-o", str(folder))
    kills = 0
    while kills < 10:
        _wait_for_a_step(folder, process)
        time.sleep(luck.uniform(0, 1.5))
        if process.poll() is not None:
            break
        # At times the one that trains, at times the one that waits for it.
        pid = process.pid if luck.random() < 0.5 else _child_of(process.pid)
        os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=60)
        kills += 1
        process = brim("train", "--resume", str(folder))
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-4000:]
    assert kills == 10
    from safetensors.torch import load_file

    one, other = (load_file(place / "model.safetensors") for place in (tmp_path / "whole", folder))
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-4
    assert not check_ledger(read_ledger(folder / "ledger.jsonl"))
    assert "kept: 60 of 60 steps" in out


def _wait_for_a_step(folder: Path, process: subprocess.Popen[str]) -> None:
    """Until one more line is in the ledger than there was."""
    ledger = folder / "ledger.jsonl"
    before = ledger.stat().st_size if ledger.exists() else 0
    for _look in range(1200):
        if process.poll() is not None or (ledger.exists() and ledger.stat().st_size > before + 500):
            return
        time.sleep(0.1)


def _child_of(pid: int) -> int:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return int(found[0]) if found else pid
