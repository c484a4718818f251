"""The shadow folder: a command sees its own writes, and the user's files stay as they were."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from brim.emulator.agent.shadow import default_passed

AGENT = Path(__file__).parents[2] / "src" / "brim" / "emulator"

PRELUDE = """
import builtins, glob, io, os, pathlib, shutil, sys, tempfile
sys.path.insert(0, {agent!r})
from agent import redirect, shadow
made = shadow.Shadow({root!r}, ())
redirect.install(made)
"""


def in_shadow(tmp_path: Path, code: str) -> str:
    """Run code in a fresh interpreter whose working folder is shadowed; what it prints."""
    root, work = tmp_path / "root", tmp_path / "work"
    root.mkdir(exist_ok=True)
    work.mkdir(exist_ok=True)
    prelude = PRELUDE.format(agent=str(AGENT), root=str(root))
    done = subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(code)], cwd=work, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def fingerprint(folder: Path) -> dict[str, str]:
    """Every file and folder below, with the content of files."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "work" / "out" / "checkpoint-60"
    folder.mkdir(parents=True)
    (folder / "model.bin").write_bytes(b"precious" * 100)
    (folder / "state.json").write_text('{"step": 60}')
    return tmp_path / "work"


WRITES = {
    "overwrite": "open('out/checkpoint-60/model.bin', 'wb').write(b'zeros')",
    "append": "open('out/checkpoint-60/model.bin', 'ab').write(b'zeros')",
    "update in place": "f = open('out/checkpoint-60/model.bin', 'r+b'); f.write(b'zeros'); f.close()",
    "os.open": "d = os.open('out/checkpoint-60/model.bin', os.O_WRONLY | os.O_TRUNC); os.write(d, b'zeros'); os.close(d)",
    "io.open": "io.open('out/checkpoint-60/model.bin', 'w').write('zeros')",
    "pathlib": "pathlib.Path('out/checkpoint-60/model.bin').write_text('zeros')",
    "pathlib unlink": "pathlib.Path('out/checkpoint-60/model.bin').unlink()",
    "remove": "os.remove('out/checkpoint-60/model.bin')",
    "rmtree": "shutil.rmtree('out')",
    "rename file": "os.rename('out/checkpoint-60/model.bin', 'out/other.bin')",
    "replace file": "open('new', 'w').write('zeros'); os.replace('new', 'out/checkpoint-60/model.bin')",
    "rename folder": "os.rename('out/checkpoint-60', 'out/best')",
    "move": "shutil.move('out/checkpoint-60', 'elsewhere')",
    "truncate": "os.truncate('out/checkpoint-60/model.bin', 3)",
    "chmod": "os.chmod('out/checkpoint-60/model.bin', 0o600)",
    "touch": "pathlib.Path('out/checkpoint-60/model.bin').touch()",
    "new file": "open('out/checkpoint-60/more.bin', 'w').write('zeros')",
    "new folders": "os.makedirs('out/checkpoint-63/deep'); open('out/checkpoint-63/deep/model.bin', 'w').write('zeros')",
    "copytree": "shutil.copytree('out/checkpoint-60', 'out/copy')",
    "symlink": "os.symlink('out', 'latest')",
    "link": "os.link('out/checkpoint-60/model.bin', 'hard'); open('hard', 'w').write('zeros')",
    "through a link": "os.symlink('out/checkpoint-60/model.bin', 'soft'); open('soft', 'w').write('zeros')",
    "upper folder": "open(os.path.join('..', os.path.basename(os.getcwd()), 'out/checkpoint-60/model.bin'), 'w').write('zeros')",
    "after chdir": "os.chdir('out/checkpoint-60'); open('model.bin', 'w').write('zeros')",
    "bz2": "import bz2; bz2.open('out/checkpoint-60/model.bin', 'w').write(b'zeros')",
    "bytes as a path": "open(b'out/checkpoint-60/model.bin', 'w').write('zeros')",
    "copy2 over it": "open('n', 'w').write('zeros'); shutil.copy2('n', 'out/checkpoint-60/model.bin')",
    "chown": "os.chown('out/checkpoint-60/model.bin', os.getuid(), os.getgid())",
    "temporary file beside it": "f = tempfile.NamedTemporaryFile(dir='out', delete=False); f.write(b'zeros'); f.close()",
}


@pytest.mark.parametrize("code", WRITES.values(), ids=WRITES)
def test_no_write_reaches_the_users_files(tmp_path: Path, checkpoint: Path, code: str) -> None:
    before, modified = fingerprint(checkpoint), (checkpoint / "out/checkpoint-60/model.bin").stat().st_mtime_ns
    in_shadow(tmp_path, code)
    assert fingerprint(checkpoint) == before
    assert (checkpoint / "out/checkpoint-60/model.bin").stat().st_mtime_ns == modified


SEEN = {
    "what it wrote": (
        "open('a', 'w').write('x'); print(open('a').read(), os.path.exists('a'), os.stat('a').st_size)",
        "x True 1",
    ),
    "old content when appending": (
        "open('out/checkpoint-60/state.json', 'a').write('+'); print(open('out/checkpoint-60/state.json').read())",
        '{"step": 60}+',
    ),
    "that it deleted": (
        "os.remove('out/checkpoint-60/model.bin'); print(os.path.exists('out/checkpoint-60/model.bin'), os.listdir('out/checkpoint-60'))",
        "False ['state.json']",
    ),
    "that a folder is gone": (
        "shutil.rmtree('out'); print(os.path.exists('out'), os.path.exists('out/checkpoint-60/model.bin'))",
        "False False",
    ),
    "a folder made again": ("shutil.rmtree('out'); os.mkdir('out'); print(os.listdir('out'))", "[]"),
    "both folders in a listing": (
        "os.mkdir('out/checkpoint-63'); print(sorted(os.listdir('out')), sorted(e.name for e in os.scandir('out')))",
        "['checkpoint-60', 'checkpoint-63'] ['checkpoint-60', 'checkpoint-63']",
    ),
    "glob": (
        "os.mkdir('out/checkpoint-63'); print(sorted(glob.glob('out/checkpoint-*')))",
        "['out/checkpoint-60', 'out/checkpoint-63']",
    ),
    "a renamed folder": (
        "os.rename('out/checkpoint-60', 'out/best'); print(os.listdir('out'), sorted(os.listdir('out/best')))",
        "['best'] ['model.bin', 'state.json']",
    ),
    "copytree of what it wrote": (
        "os.mkdir('m'); open('m/a', 'w').write('x'); shutil.copytree('m', 'n'); print(os.listdir('n'))",
        "['a']",
    ),
    "its working folder": (
        "here = os.getcwd(); os.mkdir('d'); os.chdir('d'); print(os.getcwd() == here + '/d', os.path.exists('../out'))",
        "True True",
    ),
    "entries of a listing": (
        "os.mkdir('d'); open('d/a', 'w').write('x'); print([open(e.path).read() for e in os.scandir('d')])",
        "['x']",
    ),
    "free space": ("os.mkdir('d'); print(shutil.disk_usage('d').total > 0)", "True"),
    "a link that is copied as a link": (
        "os.symlink('out', 'l'); shutil.copy2('l', 'k', follow_symlinks=False); print(os.readlink('k'))",
        "out",
    ),
    "pathlib": (
        "p = pathlib.Path('out/checkpoint-63'); p.mkdir(); (p / 'a').write_text('b'); print(p.is_dir(), [q.name for q in p.iterdir()], (p / 'a').read_text())",
        "True ['a'] b",
    ),
    "a file moved over another": (
        "open('n', 'w').write('new'); os.replace('n', 'out/checkpoint-60/state.json'); print(open('out/checkpoint-60/state.json').read(), os.path.exists('n'))",
        "new False",
    ),
}


@pytest.mark.parametrize(("code", "printed"), SEEN.values(), ids=SEEN)
@pytest.mark.usefixtures("checkpoint")
def test_the_command_sees_its_own_writes(tmp_path: Path, code: str, printed: str) -> None:
    assert in_shadow(tmp_path, code) == printed


ERRORS = {
    "missing folder": ("open('nowhere/a', 'w')", "FileNotFoundError"),
    "folder exists": ("os.mkdir('out')", "FileExistsError"),
    "remove what is missing": ("os.remove('nothing')", "FileNotFoundError"),
    "remove a folder": ("os.remove('out')", "IsADirectoryError"),
    "rmdir that is not empty": ("os.rmdir('out')", "OSError"),
    "write to a folder": ("open('out', 'w')", "IsADirectoryError"),
    "exclusive": ("open('out/checkpoint-60/model.bin', 'x')", "FileExistsError"),
    "read what was deleted": (
        "os.remove('out/checkpoint-60/model.bin'); open('out/checkpoint-60/model.bin')",
        "FileNotFoundError",
    ),
    "rename what is missing": ("os.rename('nothing', 'a')", "FileNotFoundError"),
    "rmtree of what is missing": ("shutil.rmtree('nothing')", "FileNotFoundError"),
}


@pytest.mark.parametrize(("code", "error"), ERRORS.values(), ids=ERRORS)
@pytest.mark.usefixtures("checkpoint")
def test_errors_are_those_of_the_operating_system(tmp_path: Path, code: str, error: str) -> None:
    whole = f"try:\n    {code}\nexcept OSError as error:\n    print(type(error).__name__)"
    assert in_shadow(tmp_path, whole) == error


def test_devices_and_descriptors_are_passed_through(tmp_path: Path) -> None:
    code = "open('/dev/null', 'w').write('x'); r, w = os.pipe(); os.write(w, b'hi'); print(open(r, 'rb', 0).read(2).decode())"
    assert in_shadow(tmp_path, code) == "hi"


def test_a_second_process_sees_the_writes_of_the_first(tmp_path: Path, checkpoint: Path) -> None:
    in_shadow(tmp_path, "shutil.rmtree('out'); open('note', 'w').write('from the first')")
    assert in_shadow(tmp_path, "print(os.path.exists('out'), open('note').read())") == "False from the first"
    assert (checkpoint / "out").is_dir()


def test_a_link_into_a_folder_that_is_passed_through_stays_and_its_target_too(tmp_path: Path, checkpoint: Path) -> None:
    blob = tmp_path / "root" / "blob"
    blob.parent.mkdir()
    blob.write_text("downloaded")
    (checkpoint / "weights").symlink_to(blob)
    in_shadow(tmp_path, "open('weights', 'w').write('zeros'); os.remove('weights'); print(os.path.exists('weights'))")
    assert (checkpoint / "weights").is_symlink()
    assert blob.read_text() == "downloaded"


def test_caches_that_hold_the_working_folder_are_not_passed_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "hub" / "project"
    project.mkdir(parents=True)
    monkeypatch.chdir(project)
    passed = default_passed({"HF_HOME": str(tmp_path)})
    assert str(tmp_path / "hub") not in passed
    assert str(tmp_path / "datasets") in passed
