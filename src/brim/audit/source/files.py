"""Which files a target means, and their text: a script, a project folder, a notebook, a launcher."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import tokenize
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.audit.source.module import Module, Source
from brim.audit.source.project import Project
from brim.errors import UsageError
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SKIPPED_FOLDERS = frozenset(
    [
        "__pycache__",
        "node_modules",
        "site-packages",
        "dist-packages",
        "venv",
        "env",
        "build",
        "dist",
        "checkpoints",
        "wandb",
        "mlruns",
        "outputs",
        "brim-runs",
        "lightning_logs",
    ]
)
_CONFIG_ENDINGS = (".yaml", ".yml", ".json", ".toml")
_LARGEST_FILE_BYTES = 4_000_000
_LARGEST_CONFIG_BYTES = 500_000
MOST_FILES = 20_000
_MOST_IMPORTED = 60


def read_project(targets: Sequence[Path], *, gpu: str | None = None) -> Project:
    """Read and parse everything that the targets mean. A file that cannot be parsed is a note, unless it was named itself."""
    project = Project(gpu=gpu)
    seen: set[Path] = set()
    for target in targets:
        root = target if target.is_dir() else target.parent
        for path in _files(target, project):
            real = _real(path)
            if real is None:
                project.notes.append(_("{file} was not read: {why}.").format(file=path, why=_("it is a link to itself")))
            elif real not in seen:
                seen.add(real)
                _add(project, path, root, is_named=path == target)
    _add_what_is_imported(project, seen)
    return project


def _real(path: Path) -> Path | None:
    """Where a path leads to; None for a link that leads in a circle."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return None


def shown(path: Path) -> str:
    """A path as the user would type it here."""
    try:
        return str(path.resolve().relative_to(Path.cwd().resolve()))
    except (ValueError, OSError, RuntimeError):
        return str(path)


def _files(target: Path, project: Project) -> Iterator[Path]:
    if not target.is_dir():
        yield target
        yield from _beside(target)
        return
    count = 0
    for folder, folders, names in os.walk(target):
        here = Path(folder)
        folders[:] = sorted(each for each in folders if not _is_skipped(here / each))
        for name in sorted(names):
            if name.endswith((".py", ".ipynb", ".sh", ".bash", *_CONFIG_ENDINGS)):
                count += 1
                if count > MOST_FILES:
                    text = _("Only the first {count} files of {target} were read.")
                    project.notes.append(text.format(count=MOST_FILES, target=shown(target)))
                    return
                yield here / name


def _beside(script: Path) -> Iterator[Path]:
    """Launchers and configs that lie beside a script that was named alone, and speak of it."""
    if script.suffix != ".py":
        return
    for path in sorted(script.parent.glob("*")):
        is_launcher = path.suffix in {".sh", ".bash"} and path.is_file() and path.stat().st_size < _LARGEST_CONFIG_BYTES
        if is_launcher and script.name in path.read_text(encoding="utf-8", errors="replace"):
            yield path


def _is_skipped(folder: Path) -> bool:
    return folder.name.startswith(".") or folder.name in _SKIPPED_FOLDERS or (folder / "pyvenv.cfg").exists()


def _add(project: Project, path: Path, root: Path, *, is_named: bool) -> None:
    limit = _LARGEST_CONFIG_BYTES if path.suffix in _CONFIG_ENDINGS else _LARGEST_FILE_BYTES
    try:
        if not path.is_file():
            return
        if path.stat().st_size > limit and not is_named:
            if path.suffix == ".py":
                text = _("{file} was not read: it is larger than {limit} MB.")
                project.notes.append(text.format(file=shown(path), limit=limit // 1_000_000))
            return
        data = path.read_bytes()
    except OSError as error:
        why = error.strerror or str(error)
        if is_named:
            raise UsageError(_("Cannot read {path}: {why}.").format(path=path, why=why)) from error
        project.notes.append(_("{file} was not read: {why}.").format(file=shown(path), why=why))
        return
    if path.suffix in {".sh", ".bash"}:
        project.shells.append(Source(shown(path), _decoded(data)))
    elif path.suffix in _CONFIG_ENDINGS:
        project.configs.append(Source(shown(path), _decoded(data)))
    else:
        _add_module(project, path, root, data, is_named=is_named)


def _add_module(project: Project, path: Path, root: Path, data: bytes, *, is_named: bool) -> None:
    try:
        source = notebook(shown(path), data) if path.suffix == ".ipynb" else Source(shown(path), python_text(data))
        project.modules.append(parse(source, _module_name(path, root)))
        project.notes += source.notes
    except (RecursionError, MemoryError):
        project.notes.append(_("{file} was not read: its code is nested too deeply.").format(file=shown(path)))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"{shown(path)}:{line}" if line else shown(path)
        why = getattr(error, "msg", None) or str(error)
        if is_named:
            raise UsageError(_("{where} is not valid Python: {why}.").format(where=where, why=why)) from error
        project.notes.append(_("{where} was not audited, for it is not valid Python: {why}.").format(where=where, why=why))


def parse(source: Source, name: str) -> Module:
    """A module of a text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source.text, filename=source.file)
    return Module(source, name, tree, _imports(tree, name, is_package=source.file.endswith("__init__.py")))


def python_text(data: bytes) -> str:
    """The text of a Python file, in the encoding that it declares; line ends become \\n, as `ast` counts them."""
    encoding, _lines = tokenize.detect_encoding(io.BytesIO(data).readline)
    text = data.decode(encoding)
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", " ")


def _decoded(data: bytes) -> str:
    return data.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")


_MAGIC = re.compile(r"^(?P<indent>\s*)(?:[%!]|\?{1,2}[\w.]|[\w.]+\s*\?{1,2}\s*$)")
_CAPTURED = re.compile(r"^(?P<head>\s*[\w, .]+=\s*)[%!]\S")


def notebook(file: str, data: bytes) -> Source:
    """The code cells of a notebook, one after another, line for line; what is no Python in them is taken out."""
    document = json.loads(data.decode("utf-8-sig"))
    cells = document.get("cells") if isinstance(document, dict) else None
    if not isinstance(cells, list):
        raise ValueError(_("it is no notebook of format 4"))  # noqa: TRY004 (the file is wrong, not a type)
    text: list[str] = []
    starts: list[int] = []
    notes: list[str] = []
    for cell in cells:
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        starts.append(len(text) + 1)
        lines = _cell_lines(cell.get("source", ""))
        read = _python_of(lines)
        if read is None:
            notes.append(_("{file}: cell {cell} was not read, for it is no Python.").format(file=file, cell=len(starts)))
        text += read or [""] * len(lines)
    return Source(file, "\n".join(text) + "\n", tuple(starts), tuple(notes))


def _python_of(lines: list[str]) -> list[str] | None:
    """A cell as Python: as it is, or without its magic and shell lines; None if it is none."""
    is_foreign = bool(lines) and lines[0].startswith("%%") and not lines[0].startswith(("%%time", "%%capture"))
    if is_foreign:
        return None
    if _parses(lines):
        return lines
    plain: list[str] = []
    goes_on = False
    for line in lines:
        magic = _MAGIC.match(line)
        captured = _CAPTURED.match(line)
        if goes_on:
            plain.append("")
        elif captured is not None:
            plain.append(captured["head"] + "None")
        elif magic is not None:
            plain.append(magic["indent"] + "pass")
        else:
            plain.append(line)
        goes_on = (goes_on or magic is not None or captured is not None) and line.rstrip().endswith("\\")
    return plain if _parses(plain) else None


def _parses(lines: list[str]) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse("\n".join(lines) + "\n")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _cell_lines(source: Any) -> list[str]:
    whole = "".join(source) if isinstance(source, list) else str(source)
    return whole.replace("\r\n", "\n").split("\n")


def _module_name(path: Path, root: Path) -> str:
    try:
        parts = list(path.resolve().relative_to(root.resolve()).with_suffix("").parts)
    except ValueError:
        parts = [path.stem]
    if parts and parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def _imports(tree: ast.Module, name: str, *, is_package: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = alias.name if alias.asname else alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".") if is_package else name.split(".")[:-1]
                kept = package[: len(package) - (node.level - 1)] if node.level > 1 else package
                base = ".".join([*kept, *([base] if base else [])])
            for alias in node.names:
                found[alias.asname or alias.name] = f"{base}.{alias.name}" if base else alias.name
    return found


def _add_what_is_imported(project: Project, seen: set[Path]) -> None:
    """A script that was named alone still brings the files that it imports from its own folder."""
    waiting, named = list(project.modules), len(project.modules)
    asked: set[Path] = set()
    while waiting and len(project.modules) < named + _MOST_IMPORTED:
        module = waiting.pop(0)
        folder = Path(module.source.file).parent
        root = folder
        for _part in module.name.split(".")[:-1]:
            root = root.parent
        for target in sorted(set(module.imports.values())):
            for base in {root, folder}:
                for path in _candidates(base, target):
                    # Most names are of libraries, and there is no such file: asked for once, and before anything dearer.
                    if path in asked:
                        continue
                    asked.add(path)
                    if not os.path.isfile(path):  # noqa: PTH113 (is_file() takes several times as long)
                        continue
                    real = _real(path)
                    if real is not None and real not in seen:
                        seen.add(real)
                        before = len(project.modules)
                        _add(project, path, base, is_named=False)
                        waiting += project.modules[before:]


def _candidates(base: Path, dotted: str) -> Iterator[Path]:
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        stem = base.joinpath(*parts[:length])
        yield stem.with_suffix(".py") if stem.name else stem
        yield stem / "__init__.py"
