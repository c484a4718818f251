"""`# brim: ignore` holds back what it names, where it stands, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from brim.audit.ignoring import hold_back, wishes_of
from brim.audit.source.module import Source
from tests.audit.parts import add_rules, found


@pytest.fixture(autouse=True)
def _rules(monkeypatch: pytest.MonkeyPatch) -> None:
    add_rules(monkeypatch)


def is_held(text: str, line: int, *, rule: str = "test-high", file: str = "train.py") -> bool:
    kept, count, _notes = hold_back([found(file, line, rule=rule)], {file: Source(file, text)})
    assert count == 1 - len(kept)
    return count == 1


def notes_of(text: str, file: str = "train.py") -> list[str]:
    return wishes_of(Source(file, text)).notes


@pytest.mark.parametrize(
    "comment",
    [
        "# brim: ignore",
        "# brim: ignore[test-high]",
        "# brim: ignore[test-low, test-high]",
        "#brim:ignore[ TEST-HIGH ]",
        "# noqa  # brim: ignore[test-high]",
        "# brim: ignore[test-high] because the card is small",
        "# brim: ignore, the card is small",
    ],
)
def test_a_comment_on_the_line_holds_back(comment: str) -> None:
    assert is_held(f"a = 1\nsize = min(x, 2)  {comment}\n", 2)
    assert not is_held(f"a = 1\nsize = min(x, 2)  {comment}\n", 1)


@pytest.mark.parametrize(
    "comment",
    [
        "# brim: ignore[test-low]",
        "# brim: ignored",
        "# brim: ignore-this",
        "# brim: ignore[]",
        "# ignore",
        "# brim: ignore[test-high",
    ],
)
def test_other_comments_do_not(comment: str) -> None:
    assert not is_held(f"size = min(x, 2)  {comment}\n", 1)


def test_a_line_of_its_own_directly_above_counts() -> None:
    assert is_held("# brim: ignore[test-high]\nsize = min(x, 2)\n", 2)
    assert is_held("# brim: ignore[test-high]\n# the card is small\nsize = min(x, 2)\n", 3)
    assert is_held("if a:\n    # brim: ignore\n    size = min(x, 2)\n", 3)
    assert not is_held("# brim: ignore[test-high]\n\nsize = min(x, 2)\n", 3)
    assert not is_held("a = 1  # brim: ignore[test-high]\nsize = min(x, 2)\n", 2)


def test_the_first_line_of_the_statement_counts_and_the_line_above_it() -> None:
    call = "loader = DataLoader(  # brim: ignore[test-high]\n    data,\n    batch_size=min(x, 2),\n)\n"
    assert is_held(call, 3)
    assert is_held("# brim: ignore\n" + call.replace("  # brim: ignore[test-high]", ""), 4)
    assert not is_held(call + "b = 1\n", 5)


def test_the_head_of_a_compound_statement_does_not_hold_back_its_body() -> None:
    assert not is_held("for a in b:  # brim: ignore\n    size = min(x, 2)\n", 2)
    assert is_held("for a in b:  # brim: ignore\n    size = min(x, 2)\n", 1)


@pytest.mark.parametrize(
    "text",
    [
        'size = min(x, 2); text = "# brim: ignore"\n',
        "text = '''\n# brim: ignore\n'''; size = min(x, 2)\n",
        'f"# brim: ignore {x}"; size = min(x, 2)\n',
    ],
)
def test_words_inside_a_string_are_a_string(text: str) -> None:
    assert not any(is_held(text, line) for line in range(1, text.count("\n") + 1))


def test_ignore_file_counts_in_the_first_ten_lines() -> None:
    assert is_held("# brim: ignore-file[test-high]\n" + "a = 1\n" * 40, 41)
    assert not is_held("# brim: ignore-file[test-low]\n" + "a = 1\n" * 40, 41)
    assert is_held("\n" * 9 + "# brim: ignore-file\n" + "a = 1\n" * 40, 30)
    late = "\n" * 10 + "# brim: ignore-file\n" + "a = 1\n" * 40
    assert not is_held(late, 30)
    assert "below line 10" in notes_of(late)[0]


def test_a_rule_that_there_is_not_is_told() -> None:
    (note,) = notes_of("a = 1\nb = 2  # brim: ignore[test-hihg, test-low]\n")
    assert "train.py:2" in note
    assert "'test-hihg'" in note
    assert "Nearest: test-high" in note
    assert "no closing bracket" in notes_of("b = 2  # brim: ignore[test-high\n")[0]
    assert notes_of("b = 2  # brim: ignore[test-high]\n") == []


def test_yaml_comments_count_and_yaml_strings_do_not() -> None:
    held = "batch: 2  # brim: ignore[test-high]\nother: 2\n"
    assert is_held(held, 1, file="a.yaml")
    assert not is_held(held, 2, file="a.yaml")
    assert is_held("# brim: ignore\nbatch: 2\n", 2, file="a.yml")
    assert not is_held("batch: '# brim: ignore'\n", 1, file="a.yaml")
    assert not is_held("batch: x# brim: ignore\n", 1, file="a.yaml")
    assert not is_held("text: |\n  # brim: ignore\n  b\nbatch: 2\n", 3, file="a.yaml")


def test_shell_comments_count_and_shell_strings_do_not() -> None:
    assert is_held("python train.py --batch 64  # brim: ignore[test-high]\n", 1, file="run.sh")
    assert is_held("# brim: ignore\npython train.py\n", 2, file="run.sh")
    assert not is_held('echo "# brim: ignore"; python train.py\n', 1, file="run.sh")
    assert not is_held('echo "\n# brim: ignore\n"\n', 3, file="run.sh")
    assert not is_held("cat <<'END'\n# brim: ignore\nEND\n", 3, file="run.sh")
    assert is_held("cat <<END\ntext\nEND\n# brim: ignore\npython train.py\n", 5, file="run.sh")
    assert is_held("echo it\\'s # brim: ignore\n", 1, file="run.sh")
    assert is_held("batch = 2  # brim: ignore\n", 1, file="pyproject.toml")


def test_files_that_cannot_be_read_hold_back_what_can_be_read() -> None:
    assert is_held("a = min(x, 2)  # brim: ignore\nb = (\n", 1)
    assert not is_held('a: "x  # brim: ignore\n', 1, file="a.yaml")
    assert not is_held('{"a": "# brim: ignore"}', 1, file="a.json")


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(["# brim: ignore[a]", "'", '"', "\n", "\\", "(", ":", " ", "a", "\t", "<<E", "|", "#", "\0", "批", "\f"]),
        max_size=30,
    ),
    ending=st.sampled_from([".py", ".ipynb", ".yaml", ".sh", ".toml", ".json"]),
)
def test_no_text_is_too_strange(parts: list[str], ending: str) -> None:
    wishes_of(Source(f"a{ending}", "".join(parts)))
