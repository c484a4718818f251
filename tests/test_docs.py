"""Every command and every Python block of README and docs is run, in a folder that holds what the pages take to be there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import brim
from tests.conftest import Cli, Finished, once
from tests.documented import (
    LIMIT,
    PAGES,
    RUN,
    SHELLS,
    Command,
    blocks,
    commands,
    make_folder,
    make_record,
    names_of_pages,
    programs,
    trainer_in,
)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the folder of the pages holds a probe, which needs a memory limit"
)

RUN_ELSEWHERE = {"make test": "this is `make test`"}
"""Commands that are not run here, and who runs them."""
SCREENS = "README.md"
"""Its console blocks are run by test_readme.py, which also compares what they print."""
PRINTED = {"how-prediction-works.md"}
"""Pages whose screens and `text` blocks are what is printed."""
NEEDED = {"coming-from-lightning.md": "lightning"}
"""What a page's Python imports and brim does not need."""
_PLANNING = "brim plan ./my-model --device cpu --memory 200MiB --data my.jsonl --effective-batch 16 --precision fp32 -o planned"
_TWO = "brim train ./my-model --data my.jsonl --effective-batch 30 --device cpu --gpus 2 --max-steps 3 --no-verify -o two"
INSTEAD = {
    "make demo": ("brim demo", "make would install everything first, and then call this"),
    "brim probe Qwen/Qwen2.5-0.5B --method lora --data my.jsonl --effective-batch 64 -o probe.json": (
        f"brim probe ./my-model --method lora --data my.jsonl --effective-batch 64 --seq-len 64 --device cpu --memory {LIMIT} -o probe.json",
        "the page means the GPU of the reader; here it is the CPU, and a model that fits it",
    ),
    "brim probe MODEL --method lora --data my.jsonl --effective-batch 64": (
        f"brim probe ./my-model --method lora --data my.jsonl --effective-batch 64 --seq-len 64 --device cpu --memory {LIMIT}",
        "the page means a card",
    ),
    "brim train --resume small --max-steps 5": (
        "brim train ./my-model --data my.jsonl --device cpu --no-probe --max-steps 2 -o small && brim train --resume small --max-steps 5",
        "the page has started that run further above",
    ),
    "brim verify --run small": (
        "brim train ./my-model --data my.jsonl --device cpu --no-probe --max-steps 2 -o small && brim verify --run small",
        "the page has started that run further above",
    ),
    "brim train --resume two --gpus 3 --sharding fsdp --max-steps 5": (
        f"{_TWO} && brim train --resume two --gpus 3 --sharding fsdp --max-steps 5",
        "the page has started that run further above",
    ),
    "brim train --resume two --gpus 1 --sharding none --max-steps 6": (
        f"{_TWO} && brim train --resume two --gpus 1 --sharding none --max-steps 6",
        "the page has started that run further above",
    ),
    "brim train ./my-model --data my.jsonl --plan planned/plan.json --device cpu --memory 200MiB -o as-planned": (
        f"{_PLANNING} && brim train ./my-model --data my.jsonl --plan planned/plan.json --device cpu --memory 200MiB -o as-planned",
        "the page has made that plan the line above",
    ),
    "brim watch runs/tuesday --wait": (
        f"(sleep 2; cp -r {RUN} runs/tuesday) & brim watch runs/tuesday --wait",
        "a run that begins while it waits",
    ),
    "ssh gpu-box brim watch runs/monday --interval 60": (
        f"cp -r {RUN} runs/monday; bash -c 'brim watch runs/monday --interval 60' | cat",
        "there is no other machine: the same shell and the same pipe, without the network between",
    ),
    "brim probe ./my-model --device cpu --memory 2GiB --seq-len 512": (
        f"brim probe ./my-model --device cpu --memory {LIMIT} --seq-len 512",
        "2 GiB hold thousands of sequences of so small a model",
    ),
}
"""What is run in the place of a command that takes other hardware, and why."""
SMALLER = {'memory="2GiB"': 'memory="64MiB"'}
"""The same in Python, for the small model of these tests."""
PLACEHOLDERS = {
    "MODEL": "./my-model", "FILE": "my.jsonl", "DATA": "my.jsonl", "RUN": RUN, "DIR": "out", "PLAN": "plan.json",
    "PROBE": "probe.json", "NAME": "t4", "RULE": "batch-clamped", "SIZE": LIMIT,
}  # fmt: skip
LONG = {
    "make demo",
    "brim max llama-3.1-8b --gpu rtx-4090 --method qlora",
    "brim estimate llama-3-8b --method qlora --precision amp-bf16 --checkpointing full --micro-batch 4 --seq-len 1024 --gpu rtx-3090",
    "brim observe -- torchrun --nproc-per-node 2 train.py",
    "brim observe --effective-batch 256 -- accelerate launch train.py",
    "brim observe -o runs/monday -- bash train.sh 64",
    "brim plan Qwen/Qwen2.5-7B --gpu t4 --method qlora --data my.jsonl --effective-batch 64",
    "brim plan llama-3.1-8b --gpu rtx-4090 --method lora --sweep 1,2,4,8 --effective-batch 64",
    "brim plan llama-3.1-8b --gpu rtx-4090 --method qlora --solve seq-len",
    "brim plan llama-3.1-8b --method qlora --solve gpu --price t4=0.35,l4=0.80,a10=1.00",
    "brim plan --gpu t4 --solve model",
    "brim plan qwen2.5-0.5b --gpu t4 --method lora --seq-len 512 --effective-batch 64 --emit transformers -o plan",
    "brim plan qwen2.5-0.5b --gpu t4*2 --method lora --seq-len 512 --effective-batch 64 --emit accelerate -o plan",
    "brim plan qwen2.5-0.5b --gpu t4*2 --sharding zero2 --seq-len 512 --effective-batch 64 --emit deepspeed -o plan",
    "brim plan llama-3.1-8b --gpu h100 --gpus 8 --nodes 128 --effective-batch 1024 --link 'infiniband-ndr*8'",
    (
        "brim plan ./my-model --gpu a100-80gb --gpus 8 --nodes 4 --effective-batch 256 --emit slurm,torchrun -o many && "
        "brim report many/plan.json -o page.html"
    ),
    "brim probe ./my-model --device cpu --memory 2GiB --seq-len 512",
    "brim probe MODEL --method lora --data my.jsonl --effective-batch 64",
    "brim observe -- python train.py --batch-size 64",
    "brim verify ./my-adapter --precision bf16",
    "brim verify llama-3.1-8b qwen2.5-7b mistral-7b",
}
"""Measured: seconds, each. `make test-all` runs them."""
LONG_VERBS = {"train", "demo"}
"""Each trains in a process of its own. What reads `probe.json` is long too: it is measured first."""
LONG_PAGES = {"probe.md", "stitch.md", "train.md", "coming-from-lightning.md"}
"""Their Python takes seconds."""


def marks_of(command: Command) -> list[pytest.MarkDecorator]:
    """Long, or run by somebody else."""
    long = (
        command.text in LONG
        or command.verb in LONG_VERBS
        or "probe.json" in command.words
        or "brim train " in INSTEAD.get(command.text, (command.text,))[0]
    )
    why = RUN_ELSEWHERE.get(command.text)
    if command.page == SCREENS and command.screen:
        why = "test_readme.py runs it, and compares the screen"
    return [*([pytest.mark.slow] if long else []), *([pytest.mark.skip(reason=why)] if why else [])]


@pytest.fixture(scope="session")
def prepared(shared: Path) -> Path:
    """What all pages share, made once."""
    folder = shared / "documented"
    once(folder, lambda: make_folder(folder))
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of it, in which the test is."""
    copy = tmp_path / "project"
    shutil.copytree(prepared, copy, ignore=shutil.ignore_patterns("made"))
    monkeypatch.chdir(copy)
    monkeypatch.syspath_prepend(str(copy))
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield copy
    torch.set_num_threads(threads)


@pytest.mark.parametrize("command", [pytest.param(one, id=f"{one.page}: {one.text}", marks=marks_of(one)) for one in commands()])
def test_a_command_of_a_page_does_what_it_says(command: Command, folder: Path, shared: Path, cli: Cli) -> None:
    text = INSTEAD[command.text][0] if command.text in INSTEAD else command.text
    asked = Command(command.page, text, command.exit_code)
    words = [PLACEHOLDERS.get(word, word) for word in asked.words]
    write_configs(command.page, folder)
    bring_records(" ".join(words), folder, shared)
    make_room(words, folder)
    ended = in_a_shell(text, folder) if asked.needs_a_shell else cli(*words[1:])
    assert ended.code == command.exit_code, f"{' '.join(words)}\n{ended.out}\n{ended.err}"
    assert "Traceback" not in ended.err
    if command.page in PRINTED:
        assert [line for line in ended.out.splitlines() if line][: len(command.screen)] == list(command.screen)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in LONG_PAGES else [])
        for page in PAGES
        if programs(page)
    ],
)
def test_the_python_of_a_page_runs(page: Path, folder: Path, shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if page.name in NEEDED:
        pytest.importorskip(NEEDED[page.name], reason="the page is about it, and brim does not need it")
    bring_records("".join(block.text for block in programs(page)), folder, shared)
    names = {**names_of_pages(page.name), "trainer": trainer_in(folder)}
    for block in programs(page):
        if "__main__" in block.text:
            continue  # a program by itself, with child processes: test_readme.py runs it
        place = page.with_name(f"{page.name}:{block.line}")
        text = block.text
        for written, run in SMALLER.items():
            text = text.replace(written, run)
        exec(compile("\n" * block.line + text, str(place), "exec"), names)
    if page.name in PRINTED:
        shown = "".join(block.text for block in blocks(page) if block.language == "text")
        assert capsys.readouterr().out == shown


def test_every_block_says_what_it_is() -> None:
    known = SHELLS | {"console", "python", "yaml", "toml", "json", "text", "diff", ""}
    assert [(block.page, block.line) for page in PAGES for block in blocks(page) if block.language not in known] == []
    assert [(block.page, block.line) for page in PAGES for block in blocks(page) if block.not_run == ""] == []


def test_the_tables_of_this_file_are_about_commands_that_exist() -> None:
    shown = {command.text for command in commands()}
    assert {*RUN_ELSEWHERE, *INSTEAD, *LONG} <= shown
    assert {page.name for page in PAGES} >= LONG_PAGES


def bring_records(text: str, folder: Path, shared: Path) -> None:
    """A plan and a probe, where the text names them."""
    for name in ("plan.json", "probe.json"):
        if name in text:
            made = shared / f"documented-{name}"
            once(made, partial(make_record, made / name, shared / "documented" / "my-model"))
            shutil.copy(made / name, folder / name)


def write_configs(name: str, folder: Path) -> None:
    """A page's YAML whose first line is a comment with a file's name is that file."""
    for page in PAGES:
        for block in blocks(page) if page.name == name else ():
            first, _newline, rest = block.text.partition("\n")
            if block.language == "yaml" and first.startswith("# ") and first.endswith((".yaml", ".yml")):
                path = folder / first.removeprefix("# ")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(rest, encoding="utf-8")


def make_room(words: list[str], folder: Path) -> None:
    """What a command makes is not there before: pages show it being made, and others on the same page use it."""
    for flag, value in pairwise(words):
        made = folder / value
        if flag in {"-o", "--output"} and made.exists() and made.resolve() != folder.resolve():
            shutil.rmtree(made) if made.is_dir() else made.unlink()


def in_a_shell(text: str, folder: Path) -> Finished:
    ended = subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, check=False, timeout=240, cwd=folder, stdin=subprocess.DEVNULL
    )
    return Finished(ended.returncode, ended.stdout, ended.stderr)


MESSAGES = {
    "CUDA's allocator": (True, "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 14.74 GiB"),
    "MPS": (True, "MPS backend out of memory (MPS allocated: 8.00 GB, other allocations: 1.00 GB, max allowed: 9.07 GB)."),
    "CPU": (True, "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"),
    "CUDA's runtime": (
        False,
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other call",
    ),
    "the driver": (False, "CUDA driver error: out of memory"),
    "cuBLAS": (False, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "NCCL": (
        False,
        "NCCL error: unhandled cuda error\nncclUnhandledCudaError: Call failed.\nFailed to CUDA calloc async 608 bytes",
    ),
}
"""Whether accelerate takes it for out of memory, and the message."""


@pytest.mark.parametrize("who", MESSAGES)
def test_what_the_pages_say_of_messages_is_so(who: str) -> None:
    from accelerate.utils.memory import should_reduce_batch_size

    by_accelerate, message = MESSAGES[who]
    assert should_reduce_batch_size(RuntimeError(message)) == by_accelerate
    assert brim.is_out_of_memory(RuntimeError(message))
