"""Every malformed file is refused in one message that says where and why; nothing is written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from brim.errors import UsageError
from brim.trainer.data.check import check_file
from brim.trainer.data.prepare import prepare_data
from tests.trainer.data.malformed import ALL, GOOD, ON_A_LINE, STRUCTURAL, Malformed
from tests.trainer.data.tokenizers_here import CHATML, tokenizer


@pytest.fixture(scope="module")
def words() -> Any:
    return tokenizer(template=CHATML)


def test_at_least_sixty_name_a_line_and_no_two_are_the_same() -> None:
    assert len({each.name for each in ALL}) == len(ALL)
    assert len(ON_A_LINE) >= 60


@pytest.mark.parametrize("bad", STRUCTURAL, ids=lambda bad: bad.name)
def test_the_first_look_says_where_and_why(bad: Malformed, tmp_path: Path) -> None:
    path = bad.write(tmp_path)
    with pytest.raises(UsageError) as caught:
        check_file(path, task=bad.task, columns=bad.columns, max_bad=0)
    for word in bad.words:
        assert word in caught.value.message


@pytest.mark.parametrize("bad", ALL, ids=lambda bad: bad.name)
def test_preparing_says_the_same_and_leaves_nothing_behind(bad: Malformed, tmp_path: Path, words: Any) -> None:
    path, cache = bad.write(tmp_path), tmp_path / "cache"
    with pytest.raises(UsageError) as caught:
        prepare_data(
            path,
            tokenizer=words,
            tokenizer_name="words",
            task=bad.task,
            columns=bad.columns,
            max_length=64,
            cache=cache,
            say=print,
        )
    for word in bad.words:
        assert word in caught.value.message
    assert not cache.exists() or not list(cache.iterdir())


def test_many_bad_rows_are_one_message_with_the_first_ten_and_the_number_of_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join('{"prompt": "a", "response": "b"}\n{"prompt": 1\n' for _row in range(15)))
    with pytest.raises(UsageError) as caught:
        check_file(path, task=None, columns=None, max_bad=14)
    lines = caught.value.message.splitlines()
    assert lines[0].endswith(": 15, and 14 are allowed.")
    assert [line.partition(":")[0].strip() for line in lines[1:11]] == [f"a.jsonl, line {number}" for number in range(2, 22, 2)]
    assert lines[11:] == ["  and 5 more"]
    assert "--max-bad 15" in (caught.value.hint or "")
    check_file(path, task=None, columns=None, max_bad=15)


def test_bad_rows_alone_are_no_data_however_many_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{\n{\n")
    with pytest.raises(UsageError, match="Every row of .* is bad"):
        check_file(tmp_path / "a.jsonl", task=None, columns=None, max_bad=5)


def test_the_first_look_ends_after_its_share_of_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brim.trainer.data.check.CHECKED_BYTES", 10_000)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a stone"}\n' * 1000 + "oops\n")
    check_file(path, task=None, columns=None, max_bad=0)
    path.write_text("oops\n" + '{"text": "a stone"}\n' * 1000)
    with pytest.raises(UsageError, match="1 or more, and 0 are allowed"):
        check_file(path, task=None, columns=None, max_bad=0)


def test_the_first_look_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f"{GOOD}".replace("'", '"'))
    code = (
        "import sys; from brim.trainer.data.check import check_file; "
        f"check_file({str(tmp_path / 'a.jsonl')!r}, task='causal-lm', columns=None, max_bad=0); "
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
