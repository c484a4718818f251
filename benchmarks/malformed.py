"""Malformed data files, each given to `brim train` in a fresh process: how long until it is refused, and whether the message says where.

    python benchmarks/malformed.py [--json]

The files are those of tests/trainer/data/malformed.py. Of each: exit code 2, the file's name, the line (a row, of tables), nothing on
standard output, and nothing written. At least 60 must name a line, and be refused within 2 seconds. Exit 1 if a bar is missed.

Files that only a tokenizer can judge (a prompt that fills the whole length) are listed apart: transformers is imported for them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEAST, MOST_SECONDS = 60, 2.0
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 330, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Refusal:
    """One file."""

    name: str
    place: str
    """As the message must have it; empty where the whole file is wrong."""
    needs_tokens: bool
    seconds: float
    trouble: str
    """What is wrong with the refusal; empty where nothing is."""

    @property
    def names_a_line(self) -> bool:
        return "line " in self.place


def refuse(model: Path, bad: object) -> Refusal:
    from tests.trainer.data.malformed import Malformed

    assert isinstance(bad, Malformed)
    with tempfile.TemporaryDirectory(prefix="malformed-") as scratch:
        folder = Path(scratch)
        path = bad.write(folder)
        before = sorted(folder.rglob("*"))
        columns = ",".join(f"{meaning}={name}" for meaning, name in (bad.columns or {}).items())
        command = [
            sys.executable, "-m", "brim", "train", str(model), "--data", str(path), "--task", bad.task, "--max-length", "64", "--device",
            "cpu", "--from-scratch", "-o", str(folder / "run"), *(["--columns", columns] if columns else []),
        ]  # fmt: skip
        began = time.perf_counter()
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - began
        missing = [word for word in bad.words if word not in ended.stderr]
        trouble = (
            f"exit code {ended.returncode}" if ended.returncode != 2
            else f"the message lacks {missing}" if missing
            else "something on standard output" if ended.stdout
            else "something was written" if sorted(folder.rglob("*")) != before
            else ""
        )  # fmt: skip
    return Refusal(bad.name, bad.place, bad.needs_tokens, seconds, trouble)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from tests.trainer.data.malformed import ALL
    from tests.trainer.data.tokenizers_here import CHATML, tokenizer

    with tempfile.TemporaryDirectory(prefix="malformed-") as scratch:
        os.environ["BRIM_CACHE"] = str(Path(scratch) / "cache")
        model = Path(scratch) / "model"
        tokenizer(template=CHATML).save_pretrained(model)
        (model / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        refusals = [refuse(model, bad) for bad in ALL]
    on_a_line = [each for each in refusals if each.names_a_line and not each.needs_tokens]
    good = [each for each in on_a_line if not each.trouble and each.seconds < MOST_SECONDS]
    bars = {
        f"{len(good)} files are refused with their line within {MOST_SECONDS:g} s, at least {LEAST}": len(good) >= LEAST,
        f"so are all {len(on_a_line)} whose message can name one": len(good) == len(on_a_line),
        "every file is refused in one clear message": not any(each.trouble for each in refusals),
    }
    if options.json:
        print(json.dumps({"passed": all(bars.values()), "bars": bars, "files": [asdict(each) for each in refusals]}))
    else:
        show(refusals)
        for bar, kept in bars.items():
            print(f"  {'kept  ' if kept else 'MISSED'} {bar}")
    return 0 if all(bars.values()) else 1


def show(refusals: list[Refusal]) -> None:
    kinds = {
        "a line is named": [each for each in refusals if each.names_a_line and not each.needs_tokens],
        "a row, a file or nothing but the whole": [each for each in refusals if not each.names_a_line and not each.needs_tokens],
        "only a tokenizer finds it out": [each for each in refusals if each.needs_tokens],
    }
    print(f"{'':<42}{'files':>6}{'median s':>10}{'worst s':>10}")
    for kind, those in kinds.items():
        seconds = [each.seconds for each in those]
        print(f"{kind:<42}{len(those):>6}{statistics.median(seconds):>10.2f}{max(seconds):>10.2f}")
    for each in refusals:
        if each.trouble:
            print(f"  {each.name}: {each.trouble}")


if __name__ == "__main__":
    sys.exit(main())
