"""Code that nobody would write: the audit may find nothing in it, but it may not fall over."""

from __future__ import annotations

import ast
import copy
import random
import sysconfig
from pathlib import Path

import pytest

from brim.audit.rules import RULES
from brim.audit.source.examine import examine_project
from brim.audit.source.files import parse, python_text
from brim.audit.source.module import Source
from brim.audit.source.project import Project

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
SEEDS = sorted(
    text
    for rule in RULES.values()
    if rule.group not in {"config", "run"}
    for example in (rule.bad, rule.good)
    for name, text in example.items()
    if name.endswith(".py")
)


class _Shuffled(ast.NodeTransformer):
    """Puts parts of a program in the place of other parts: still valid Python, of no sense."""

    def __init__(self, parts: list[ast.expr], chance: random.Random) -> None:
        self._parts, self._chance = parts, chance

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load) and self._chance.random() < 0.08:
            return copy.deepcopy(self._chance.choice(self._parts))
        return self.generic_visit(node)


def mutated(seed: int) -> str:
    """A valid program, made of others."""
    chance = random.Random(seed)
    for _attempt in range(50):
        trees = [ast.parse(text) for text in chance.sample(SEEDS, 2)]
        parts = [
            each for tree in trees for each in ast.walk(tree) if isinstance(each, ast.expr) and not isinstance(each, ast.Starred)
        ]
        parts = [each for each in parts if isinstance(getattr(each, "ctx", ast.Load()), ast.Load)]
        tree = trees[0]
        tree.body += trees[1].body
        _Shuffled(parts, chance).visit(tree)
        chance.shuffle(tree.body)
        for node in ast.walk(tree):
            for name in ("body", "orelse"):
                block = getattr(node, name, None)
                if isinstance(block, list) and len(block) > 1 and chance.random() < 0.2:
                    del block[chance.randrange(len(block))]
        try:
            text = ast.unparse(ast.fix_missing_locations(tree))
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            continue
        return text
    return "pass\n"


def audit(*texts: str) -> None:
    modules = [parse(Source(f"part{index}.py", text), f"part{index}") for index, text in enumerate(texts)]
    for found in examine_project(Project(modules=modules)):
        assert found.rule in RULES
        assert 1 <= found.line <= found.end_line


def _audit_library(files: list[Path]) -> None:
    read = 0
    for path in files:
        try:
            text = python_text(path.read_bytes())
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            continue
        audit(text)
        read += 1
    assert read > len(files) // 2


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_mutations_of_valid_programs_do_not_crash_the_audit(first: int) -> None:
    for seed in range(first, first + 25):
        audit(mutated(seed))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 2100, 100))
def test_two_thousand_mutations_do_not_crash_the_audit(first: int) -> None:
    for seed in range(first, first + 100):
        audit(mutated(seed))


def test_files_of_the_standard_library_do_not_crash_the_audit() -> None:
    _audit_library(sorted(LIBRARY.glob("*.py"))[::6])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_no_file_of_the_standard_library_crashes_the_audit(part: int) -> None:
    everything = sorted(each for each in LIBRARY.rglob("*.py") if "site-packages" not in each.parts)
    _audit_library(everything[part::8])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n" * 1000,
        "x = " + "(" * 80 + "1" + ")" * 80,
        "x = " + " + ".join(["batch_size"] * 300),
        "batch_size = 1\n" + "".join(f"if a{n}: batch_size = min(batch_size, {n})\n" for n in range(300)),
        "def f(batch_size):\n    return f(f(f(min(batch_size, 2))))\n",
        "def f(batch_size):\n    return g(batch_size)\ndef g(batch_size):\n    return f(batch_size)\nf(min(args.batch_size, 2))\n",
        "class A(A):\n    batch_size = 1\nclass B(C): pass\nclass C(B): pass\nB().batch_size\n",
        "batch_size = batch_size\nbatch_size = min(batch_size, batch_size)\n",
        "from . import x\nfrom .. import y\nfrom ...z import w as batch_size\n",
        "async def f():\n    async for batch in g():\n        async with h() as batch_size:\n            await min(batch_size, 2)\n",
        "match args:\n    case {'batch_size': b}:\n        batch_size = min(b, 2)\n    case _:\n        batch_size = 1\n",
        "批量大小 = 8\nbatch_size = min(args.batch_size, 2)  # 显存不足\n",
    ],
    ids=lambda text: text[:20].replace("\n", " "),
)
def test_odd_programs_do_not_crash_the_audit(text: str) -> None:
    audit(text)
