"""What every verb keeps: stdout for data, stderr for words, exit codes, one message and no traceback for a user's mistake."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from brim.cli import gpus
from tests.conftest import Cli


def test_bare_brim_shows_this_machine_and_three_commands(cli: Cli) -> None:
    ended = cli()
    assert ended.code == 0
    for text in ("This machine", "CPU", "Memory", "brim plan", "brim train", "brim doctor .", "brim --help"):
        assert text in ended.out


def test_help_groups_the_verbs(cli: Cli) -> None:
    ended = cli("--help")
    assert ended.code == 0
    headings = [
        "Before you train:",
        "Train:",
        "Your existing script:",
        "Custom models:",
        "Catalogues and bug reports:",
        "Options:",
    ]
    positions = [ended.out.index(f"\n{heading}") for heading in headings]
    assert positions == sorted(positions)


def test_the_version_is_one(cli: Cli) -> None:
    from importlib import metadata

    import brim

    assert cli("--version").out == f"brim {brim.__version__}\n"
    assert metadata.version("brim") == brim.__version__


BAD = [
    (("frobnicate",), "There is no command 'frobnicate'."),
    (("gpu",), "Did you mean 'gpus'?"),
    (("--frobnicate",), "No such option '--frobnicate'."),
    (("train",), "There is no model to train."),
    (("gpus", "rtx-3088"), "Nearest: rtx-3080-10gb"),
    (("gpus", "t4", "t4"), "unexpected extra argument"),
    (("gpus", "--vendor", "voodoo"), "is not one of 'nvidia', 'amd', 'apple'"),
    (("gpus", "--min-memory", "24G"), "Write 600MiB, 2GiB, 1.5GB"),
    (("gpus", "--min-memory"), "requires an argument"),
    (("gpus", "--jsn"), "Did you mean '--json'?"),
    (("gpus", "t4*0"), "asks for 0 GPUs"),
    (("models", "lama-3.1-8b"), "Nearest: llama-3.1-8b"),
    (("models", "org/no-such-model"), "not on this disk, and the Hub was not reached"),
    (("models", "./nowhere"), "There is no file or folder"),
    (("models", "no_module:function"), "There is no module no_module"),
    (("gpus", "t4", "--bf16"), "--bf16: these filter the list, and one GPU was asked for"),
    (("models", "gpt2", "--search", "x"), "these filter the list, and one model was asked for"),
    (("help",), "Help is `brim --help`"),
    (("models", "my_models.py:make"), "here my_models:make"),
    (("gpus", "--config", ""), "--config needs the name of a file"),
    (("--lang", "tlh", "gpus"), "brim does not speak 'tlh'; it speaks en, zh_CN"),
    (("gpus", "--config", "missing.yaml"), "Cannot read the config file missing.yaml: No such file"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD, ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_bad_usage_exits_with_2_and_one_message(cli: Cli, arguments: tuple[str, ...], says: str) -> None:
    ended = cli(*arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert says in ended.err
    assert ended.err.startswith("brim: ")
    assert ended.err.count("brim: ") == 1
    assert "Traceback" not in ended.err


def test_debug_shows_the_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIM_DEBUG", "1")
    ended = cli("gpus", "nothing-like-it")
    assert ended.code == 2
    assert "Traceback" in ended.err
    assert "UnknownNameError" in ended.err


def test_a_defect_of_brim_is_told_as_one(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(gpus, "_table", broken)
    ended = cli("gpus")
    assert ended.code == 1
    assert "This is a defect of brim: ZeroDivisionError: division by zero" in ended.err
    assert "brim env" in ended.err
    assert "Traceback" not in ended.err


def test_an_interruption_exits_with_130(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpus, "_table", interrupted)
    ended = cli("gpus")
    assert (ended.code, ended.err.strip()) == (130, "brim: Interrupted.")


@pytest.mark.parametrize("arguments", [("gpus",), ("models",), ("gpus", "t4"), ("models", "gpt2"), ("env",)])
def test_json_is_one_document_and_nothing_else(cli: Cli, arguments: tuple[str, ...]) -> None:
    ended = cli(*arguments, "--json")
    assert (ended.code, ended.err) == (0, "")
    assert json.loads(ended.out)["schema"].startswith("brim.")


def test_a_flag_may_be_written_with_underscores(cli: Cli) -> None:
    assert cli("gpus", "--min_memory", "80GiB").out == cli("gpus", "--min-memory", "80GiB").out != ""


def test_a_pipe_that_closes_early_is_no_error() -> None:
    script = f"{sys.executable} -m brim gpus 2>errors | head -1; echo ${{PIPESTATUS[0]}}; cat errors"
    ended = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=True, cwd=os.environ.get("TMPDIR", "/tmp")
    )
    assert ended.stdout.splitlines()[1] == "0"
    assert "Error" not in ended.stdout


def test_a_full_disk_behind_stdout_is_a_failure_in_words() -> None:
    ended = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m brim gpus > /dev/full"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "The output could not be written: No space left on device" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_closed_stdout_is_no_traceback() -> None:
    ended = subprocess.run(["bash", "-c", f"{sys.executable} -m brim gpus >&-"], capture_output=True, text=True, check=False)
    assert "Traceback" not in ended.stderr


def test_help_works_whatever_the_config_says(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIM_CONFIG", "/nowhere.yaml")
    assert cli("gpus", "--help").code == 0
    assert cli("gpus").code == 2


def test_piped_output_is_plain_uncut_and_without_trailing_blanks(shell: Cli) -> None:
    out = shell("models").out
    assert "\x1b" not in out
    assert "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B" in out
    assert not any(line != line.rstrip() for line in out.splitlines())


def _in_terminal(environment: dict[str, str], *arguments: str, columns: int = 100) -> str:
    """Run `brim` in a real pseudo-terminal."""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (40, columns))
    with subprocess.Popen(
        [sys.executable, "-m", "brim", *arguments],
        stdout=follower,
        stderr=follower,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    ) as process:
        os.close(follower)
        parts = []
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:
                break
            if not part:
                break
            parts.append(part)
        assert process.wait() == 0
    os.close(leader)
    return b"".join(parts).decode()


def test_a_terminal_gets_bold_and_no_color_is_honoured() -> None:
    assert "\x1b[1m" in _in_terminal({})
    assert "\x1b[3" not in _in_terminal({"NO_COLOR": "1"})


@pytest.mark.parametrize("verb", ["gpus", "models"])
@pytest.mark.parametrize("columns", [45, 60, 80, 120])
def test_a_table_leaves_columns_out_and_never_cuts_a_cell(verb: str, columns: int) -> None:
    text = re.sub(r"\x1b\[[0-9;]*m", "", _in_terminal({}, verb, columns=columns))
    assert "…" not in text
    rows = [line.rstrip() for line in text.splitlines()]
    assert max(len(line) for line in rows[:-2]) <= columns
    assert any(line.startswith(("t4 ", "gpt2 ")) for line in rows)


def test_a_terminal_that_cannot_show_a_character_never_ends_the_command(shell: Cli) -> None:
    ended = shell("gpus", environment={"PYTHONIOENCODING": "ascii", "BRIM_LANG": "zh_CN"})
    assert ended.code == 0
    assert "Traceback" not in ended.err


def test_nothing_is_written_outside_the_folders_that_were_named(shell: Cli, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    for arguments in ((), ("gpus",), ("models", "gpt2"), ("env",)):
        assert shell(*arguments, environment={"HOME": str(home)}, folder=home).code == 0
    assert list(home.iterdir()) == []
