"""The commands and programs of the pages, and a folder that holds what the pages take to be there."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "README.zh-CN.md",
    *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "log.md"),
]
SHELLS = {"sh", "bash", "shell"}

_FENCE = re.compile(r"^(?P<fence>```+)(?P<language>[\w-]*)\n(?P<text>.*?)^(?P=fence)[ ]*$", re.DOTALL | re.MULTILINE)
_NOT_RUN = re.compile(r"<!-- not run: (?P<why>.+?) -->\s*\Z", re.DOTALL)
_EXIT_CODE = re.compile(r"#.*exit code (?P<code>\d+)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. `<!-- not run: why -->` on the line above keeps it from being run."""

    page: str
    line: int
    language: str
    text: str
    not_run: str | None


@dataclass(frozen=True)
class Command:
    """One command line as a page shows it; a comment behind it may say its exit code, which is 0 otherwise."""

    page: str
    text: str
    exit_code: int
    screen: tuple[str, ...] = ()
    """Lines that the page shows below it, up to `...`."""

    @property
    def words(self) -> list[str]:
        """Without comments."""
        return shlex.split(self.text, comments=True)

    @property
    def verb(self) -> str | None:
        """Of brim; None for other programs and for bare `brim`."""
        words = self.words
        return words[1] if words[0] == "brim" and len(words) > 1 and not words[1].startswith("-") else None

    @property
    def needs_a_shell(self) -> bool:
        """Pipes, variables in front, and programs that are not brim."""
        return self.words[0] != "brim" or bool({"|", "&&", ">", ";"} & set(self.words))


def blocks(path: Path) -> Iterator[Block]:
    """All fenced blocks, from top to bottom."""
    text = path.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        before = _NOT_RUN.search(text, 0, found.start())
        line = text.count("\n", 0, found.start()) + 1
        yield Block(path.name, line, found["language"], found["text"], before["why"] if before else None)


def commands() -> list[Command]:
    """Every command once, by the page that shows it first."""
    found: dict[str, Command] = {}
    for path in PAGES:
        for block in blocks(path):
            if block.not_run is None:
                for line, screen in _lines(block):
                    said = _EXIT_CODE.search(line)
                    command = Command(path.name, _without_comment(line), int(said["code"]) if said else 0, screen)
                    found.setdefault(command.text, command)
    return list(found.values())


def programs(path: Path) -> list[Block]:
    """The Python blocks of a page, in order."""
    return [block for block in blocks(path) if block.language == "python" and block.not_run is None]


def _lines(block: Block) -> Iterator[tuple[str, tuple[str, ...]]]:
    text = block.text.replace("\\\n", " ")
    if block.language in SHELLS:
        yield from ((line.strip(), ()) for line in text.splitlines() if line.strip() and not line.strip().startswith("#"))
    elif block.language == "console":
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, *lines = part.splitlines()
            yield command.strip(), tuple(line for line in takewhile(lambda line: line != "...", lines) if line)


def _without_comment(line: str) -> str:
    return re.sub(r"\s+#\s.*$", "", line).strip()


# The folder.

TRAIN = '''"""A loop as people write it, with one setting."""

import argparse

import torch

options = argparse.ArgumentParser()
options.add_argument("--batch-size", type=int, default=8)
batch_size = options.parse_args().batch_size

torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.randn(256, 8), torch.randint(2, (256,)))
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.AdamW(model.parameters())
for inputs, targets in torch.utils.data.DataLoader(data, batch_size=batch_size, shuffle=True):
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
'''
LAUNCHER = 'python train.py --batch-size "$1"\n'
BUILD = '''"""A model of one's own."""

from transformers import AutoModelForCausalLM


def build():
    return AutoModelForCausalLM.from_pretrained("./my-model")
'''
RECIPE = """name: small-stitch
donors: {small: ./llama-small, big: ./qwen-small}
layers:
  - {donor: small, layers: 0-1}
  - {donor: big, layers: 1-2, adapter: linear}
train: adapters
"""
CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "fp16": {"enabled": True},
}
RUN = "runs/2026-11-16"
LIMIT = "200MiB"


def make_folder(folder: Path) -> None:
    """What a page names without making it: data, models, scripts, a recipe, a run."""
    _write_texts(folder)
    _write_models(folder)
    _write_run(folder / RUN)
    _write_run(folder / "run")


def rows_of_data(count: int = 80) -> list[dict[str, str]]:
    """Questions and answers of different lengths."""
    return [
        {"prompt": f"How many are {one} and {one % 7}?", "response": f"{one + one % 7}" + ", as anybody can count" * (one % 4)}
        for one in range(count)
    ]


def _write_texts(folder: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in rows_of_data())
    for name in ("my.jsonl", "data.jsonl", "train.jsonl"):
        (folder / name).write_text(lines, encoding="utf-8")
    (folder / "eval.jsonl").write_text("".join(lines.splitlines(keepends=True)[:16]), encoding="utf-8")
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    (folder / "train.sh").write_text(LAUNCHER, encoding="utf-8")
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").touch()
    (folder / "my_package" / "model.py").write_text(BUILD, encoding="utf-8")
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    (folder / "ds_config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (folder / "configs").mkdir()
    (folder / "configs" / "ds_config.json").write_text(json.dumps(CONFIG), encoding="utf-8")


def _write_models(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    from brim.stitching.assembling import stitch
    from brim.stitching.reading import read_recipe
    from tests.stitching.small import fresh_donor

    words, model = tokenizer(), small_model()
    model.save_pretrained(folder / "my-model")
    words.save_pretrained(folder / "my-model")
    # The adapter names its base by a path, which must hold in every copy of this folder.
    model.config._name_or_path = str(folder / "my-model")
    model.name_or_path = str(folder / "my-model")
    get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4)).save_pretrained(str(folder / "my-adapter"))
    for name, family in (("llama-small", "llama"), ("qwen-small", "qwen2")):
        fresh_donor(family).save_pretrained(folder / name)
    stitch(read_recipe(folder / "recipe.yaml")).save_pretrained(folder / "my-stitch")


def _write_run(folder: Path) -> None:
    import brim

    names = names_of_pages()
    for step in brim.steps(
        names["data"], names["model"], names["optimizer"], effective_batch=16, budget=brim.Budget.tokens(512),
        collate=names["collate"], ledger=folder,
    ):  # fmt: skip
        step.run()


def make_record(path: Path, model: Path) -> None:
    """A plan, or a probe, which takes seconds."""
    import brim

    small: dict[str, Any] = {"seq_len": 64, "device": "cpu", "memory": LIMIT}
    if path.name == "plan.json":
        brim.plan(str(model), effective_batch=16, **small).write(path)
    else:
        brim.probe(str(model), objective="largest", max_trials=2, **small).write(path)


def tokenizer() -> Any:
    """Every byte, and some merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    teacher = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "</s>", "<s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    found.train_from_iterator([text for row in rows_of_data() for text in row.values()], teacher)
    names = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>"}
    return PreTrainedTokenizerFast(tokenizer_object=found, **names)  # type: ignore[no-untyped-call]


def small_model() -> Any:
    """A Llama that knows the tokenizer's words."""
    from tests.trainer.words import model_of

    return model_of(tokenizer(), max_position_embeddings=512)


def names_of_pages(page: str = "") -> dict[str, Any]:
    """What Python on a page may name without making it: a Trainer, a model with data, a loop's parts."""
    import torch
    from torch.utils.data import DataLoader

    from tests.stitching.small import fresh_donor
    from tests.trainer.small import pad, ragged

    data, model = ragged(128), small_model()
    tensors = [{name: torch.tensor(ids) for name, ids in row.items()} for row in data]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return {
        "torch": torch, "DataLoader": DataLoader, "config": SimpleNamespace(batch_size=4), "device": "cpu",
        "data": data, "dataset": tensors if page in {"probe.md", "coming-from-lightning.md"} else data, "collate": pad, "loader": DataLoader(data, batch_size=4, collate_fn=pad),  # type: ignore[arg-type]
        "model": model, "my_module": model, "optimizer": optimizer, "tokenizer": tokenizer(),
        "first_model": fresh_donor("llama"), "second_model": fresh_donor("qwen2"),
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
    }  # fmt: skip


def trainer_in(folder: Path) -> Any:
    """A Trainer as somebody has made it."""
    from transformers import Trainer

    from tests.trainer.small import arguments, pad, ragged

    return Trainer(small_model(), arguments(folder / "trained"), data_collator=pad, train_dataset=ragged(32))
