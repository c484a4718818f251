"""Transformers' spellings, as flags."""

from __future__ import annotations

import pytest

from brim.cli._aliases import in_our_spelling
from brim.cli.train import command
from brim.errors import UsageError


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["--per_device_train_batch_size", "4"], ["--micro-batch", "4"]),
        (["--per-device-train-batch-size=4"], ["--micro-batch", "4"]),
        (["--gradient_accumulation_steps", "8"], ["--accumulation", "8"]),
        (["--num_train_epochs", "2"], ["--epochs", "2"]),
        (["--output_dir", "x"], ["--output", "x"]),
        (["--optim", "adamw_torch_fused"], ["--optimizer", "adamw-fused"]),
        (["--lr_scheduler_type", "constant_with_warmup"], ["--schedule", "constant-with-warmup"]),
        (["--bf16"], ["--precision", "amp-bf16"]),
        (["--bf16", "True", "--seed", "1"], ["--precision", "amp-bf16", "--seed", "1"]),
        (["--fp16", "false"], []),
        (["--gradient_checkpointing", "--epochs", "1"], ["--checkpointing", "full", "--epochs", "1"]),
        (["--attn_implementation", "flash_attention_2"], ["--attention", "flash2"]),
        (["--save_total_limit=3"], ["--keep", "3"]),
        (["--epochs", "3", "model"], ["--epochs", "3", "model"]),
        (["--", "--bf16"], ["--", "--bf16"]),
    ],
    ids=lambda words: " ".join(words) or "nothing",
)
def test_an_alias_means_an_option(given: list[str], meant: list[str]) -> None:
    ours = in_our_spelling(given, command.params)
    assert [word for word in ours if word != "-o"] == meant


def test_a_word_without_counterpart_is_refused() -> None:
    with pytest.raises(UsageError, match="adamw_torch"):
        in_our_spelling(["--optim", "muon"], command.params)
