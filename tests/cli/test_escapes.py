"""Names from outside never control the terminal: what a terminal obeys is shown as its code."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import brim
from brim.machine.screen import json_text, message, printable, printable_line
from brim.pictures.markup import tag
from brim.records import Split
from brim.step.ledger import LedgerWriter
from brim.workload.embedded import write_model
from tests.conftest import Cli
from tests.step.ledgers import HEADER, step_of

EVIL = "ev\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2066\x7f[red]:boom:\nbrim: all is well\ril"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
FORGED = re.compile("^brim: all is well", re.MULTILINE)


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which everything has such a name."""
    folder = tmp_path_factory.mktemp("strange")
    write_model(folder / EVIL)
    config = json.loads((folder / EVIL / "config.json").read_text())
    (folder / "odd").mkdir()
    (folder / "odd" / "config.json").write_text(json.dumps({**config, "model_type": EVIL, "architectures": [EVIL]}))
    (folder / f"{EVIL}.jsonl").write_text(json.dumps({EVIL: "a", "other": "b"}) + "\n")
    (folder / "rows.jsonl").write_text(json.dumps({EVIL: "a", "other": "b"}) + "\n")
    (folder / "bad.jsonl").write_text(json.dumps({"messages": [{"role": EVIL, "content": "x"}]}) + "\n")
    (folder / f"{EVIL}.py").write_text(
        f"batch_size = 8  # {EVIL!s}".replace("\n", " ").replace("\r", " ") + "\nbatch_size = min(batch_size, 2)\n"
    )
    (folder / "config.yaml").write_text(json.dumps({EVIL: 1}))
    (folder / "recipe.yaml").write_text(json.dumps({"name": EVIL, "layers": [{"from": EVIL, "take": EVIL}], EVIL: EVIL}))
    (folder / f"{EVIL}.json").write_text(json.dumps({"schema": EVIL}))
    run = folder / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"schema": "brim.run/1", EVIL: EVIL, "model": EVIL}))
    (run / "ledger.jsonl").write_text(json.dumps({"kind": EVIL}) + "\n")
    entry = step_of(1, splits=(Split(rank=0, phase="backward", sequences=4, into=2, length=20),))
    header = replace(HEADER, device=EVIL, versions={EVIL: EVIL}, configuration={EVIL: EVIL, "model": EVIL}, notes=(EVIL,))
    (folder / "broken").mkdir()
    writer = LedgerWriter(folder / "broken" / "ledger.jsonl", header)
    writer.write(entry)
    writer.close(finished=False, reason=EVIL)
    return folder


CASES = [
    ("estimate", EVIL, "--device", "cpu"),
    ("estimate", "odd", "--device", "cpu"),
    ("estimate", f"{EVIL}:{EVIL}"),
    ("estimate", "gpt2", "--gpu", EVIL),
    ("estimate", "gpt2", "--device", "cpu", "--config", "config.yaml"),
    ("estimate", "gpt2", f"--{EVIL}"),
    ("plan", EVIL, "--device", "cpu", "--memory", "1GiB", "--effective-batch", "4"),
    ("plan", "gpt2", "--gpu", "t4", "--effective-batch", "4", "--data", f"{EVIL}.jsonl"),
    ("models", EVIL),
    ("models", "odd"),
    ("models", "--search", EVIL),
    ("gpus", EVIL),
    ("train", EVIL, "--data", "rows.jsonl", "--device", "cpu", "--dry-run"),
    ("train", EVIL, "--data", f"{EVIL}.jsonl", "--device", "cpu", "--dry-run"),
    ("train", EVIL, "--data", "bad.jsonl", "--device", "cpu", "--dry-run"),
    ("train", EVIL, "--data", EVIL),
    ("train", "--resume", "run"),
    ("train", "--resume", EVIL),
    ("probe", "odd", "--device", "cpu"),
    ("verify", "odd"),
    ("verify", EVIL + "x"),
    ("doctor", f"{EVIL}.py"),
    ("doctor", f"{EVIL}.json"),
    ("doctor", "run"),
    ("doctor", "--explain", EVIL),
    ("observe", "-o", "observed", "--", EVIL),
    ("emulate", "--gpu", EVIL, "--", "python"),
    ("stitch", "recipe.yaml", "--dry-run"),
    ("stitch", EVIL, "--dry-run"),
    ("watch", "run", "--once"),
    ("watch", EVIL),
    ("watch", "broken", "--once"),
    ("doctor", "broken"),
    ("report", "broken", "-o", EVIL.replace("/", "") + ".html"),
    ("report", "run", "-o", "page.html"),
    ("report", f"{EVIL}.json"),
    (EVIL,),
    ("--lang", EVIL, "gpus"),
]  # fmt: skip


@pytest.mark.parametrize("words", CASES, ids=lambda words: " ".join(words).replace(EVIL, "EVIL")[:60])
def test_what_comes_from_outside_is_shown_and_not_obeyed(
    cli: Cli, words: tuple[str, ...], strange: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(strange)
    ended = cli(*words)
    printed = ended.out + ended.err
    assert not OBEYED.search(printed), repr(printed)
    assert not FORGED.search(printed), printed
    assert "This is a defect of brim" not in printed


def test_a_terminal_gets_no_sequence_but_those_of_brim(strange: Path) -> None:
    for words in (("estimate", EVIL, "--device", "cpu"), ("doctor", f"{EVIL}.py"), ("train", EVIL, "--data", "rows.jsonl")):
        main, terminal = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "brim", *words], stdin=terminal, stdout=terminal, stderr=terminal, cwd=strange
        )
        os.close(terminal)
        printed = b""
        while True:
            try:
                part = os.read(main, 1 << 16)
            except OSError:
                break
            printed += part
        process.wait()
        os.close(main)
        assert b"owned" in printed, (words, printed)
        for sequence in (b"\x1b]0;owned", b"\x1b[2J", "\x9b31m".encode(), "\u202e".encode(), b"\x07"):
            assert sequence not in printed, (words, sequence)


def test_json_has_the_same_content_and_no_controls(cli: Cli, strange: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(strange)
    ended = cli("estimate", EVIL, "--device", "cpu", "--json")
    assert ended.code == 0, ended.err
    assert not OBEYED.search(ended.out)
    assert EVIL in json.loads(ended.out)["model"]
    every = "".join(map(chr, (*range(1, 0x100), 0x202E, 0x2066, 0x2028, 0xE0041, 0x4E2D, 0x1F600)))
    assert json.loads(json_text(json.dumps({every: every}, ensure_ascii=False))) == {every: every}


def test_a_record_that_is_printed_or_shown_in_a_notebook_holds_no_controls(
    strange: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(strange)
    found = brim.estimate(EVIL, device="cpu")
    for text in (str(found), found._repr_html_() or ""):
        assert "owned" in text
        assert not OBEYED.search(text)


def test_a_page_holds_no_controls_and_no_direction_overrides() -> None:
    assert not OBEYED.search(tag("p", EVIL, title=EVIL))


def test_the_forms_of_a_text() -> None:
    assert printable("a\tb\n\x1b[0m\u202e中文 é 😀 [red]") == "a\tb\n\\x1b[0m\\u202e中文 é 😀 [red]"
    assert printable_line("a\r\n\tb\x9b") == "a\\r\\n\\tb\\x9b"
    assert message("one\nbrim: two\n  three\n") == "one\n  brim: two\n  three\n"
