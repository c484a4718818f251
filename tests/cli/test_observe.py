"""`brim observe` as a person types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from brim.records.observations import Observation

if TYPE_CHECKING:
    from tests.conftest import Cli

SCRIPTS = Path(__file__).parents[1] / "audit" / "observe" / "scripts"


def test_the_story_on_stderr_and_the_document_as_one_line_after_the_scripts_own_output(shell: Cli, tmp_path: Path) -> None:
    ended = shell("observe", "--json", "-o", "run", "--", sys.executable, str(SCRIPTS / "plain.py"), "--batch-size", "64")
    assert ended.code == 0
    own, last = ended.out.splitlines()[:-1], ended.out.splitlines()[-1]
    assert [line.split(":")[0] for line in own] == ["epoch 0", "epoch 1"]
    document = json.loads(last)
    assert document["schema"] == "brim.observe/1"
    assert document == Observation.read(tmp_path / "run" / "observation.json").to_dict()
    assert "brim: in force: 2 x 16 x 1 = 32, you configured 64 (--batch-size 64)" in ended.err
    for words in ("step 3: 8 (the data ended)", "batch 2, 0 workers, not pinned, shuffled", "6 optimizer steps", "plain.py:22"):
        assert words in ended.err
    assert "plain.py:17  batch_size = min(options.batch_size, 2)" in ended.err
    assert "ranks.py" not in ended.err
    assert ended.err.index("a warning of the script") < ended.err.index("brim: in force")


def test_secrets_of_the_command_are_in_no_file_and_on_no_screen(shell: Cli, tmp_path: Path) -> None:
    script = tmp_path / "trains.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(2):\n    model(torch.ones(4, 2)).sum().backward()\n    optimizer.step()\n"
    )
    secrets = ("--api-key", "abc-first", "--token=abc-second", "WANDB_API_KEY=abc-third", "--note=hf_abc4fourth")
    ended = shell("observe", "-o", "run", "--", sys.executable, str(script), *secrets, "https://me:abc-fifth@host/x")
    assert ended.code == 0, ended.err
    assert Observation.read(tmp_path / "run" / "observation.json").command[2:4] == ("--api-key", "***")
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert b"abc" not in written
    assert "abc" not in ended.out + ended.err


def _heed_interruptions() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_an_interruption_reaches_the_script_and_brim_tells_what_it_saw(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "brim", "observe", "--no-source", "-o", str(tmp_path / "run"), "--"]
    command += [sys.executable, str(SCRIPTS / "odd.py"), "interrupted"]
    # A test run in the background may have been told to ignore interruptions, and children inherit that.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=_heed_interruptions
    )
    assert process.stdout is not None
    while process.stdout.readline() not in ("trained\n", ""):
        pass
    os.killpg(process.pid, signal.SIGINT)
    _out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "KeyboardInterrupt" in err
    assert "brim: in force: 4 x 1 x 1 = 4" in err
    found = Observation.read(tmp_path / "run" / "observation.json")
    assert (found.exit_code, found.steps) == (130, 3)


def test_a_wish_to_end_is_passed_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "brim", "observe", "-o", str(tmp_path / "run"), "--"]
    waits = "import time; print('here', flush=True); time.sleep(60)"
    process = subprocess.Popen([*command, sys.executable, "-c", waits], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


def test_the_exit_code_is_the_scripts_and_dashes_are_not_needed(shell: Cli) -> None:
    ended = shell("observe", "-o", "run", sys.executable, str(SCRIPTS / "odd.py"), "three")
    assert ended.code == 3
    assert ended.out == "to stdout\n"
    assert "torch was never imported" in ended.err


def test_no_command_is_a_mistake_with_a_hint(cli: Cli) -> None:
    ended = cli("observe")
    assert ended.code == 2
    assert "brim observe -- python train.py" in ended.err
    assert cli("observe", "-o", " ", "--", "true").code == 2
