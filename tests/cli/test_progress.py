"""While a plan takes long, stderr says what is being done: a line now and then in a pipe, one living line on a terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import brim
from brim.activity import activity, doing
from brim.cli._progress import progress

PROGRAM = """
import sys
from brim.activity import doing
from brim.cli._progress import progress

with progress("Planning tiny ...", first=0.05):
    doing("trace-several", what="lora, amp-fp16", done=3, total=14)
    sys.stdin.read()
print("the answer")
"""
SAID = "tracing lora, amp-fp16 (3 of 14)"


def test_a_pipe_gets_whole_lines() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith("Planning tiny ... ")
    assert line.endswith(f"{SAID}\n")
    out, err = process.communicate("")
    assert (process.returncode, out) == (0, "the answer\n")
    assert "\x1b" not in err


def test_a_terminal_gets_one_line_that_is_wiped_at_the_end() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "COLUMNS": "120"},
    )  # fmt: skip
    shown = b""
    while SAID.encode() not in shown:
        shown += os.read(ours, 4096)
    process.communicate(b"")
    os.close(theirs)
    shown += os.read(ours, 4096)
    os.close(ours)
    assert process.returncode == 0
    assert shown.startswith(b"Planning tiny ...")
    assert b"\n" not in shown
    assert shown.endswith(b"\r\x1b[K")


def test_the_timer_of_others_goes_on() -> None:
    before = signal.getsignal(signal.SIGALRM)
    timer = signal.setitimer(signal.ITIMER_REAL, 500)
    try:
        with progress("Planning ..."):
            assert signal.getsignal(signal.SIGALRM) != before
        assert signal.getsignal(signal.SIGALRM) == before
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 500
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)


def test_what_takes_long_says_that_it_begins(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 24, "intermediate_size": 40,
        "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 61, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    doing("")
    brim.estimate(str(tmp_path), gpu="t4", seq_len=48, precision="fp32", cache=False)
    assert (activity().code, activity().values["what"]) == ("trace", "full, fp32, checkpointing none")
