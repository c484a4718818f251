"""A tiny model, ragged rows and the plain loop that everything is compared with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from brim.trainer.hf import BrimTrainer

VOCABULARY = 64
Row = dict[str, list[int]]


def llama(**changes: Any) -> LlamaForCausalLM:
    """The same weights each time."""
    torch.manual_seed(0)
    options = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "use_cache": False,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**options, **changes}))  # type: ignore[no-untyped-call]


def ragged(count: int, seed: int = 0, *, longest: int = 24) -> list[Row]:
    """Rows of 4 to `longest` tokens; the first third of each is not supervised."""
    random = torch.Generator().manual_seed(seed)
    rows = []
    for _row in range(count):
        length = int(torch.randint(4, longest + 1, (1,), generator=random))
        ids = torch.randint(1, VOCABULARY, (length,), generator=random).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * (length // 3) + ids[length // 3 :]})
    return rows


def equal(count: int, length: int = 12) -> list[Row]:
    """Rows of one length, supervised from end to end."""
    random = torch.Generator().manual_seed(1)
    return [
        {"input_ids": ids, "labels": list(ids)}
        for ids in (torch.randint(1, VOCABULARY, (length,), generator=random).tolist() for _row in range(count))
    ]


def pad(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """To the longest, on the right."""
    width = max(len(row["input_ids"]) for row in rows)

    def padded(key: str, value: int) -> torch.Tensor:
        return torch.tensor([row[key] + [value] * (width - len(row[key])) for row in rows])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows])
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": mask}


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Effective batch 8, a constant rate, every step logged."""
    options = {
        "output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1,
        "save_strategy": "no", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-3,
        "lr_scheduler_type": "constant", "num_train_epochs": 1, "seed": 3, "remove_unused_columns": False,
    }  # fmt: skip
    return TrainingArguments(**{**options, **changes})


def trainer_of(folder: Path, rows: Any, model: Any = None, kind: Any = BrimTrainer, **options: Any) -> Any:
    """A trainer of that kind; what its own constructor knows is named, the rest are arguments of training."""
    own = {
        name: options.pop(name)
        for name in (
            "budget", "effective_batch", "lengths", "ledger", "on_broken", "callbacks", "eval_dataset", "compute_loss_func",
            "compute_metrics", "data_collator",
        )
        if name in options
    }  # fmt: skip
    own.setdefault("data_collator", pad)
    return kind(model=model or llama(), args=arguments(folder, **options), train_dataset=rows, **own)


def logged(trainer: Trainer, name: str = "loss") -> list[float]:
    """One value of each step."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def lines(folder: Path, kind: str = "step") -> list[dict[str, Any]]:
    """The ledger's lines of that kind."""
    text = (folder / "ledger.jsonl").read_text(encoding="utf-8")
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]


def ids_of(folder: Path) -> list[set[int]]:
    """The sequences of each step."""
    return [set(line["sequence_ids"]) for line in lines(folder)]


def by_hand(
    model: torch.nn.Module, rows: Sequence[Row], batches: Iterable[Iterable[int]], *, rate: float = 1e-3
) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of each step when a global batch goes through the model as one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    losses, norms = [], []
    model.train()
    for batch in batches:
        loss = model(**pad([rows[place] for place in sorted(batch)])).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms


def near(values: Sequence[float], tolerance: float = 1e-5) -> Any:
    """Equal but for rounding."""
    return pytest.approx(values, rel=tolerance)


def weights(model: Any) -> torch.Tensor:
    """All of them in one row."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
