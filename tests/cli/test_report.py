"""`brim report` as a person types it."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from brim.cli._subject import read_subject
from brim.cli.report import report
from brim.errors import UsageError
from brim.records import Observation
from tests.pictures import made
from tests.pictures.reading import Page

if TYPE_CHECKING:
    from tests.conftest import Cli


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made.run(tmp_path / "run", steps=30)


def test_a_run_gets_a_page_in_its_folder(cli: Cli, run: Path) -> None:
    ended = cli("report", str(run))
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.strip() == str(run / "report.html")
    assert "The promise was kept." in Page.of((run / "report.html").read_text(encoding="utf-8")).text
    again = cli("report", str(run / "ledger.jsonl"))
    assert (again.code, again.out) == (0, ended.out)


def test_json_says_where_and_what(cli: Cli, run: Path) -> None:
    document = json.loads(cli("report", str(run), "--json").out)
    page = Path(document["path"])
    assert document["schema"] == "brim.report/1"
    assert document["bytes"] == page.stat().st_size
    assert document["sections"] == [
        "verdict", "plan", "memory", "speed", "timeline", "data", "loss", "slices", "findings", "proofs", "repeat",
    ]  # fmt: skip


def test_a_plan_and_a_probe_get_pages_beside_them(cli: Cli, tmp_path: Path) -> None:
    plan = made.plan().write(tmp_path / "my plan.json")
    assert cli("report", str(plan)).out.strip() == str(tmp_path / "my plan.html")
    probe = made.probe().write(tmp_path / "probe.json")
    assert report(probe, tmp_path / "other.html") == tmp_path / "other.html"
    assert not (tmp_path / "probe.html").exists()


def test_only_pages_of_brim_are_replaced(cli: Cli, tmp_path: Path) -> None:
    plan = made.plan().write(tmp_path / "plan.json")
    page = tmp_path / "plan.html"
    page.write_text("<p>Mine.</p>", encoding="utf-8")
    ended = cli("report", str(plan))
    assert ended.code == 2
    assert "is not a page that brim made" in ended.err
    assert page.read_text(encoding="utf-8") == "<p>Mine.</p>"
    ended = cli("report", str(plan), "-o", str(plan))
    assert ended.code == 2
    assert json.loads(plan.read_text(encoding="utf-8"))["schema"] == "brim.plan/1"
    page.unlink()
    assert cli("report", str(plan)).code == cli("report", str(plan)).code == 0
    assert not list(tmp_path.glob(".*"))


def test_what_is_no_record_is_refused_with_what_can_be_given(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    files = {
        "notes.txt": "hello", "data.json": "[1, 2]", "broken.json": "{", "foreign.json": '{"schema": "other/1"}', "data.jsonl": '{"a": 1}\n',
        "binary.json": "\x00\x01", "number.json": '{"schema": 3}',
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    for name in (*files, "empty", "missing", ".", ""):
        ended = cli("report", str(tmp_path / name) if name else "")
        assert ended.code == 2, name
        assert ended.err.startswith("brim: "), name
        assert ended.out == "", name
    assert "ledger.jsonl, or a file of brim plan" in cli("report", str(tmp_path / "notes.txt")).err
    assert not list(tmp_path.glob("**/*.html"))


def test_a_page_that_cannot_be_written_is_told_before_any_work(cli: Cli, run: Path, tmp_path: Path) -> None:
    for output in (str(tmp_path), "", str(tmp_path / "nowhere" / "page.html")):
        assert cli("report", str(run), "-o", output).code == 2
    assert not (run / "report.html").exists()


def test_a_broken_record_beside_a_ledger_is_told_on_the_page(run: Path) -> None:
    (run / "plan.json").write_text("{", encoding="utf-8")
    (run / "timeline.json").write_text('{"schema": "brim.timeline/1", "phase": [1]}', encoding="utf-8")
    with (run / "evaluations.jsonl").open("a", encoding="utf-8") as stream:
        stream.write('broken\n{"torn')
    subject = read_subject(run)
    assert subject.plan is None
    assert subject.timeline is None
    assert len(subject.evaluations) == 1
    text = Page.of(report(run).read_text(encoding="utf-8")).text
    for words in ("plan.json is not valid JSON", "timeline.json is not a timeline", "evaluations.jsonl, line 2"):
        assert words in text


def test_a_run_that_goes_on_can_be_drawn(run: Path) -> None:
    lines = (run / "ledger.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (run / "ledger.jsonl").write_text("".join(lines[:12]) + lines[12][:40], encoding="utf-8")
    assert "the last line is that of step 11 of 200" in Page.of(report(run).read_text(encoding="utf-8")).text


def test_of_two_evaluations_of_one_step_the_later_counts(run: Path) -> None:
    first, second = made.evaluations(40)
    changed = made.evaluations(0)[0]
    (run / "evaluations.jsonl").write_text("".join(map(made.line, (first, second, changed))), encoding="utf-8")
    assert [each.step for each in read_subject(run).evaluations] == [0, 40]


def test_an_observed_run_is_drawn_from_its_folder(tmp_path: Path) -> None:
    made.ledger(tmp_path / "ledger.jsonl", list(made.entries(25)))
    Observation(
        command=("python", "train.py"), started_at=made.STARTED, seconds=3.0, exit_code=0, reach="steps", script="train.py",
        versions={"torch": "2.13.0"}, settings={},
    ).write(tmp_path / "observation.json")  # fmt: skip
    text = Page.of(report(tmp_path).read_text(encoding="utf-8")).text
    assert "train.py, observed" in text
    assert "brim observe -- python train.py" in text


def test_the_commands_ask_the_same_question() -> None:
    from brim.cli._repeating import commands_of

    (planned,) = commands_of(plan=made.plan())
    assert shlex.split(planned) == [
        "brim", "plan", "tiny-llama", "--task", "causal-lm", "--seq-len", "300", "--effective-batch", "32", "--data", "data/notes.jsonl",
        "--tokenizer", "tiny-llama", "--device", "cpu", "--memory", str(made.LIMIT),
    ]  # fmt: skip
    (probed,) = commands_of(probe=made.probe())
    assert probed.startswith("brim probe tiny-llama ")
    assert probed.endswith(f"--device cpu --memory {made.LIMIT}")
    (verified,) = commands_of(verification=made.verification())
    assert verified == "brim verify tiny-llama"


def test_a_page_opens_in_the_browser_that_is_there(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def open_once(address: str) -> bool:
        opened.append(address)
        return len(opened) == 1

    monkeypatch.setattr("webbrowser.open", open_once)
    assert cli("report", str(run), "--open").err == ""
    assert opened == [(run / "report.html").resolve().as_uri()]
    assert "No browser could be opened" in cli("report", str(run), "--open").err


def test_a_report_needs_no_torch(run: Path) -> None:
    import subprocess

    code = "import sys; from brim.cli.report import report; report(sys.argv[1]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(run)], check=True, env=dict(os.environ), timeout=120)


def test_the_python_function_refuses_like_the_command(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no file or folder"):
        report(tmp_path / "nothing.json")
