"""brim speaks Chinese as well as English: every sentence, all of it, wherever the user asks for it."""

from __future__ import annotations

import ast
import io
import re
import string
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from babel.messages.extract import DEFAULT_KEYWORDS, extract_from_dir
from babel.messages.mofile import read_mo, write_mo
from babel.messages.pofile import read_po

import brim
from brim.locale import DOMAIN, FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from babel.messages.catalog import Catalog

    from tests.conftest import Cli

SOURCE: Final = Path(brim.__file__).parent
PO: Final = FOLDER / "zh_CN" / "LC_MESSAGES" / f"{DOMAIN}.po"
MO: Final = PO.with_suffix(".mo")

CHINESE: Final = re.compile(r"[\u4e00-\u9fff]")

# Names that a Chinese engineer writes in English too, and sentences that are nothing but placeholders.
SAME_IN_BOTH: Final = {
    "{micro} × {accumulation} (gradient accumulation) = {effective}",
    "{path}: {why}",
    "{place}: {fault}.",
    "{place}: {message}",
    "{verdict}: {limit}",
    "{size} of {limit}",
    "CPU",
    "Flash attention",
    "GPU {index}",
    "GPU",
    "flash",
    "the Hub",
    "rank {rank}, {moment}",
    "{path}: {key}: {why}",
    "{where}: {field}: {why}.",
    "brim verify MODEL; brim verify --run DIR",
    "chmod 600 {path}",
}


@cache
def sentences_in_the_code() -> frozenset[str]:
    """What `pybabel extract -k N_` finds."""
    found = extract_from_dir(
        str(SOURCE),
        [("**.py", "python"), ("**/rules/*.md", "brim.audit.rules.rule:messages_of")],
        keywords={**DEFAULT_KEYWORDS, "N_": None},
    )
    messages = [message for _file, _line, message, _comments, _context in found]
    assert all(isinstance(message, str) for message in messages), "plural forms have no place in brim's catalogue"
    return frozenset(str(message) for message in messages if message)


@cache
def catalogue() -> Catalog:
    with PO.open("rb") as stream:
        return read_po(stream, locale="zh_CN", abort_invalid=True)


def pairs() -> dict[str, str]:
    """English to Chinese, as the catalogue has it."""
    return {str(message.id): str(message.string) for message in catalogue() if message.id}


def fields(text: str) -> list[tuple[str, str, str]]:
    """The placeholders of a sentence in a fixed order: name, format, conversion."""
    parsed = string.Formatter().parse(text)
    return sorted((name, spec or "", conversion or "") for _literal, name, spec, conversion in parsed if name is not None)


def listed(heading: str, messages: list[str]) -> str:
    return "".join([heading, *(f"\n  msgid {message!r}" for message in sorted(messages))]) if messages else ""


def test_every_sentence_has_a_chinese_one_and_none_is_left_over() -> None:
    known, used = pairs(), sentences_in_the_code()
    troubles = [
        listed("Add to brim.po:", [message for message in used if message not in known]),
        listed("Translate in brim.po:", [message for message in used if message in known and not known[message].strip()]),
        listed("Remove from brim.po, no code says it:", [message for message in known if message not in used]),
        listed("Remove from brim.po, obsolete:", [str(message) for message in catalogue().obsolete]),
        listed("Check in brim.po, fuzzy:", [str(message.id) for message in catalogue() if message.id and message.fuzzy]),
    ]
    told = "\n".join(trouble for trouble in troubles if trouble)
    assert not told, f"{PO} and the code differ.\n{told}\nThen run `make translations`."


def test_both_languages_take_the_same_values() -> None:
    different = [english for english, chinese in pairs().items() if fields(english) != fields(chinese)]
    assert not different, listed("Placeholders differ in brim.po:", different)


def test_every_chinese_sentence_can_be_filled_in() -> None:
    for english, chinese in pairs().items():
        values = {name: 1 for name, _spec, _conversion in fields(english)}
        filled = chinese.format(**values)
        assert "{" not in filled, english


def test_beginnings_and_ends_meet_their_neighbours_alike() -> None:
    """Help texts keep their paragraphs, and no sentence ends in a blank or a line break of its own."""
    for english, chinese in pairs().items():
        assert chinese.count("\n") == english.count("\n"), english
        assert chinese == chinese.rstrip(), english


def test_the_compiled_catalogue_is_the_one_that_people_edit() -> None:
    compiled = io.BytesIO()
    write_mo(compiled, catalogue())
    compiled.seek(0)
    with MO.open("rb") as stream:
        shipped = {message.id: message.string for message in read_mo(stream) if message.id}
    fresh = {message.id: message.string for message in read_mo(compiled) if message.id}
    assert shipped == fresh, "brim.mo is older than brim.po: run `make translations`."


def test_no_chinese_sentence_was_left_in_english() -> None:
    english_only = {english for english, chinese in pairs().items() if not CHINESE.search(chinese)}
    assert english_only - SAME_IN_BOTH == set(), "translate these in brim.po, or list them in SAME_IN_BOTH"
    assert SAME_IN_BOTH - english_only == set(), "these are translated or gone: take them off SAME_IN_BOTH"


def calls_for_translation() -> Iterator[tuple[str, str, list[ast.expr], bool]]:
    """Every call of `_` and `N_`: where, which, its arguments, whether they are plain."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name in {"_", "N_"}:
                yield f"{path.relative_to(SOURCE.parent)}:{node.lineno}", name, node.args, not node.keywords


def is_sentence(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Constant) and isinstance(argument.value, str)


def is_marked_elsewhere(argument: ast.expr) -> bool:
    """A variable that holds a sentence marked with `N_`, or one of several."""
    if isinstance(argument, ast.BoolOp) and isinstance(argument.op, ast.Or):
        return all(is_sentence(each) or is_marked_elsewhere(each) for each in argument.values)
    return isinstance(argument, ast.Name | ast.Attribute)


def test_extraction_sees_every_sentence() -> None:
    """Values enter after the look-up: an f-string, a sum or a `.format` inside `_` would never be found in the catalogue."""
    calls = list(calls_for_translation())
    assert calls
    hidden = [
        f"{where}: {name}({', '.join(ast.unparse(argument) for argument in arguments)})"
        for where, name, arguments, plain in calls
        if not plain
        or len(arguments) != 1
        or not (is_sentence(arguments[0]) or (name == "_" and is_marked_elsewhere(arguments[0])))
    ]
    assert not hidden, "give `_` and `N_` one whole sentence, and format what they return:\n" + "\n".join(hidden)


def test_the_lang_option_speaks_chinese(shell: Cli) -> None:
    ended = shell("--lang", "zh_CN", "--help")
    assert ended.code == 0
    assert "用法: brim" in ended.out
    assert "选项:" in ended.out
    assert "Options" not in ended.out
    assert ended.err == ""


def test_brim_lang_speaks_chinese(shell: Cli) -> None:
    ended = shell("gpus", "t4", environment={"BRIM_LANG": "zh_CN"})
    assert ended.code == 0
    assert re.search(r"^名称 +t4$", ended.out, re.MULTILINE)
    assert "显存带宽" in ended.out
    assert "Memory bandwidth" not in ended.out


def test_a_chinese_locale_speaks_chinese_about_mistakes_too(shell: Cli) -> None:
    ended = shell("foo", environment={"LANG": "zh_CN.UTF-8"})
    assert ended.code == 2
    assert "没有 'foo' 这个命令" in ended.err
    assert "There is no command" not in ended.err
    assert ended.out == ""


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (("--lang", "en", "--help"), {"LANG": "zh_CN.UTF-8"}),
        (("--lang=en", "--help"), {"BRIM_LANG": "zh_CN"}),
        (("--help",), {"BRIM_LANG": "en", "LANG": "zh_CN.UTF-8"}),
        (("--help",), {"LC_ALL": "C", "LANG": "zh_CN.UTF-8"}),
        (("--help",), {"LC_ALL": "C"}),
        (("--help",), {"LANG": "fr_FR.UTF-8"}),
        (("--help",), {}),
    ],
)
def test_english_is_spoken_where_it_is_asked_for_or_nothing_is(
    shell: Cli, arguments: tuple[str, ...], environment: dict[str, str]
) -> None:
    ended = shell(*arguments, environment=environment)
    assert ended.code == 0
    assert "Usage: brim" in ended.out
    assert "Options:" in ended.out
    assert not CHINESE.search(ended.out)
