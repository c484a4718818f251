"""Loop and padding rules: what a finding says, how severe it is, and where nothing is reported."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent, indent

import pytest

from brim.audit.found import Found
from brim.audit.source.examine import examine_source

WINDOW = """
    for index, batch in enumerate(loader):
        loss = model(**batch).loss / accumulation_steps
        loss.backward()
        if (index + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
EPOCHS = f"def train(model, loader, optimizer, accumulation_steps):\n{{before}}\n    for epoch in range(3):\n{{first}}{indent(dedent(WINDOW), ' ' * 8)}"


def found_in(folder: Path, files: dict[str, str]) -> list[Found]:
    """The findings in files that are written first."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).lstrip("\n"), encoding="utf-8")
    return examine_source([folder])[1]


def rules_in(folder: Path, text: str, name: str = "train.py") -> list[str]:
    return [each.rule for each in found_in(folder, {name: text})]


@pytest.mark.parametrize(
    ("before", "first", "fate"),
    [
        ("    pass", "", "are added to the first step of the next epoch, which then has more than accumulation_steps"),
        (
            "    model.zero_grad()",
            "",
            "are added to the first step of the next epoch, which then has more than accumulation_steps",
        ),
        ("    pass", "        optimizer.zero_grad()\n", "are thrown away at the end of the epoch"),
    ],
)
def test_a_left_over_window_is_said_to_be_lost_only_if_gradients_are_cleared_between_epochs(
    tmp_path: Path, before: str, first: str, fate: str
) -> None:
    [window] = found_in(tmp_path, {"train.py": EPOCHS.format(before=before, first=first)})
    assert window.rule == "last-window-dropped"
    assert window.message.endswith(f"are never stepped: they {fate}.")


def test_a_left_over_window_of_a_function_that_is_called_per_epoch_reaches_the_next_call(tmp_path: Path) -> None:
    epoch = f"def train_epoch(model, loader, optimizer, accumulation_steps):\n{WINDOW.lstrip()}"
    caller = "\n\ndef main(*parts):\n    for epoch in range(3):\n        train_epoch(*parts)\n"
    [window] = found_in(tmp_path, {"train.py": epoch.replace("for index", "    for index", 1) + caller})
    assert "are added to the first step of the next epoch" in window.message


def test_a_stream_that_ends_by_a_count_has_no_last_window(tmp_path: Path) -> None:
    assert rules_in(
        tmp_path,
        """
        def train(model, stream, optimizer, accumulation, total):
            step = updates = 0
            for batch in stream:
                step += 1
                if updates >= total:
                    break
                loss = model(**batch).loss / accumulation
                loss.backward()
                if step % accumulation != 0:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                updates += 1
        """,
    ) == []  # fmt: skip


def test_a_schedule_of_a_training_that_ends_after_micro_batches_steps_with_them(tmp_path: Path) -> None:
    text = """
        def train(model, loader, optimizer, lr_scheduler, accumulation, total):
            step = 0
            while True:
                for batch in loader:
                    lr_scheduler.step()
                    loss = model(**batch).loss / accumulation
                    loss.backward()
                    step += 1
                    if step % accumulation == 0:
                        optimizer.step()
                        optimizer.zero_grad()
                    {end}
        """
    assert rules_in(tmp_path / "micro", text.format(end="if step >= total:\n                        return")) == []
    assert rules_in(tmp_path / "epochs", text.format(end="print(step)")) == ["scheduler-every-micro-batch"]


LOGGED = """
    def train(model, loader, optimizer):
        total = 0.0
        for batch in loader:
            batch = batch{moved}
            loss = model(batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += {read}
"""


@pytest.mark.parametrize(
    ("name", "moved", "read", "rules"),
    [
        ("train.py", ".cuda()", "loss.item()", ["item-every-step"]),
        ("train.py", ".cuda()", "(batch != 0).sum().item()", ["item-every-step"]),
        ("train.py", ".to('cpu')", "loss.item()", []),
        ("train.py", ".pin_memory()  # torch.cuda.empty_cache()", "loss.item()", []),
        ("train.py", ".pin_memory()", "(batch != 0).sum().item()", []),
        ("tests/test_train.py", ".cuda()", "loss.item()", []),
        ("bench.py", ".cuda()", "loss.item()", []),
    ],
)
def test_reading_a_number_every_step_is_low_and_matters_only_in_training_on_a_gpu(
    tmp_path: Path, name: str, moved: str, read: str, rules: list[str]
) -> None:
    assert rules_in(tmp_path, LOGGED.format(moved=moved, read=read), name) == rules


def test_a_search_for_a_batch_size_may_empty_the_cache(tmp_path: Path) -> None:
    assert rules_in(
        tmp_path,
        """
        import torch


        def largest(model, optimizer, make):
            for size in (64, 32, 16, 8):
                try:
                    model(make(size)).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    torch.cuda.empty_cache()
                except torch.cuda.OutOfMemoryError:
                    continue
        """,
    ) == []  # fmt: skip


def test_tests_train_a_few_steps_on_purpose(tmp_path: Path) -> None:
    text = f"def test_it(model, loader, optimizer, accumulation_steps):\n{WINDOW.lstrip()}".replace(
        "for index", "    for index", 1
    )
    assert rules_in(tmp_path / "one", text, "tests/test_loop.py") == []
    assert rules_in(tmp_path / "two", text, "loop.py") == ["last-window-dropped"]


def test_padding_of_a_corpus_that_is_streamed_is_low(tmp_path: Path) -> None:
    [padded] = found_in(
        tmp_path,
        {
            "train.py": """
                from torch.utils.data import IterableDataset
                from transformers import Trainer


                class Pages(IterableDataset):
                    def __iter__(self):
                        for page in self.pages:
                            yield self.tokenizer(page, padding="max_length", max_length=1024, truncation=True)


                def main(model, arguments):
                    Trainer(model=model, args=arguments, train_dataset=Pages()).train()
                """
        },
    )
    assert (padded.rule, padded.severity) == ("padding-to-maximum", "low")


def test_padding_options_of_a_notebook_are_followed_through_a_parameter(tmp_path: Path) -> None:
    cells = [
        "def load(rows, encode, options):\n    return rows.map(lambda row: encode(row['text'], **options))\n",
        "choice = {\n    'padding': 'max_length',\n    'max_length': 700,\n}\nrows = load(rows, tokenizer, options=choice)\n",
        "from transformers import Trainer\nTrainer(model=model, train_dataset=rows).train()\n",
    ]
    document = {
        "cells": [{"cell_type": "code", "metadata": {}, "outputs": [], "source": each} for each in cells],
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    [padded] = found_in(tmp_path, {"train.ipynb": json.dumps(document)})
    assert (padded.rule, padded.line) == ("padding-to-maximum", 5)
    assert "700" in padded.message


def test_a_notebook_gets_the_loop_rules_too(tmp_path: Path) -> None:
    code = f"for epoch in range(3):\n{WINDOW.lstrip(chr(10))}".splitlines(keepends=True)
    document = {
        "cells": [{"cell_type": "code", "metadata": {}, "outputs": [], "source": code}],
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    assert [each.rule for each in found_in(tmp_path, {"train.ipynb": json.dumps(document)})] == ["last-window-dropped"]


def test_a_finding_of_unexchanged_gradients_names_the_wrapper_and_the_line(tmp_path: Path) -> None:
    [unexchanged] = found_in(
        tmp_path,
        {
            "train.py": """
                from torch.nn.parallel import DistributedDataParallel


                def train(model, loader, optimizer, accumulation_steps):
                    model = DistributedDataParallel(model)
                    for index, batch in enumerate(loader):
                        plain = model.module if isinstance(model, DistributedDataParallel) else model
                        loss = plain(**batch).loss / accumulation_steps
                        loss.backward()
                        if (index + 1) % accumulation_steps == 0 or index + 1 == len(loader):
                            optimizer.step()
                            optimizer.zero_grad()
                """
        },
    )
    assert (unexchanged.rule, unexchanged.line) == ("gradients-not-exchanged", 7)
    assert "plain(...) in line 8" in unexchanged.message
    assert "wrapper model" in unexchanged.message


def test_an_expression_that_is_nested_too_deeply_is_noted(tmp_path: Path) -> None:
    long_sum = "+".join(["a"] * 3000)
    (tmp_path / "train.py").write_text(
        f"def train(model, loader, optimizer):\n    for a in loader:\n        loss = {long_sum}\n        loss.backward()\n        optimizer.step()\n"
    )
    project, _found = examine_source([tmp_path])
    assert project.notes
