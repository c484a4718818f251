"""Inputs that are wrong, for `attacks.py`: values of options, kinds of files, and the commands that get them."""

from __future__ import annotations

import os
import random
import shlex
import subprocess
from pathlib import Path

INTEGERS = ("-1", "x", "", "nan", "1.5", "9" * 400, "∞", "--", "1;ls", "\x1b[31m1", "0x10", "-9223372036854775809")
NUMBERS = ("-1", "x", "", "nan", "inf", "-inf", "1e999", "9" * 400, "1,5", "\x1b]0;t\x07")
BYTES = ("-1GiB", "0", "x", "", "1ZiB", "nan", "1e400GiB", "GiB", "9" * 400, "1 GiB GiB")
WORDS = ("", "x", "\x1b[2J", "a\nb", "../..", "☃", "a" * 5000, "none none", "[red]x")
OPTIONS = {
    **dict.fromkeys(("--seq-len", "--micro-batch", "--accumulation", "--effective-batch", "--lora-rank", "--gpus"), INTEGERS),
    **dict.fromkeys(("--learning-rate", "--epochs", "--max-grad-norm", "--lora-dropout", "--weight-decay"), NUMBERS), "--memory": BYTES,
    **dict.fromkeys(("--precision", "--optimizer", "--method", "--gpu", "--device", "--columns", "--lang", "--nonsense"), WORDS),
}  # fmt: skip
ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{z}: &{z} [{', '.join([f'*{y}'] * 9)}]\n" for y, z in zip("abcdefghi", "bcdefghij", strict=True)
)
TEXTS: dict[str, str | bytes] = {
    "empty": "", "blank": " \n\n", "binary": bytes(range(256)) * 400, "zeros": bytes(100_000), "null": "null",
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "torn": '{"model_type": "llama", "hidden_si', "a list": "[1, 2, 3]", "a number": "17", "deep": "[" * 200_000, "aliases": ALIASES,
    "wrong types": '{"model_type": ["llama"], "hidden_size": "x", "prompt": 3, "effective_batch": {}}',
    "huge numbers": '{"model_type": "llama", "hidden_size": 1e999, "num_hidden_layers": 99999999999999999999, "vocab_size": -4}',
    "large model": '{"model_type": "llama", "hidden_size": 1099511627776, "num_hidden_layers": 9000, "vocab_size": 1099511627776}',
    "of the future": '{"schema": "brim.plan/99", "workload": {}}', "other keys": '{"schema": "brim.run/1", "nonsense": 1}',
    "a tag": "a: !!python/object/apply:os.system ['touch hacked']\n", "one line": b'{"prompt": "' + b"a" * 60_000_000,
}  # fmt: skip
EMPTY = ("empty", "blank", "null", "/dev/null")
"""A config file without keys is valid."""
KINDS = ("missing", *TEXTS, "a folder", "a pipe", "a loop", "a bomb", "escapes", "/dev/null", "/dev/zero")
FILES = (
    "estimate {}", "plan {} --gpu t4 --seq-len 64", "verify {}", "max {} --gpu t4", "probe {} --device cpu --memory 1GiB",
    "stitch {} -o out", "watch {} --once", "report {} -o page.html", "doctor {}", "observe -- {}", "emulate --gpu t4 -- {}",
    "plan MODEL --gpu t4 --data {}", "plan MODEL --config {}", "plan MODEL --gpu t4 --data DATA --tokenizer {}", "models --config {}",
    "train MODEL --data {} -o out", "train MODEL --data DATA --config {} -o out", "train MODEL --data DATA --plan {} -o out",
    "train MODEL --data DATA --probe {} -o out", "train --resume {}", "train MODEL --data DATA --eval-data {} -o out",
    "train {} --data DATA -o out", "train MODEL --data DATA --tokenizer {} -o out", "verify --run {}",
)  # fmt: skip
PLAIN = (
    "estimate MODEL",
    "plan MODEL --gpu t4 --seq-len 64",
    "probe MODEL --device cpu --memory 1GiB",
    "train MODEL --data DATA -o out",
    "verify MODEL",
    "max MODEL --gpu t4",
)
MAY_SUCCEED = ("doctor", "models", "observe", "watch")
"""Verbs that have a good answer to some of these: no findings, no match, the observed command's own end."""


def bad_file(folder: Path, kind: str) -> Path:
    """A file that is not what it should be."""
    path = folder / ("bad.jsonl.gz" if kind == "a bomb" else "bad\x1b[31m\x07name.json" if kind == "escapes" else "bad.json")
    if kind in TEXTS:
        text = TEXTS[kind]
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a loop":
        path.symlink_to(path)
    elif kind == "a bomb":
        subprocess.run(f"head -c 2000000000 /dev/zero | gzip -1 > {shlex.quote(str(path))}", shell=True, check=True)
    return Path(kind) if kind.startswith("/dev/") else path


def bad_input(seed: int, number: int, folder: Path, known: dict[str, str]) -> tuple[list[str], str]:
    """The words of one command, and what is bad about them: two thirds are files, the rest values of options. None comes twice."""
    shuffled, kind = random.Random(f"inputs:{seed}"), "an option"
    more: list[str] = []
    pairs = [(words, kind) for words in FILES for kind in KINDS if not ("--config" in words and kind in EMPTY)]
    files = shuffled.sample(pairs, len(pairs))
    values = [(words, option, value) for words in PLAIN for option in OPTIONS for value in OPTIONS[option]]
    if number % 3:
        words, kind = files[number % len(files)]
        known = {**known, "{}": str(bad_file(folder, kind))}
    else:
        words, *more = shuffled.sample(values, len(values))[number % len(values)]
    return [*(known.get(word, word) for word in words.split()), *more], kind
