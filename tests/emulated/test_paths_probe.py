"""`brim probe` on emulated cards: every method trains in its trials, the answer is that of brute force, and the memory is counted right."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.emulated.conftest import RunOnCard

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import probe_emulated

TINY = """
from pathlib import Path
import brim
from brim.workload.embedded import data_file, write_model

folder = write_model(Path("tiny"))
"""


def test_methods_that_import_bitsandbytes_are_probed(on_card: RunOnCard) -> None:
    """bitsandbytes initialises CUDA when it is imported, and a fork of a process that has done so cannot use CUDA."""
    done = on_card(
        TINY
        + """
from brim.machine.sharing import own_bytes

recipes = [{"method": "lora"}, {"method": "qlora"}, {"method": "lora-8bit"}, {"optimizer": "adamw-8bit"}]
found = [brim.probe(folder, objective="largest", seq_len=64, max_trials=1, micro_batch=4, cache=False, **each) for each in recipes]
result = {
    "trials": [(trial.verdict, trial.message) for each in found for trial in each.trials],
    "largest": [each.largest.micro_batch for each in found],
    "own": own_bytes(0),
}
""",
        memory="2GiB",
    )
    assert done.result["trials"] == [["ok", ""]] * 4
    assert done.result["largest"] == [4] * 4
    assert done.result["own"] == 0, "the process that asks may not hold a context: a trial could not have that memory"


def test_a_step_without_a_mask_is_compared_with_the_prediction_of_one(on_card: RunOnCard) -> None:
    """On a T4, attention with grouped heads and without a mask runs on the math kernel, which takes 12 % more here. A trial also runs mixed
    lengths, an evaluation and a save, so that its peak is not quite the predicted one.
    """
    done = on_card(
        """
import brim

found = brim.probe("smollm2-135m", objective="largest", method="lora", precision="amp-fp16", seq_len=256, cache=False)
result = {
    "measured": found.versus.measured_bytes, "predicted": found.versus.predicted_bytes,
    "peaks": [each.peak_device_bytes for each in found.trials], "budget": found.limit_bytes - found.margin_bytes,
    "largest": found.largest.micro_batch, "predicted_largest": found.versus.predicted_largest,
}
""",
        memory="4600MiB",
    )
    found = done.result
    assert found["predicted"] == pytest.approx(found["measured"], rel=0.03)
    assert 0 <= found["largest"] - found["predicted_largest"] <= 1
    assert all(peak <= found["budget"] for peak in found["peaks"] if peak), "the margin holds with the context"


@pytest.mark.parametrize("number", [2, 6, 14])
def test_the_answer_is_that_of_brute_force(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = probe_emulated.CASES[number - 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    runner = [sys.executable, "-m", "brim.emulator"]
    found = probe_emulated.probed(asked, runner, sys.executable)
    truth = probe_emulated.tried(asked, runner, sys.executable, found.get("largest"))
    assert "error" not in found, found
    assert "error" not in truth, truth
    assert found["largest"] == truth["largest"]
    assert 2 <= truth["largest"] <= 60


FLASH_ATTN: dict[str, str] = {
    "flash_attn/__init__.py": """
import os
import torch

__version__ = "2.8.3"


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, **rest):
    with open(os.environ["CALLS"], "a") as file:
        file.write(f"{tuple(q.shape)}\\n")
    heads = q.shape[2] // k.shape[2]
    k, v = (each.repeat_interleave(heads, dim=2) for each in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=causal)
    return out.transpose(1, 2)


def flash_attn_varlen_func(q, k, v, *lengths, **rest):
    known = {name: value for name, value in rest.items() if name in {"dropout_p", "softmax_scale", "causal"}}
    return flash_attn_func(q[None], k[None], v[None], **known)[0]


def flash_attn_with_kvcache(*_arguments, **_keywords):
    raise NotImplementedError
""",
    "flash_attn/bert_padding.py": """
def index_first_axis(tensor, indices):
    return tensor.flatten(0, 0)[indices]


def pad_input(hidden, indices, batch, length):
    out = hidden.new_zeros(batch * length, *hidden.shape[1:])
    out[indices] = hidden
    return out.view(batch, length, *hidden.shape[1:])


def unpad_input(hidden, mask):
    raise NotImplementedError
""",
    "flash_attn/layers/__init__.py": "",
    "flash_attn/layers/rotary.py": "def apply_rotary_emb(*_arguments, **_keywords):\n    raise NotImplementedError\n",
    "flash_attn-2.8.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n",
    "flash_attn-2.8.3.dist-info/RECORD": "flash_attn/__init__.py,,\n",
    "flash_attn-2.8.3.dist-info/top_level.txt": "flash_attn\n",
}

ASK = (
    TINY
    + """
import time

began = time.monotonic()
try:
    found = brim.probe(folder, objective="largest", attention="flash2", precision="bf16", seq_len=64, max_trials=1, micro_batch=4,
                       cache=False)
    result = {"verdict": found.trials[0].verdict, "message": found.trials[0].message}
except brim.UnsupportedError as error:
    result = {"error": error.message, "hint": error.hint}
"""
)


def test_flash2_is_refused_where_it_cannot_be_imported(on_card: RunOnCard) -> None:
    done = on_card(ASK, "rtx-3080", memory="2GiB")
    assert done.result["error"] == "--attention flash2 cannot run here: the package flash-attn is not installed."
    assert "--attention sdpa" in done.result["hint"]


def test_a_probe_with_flash2_runs_the_package(on_card: RunOnCard, tmp_path: Path) -> None:
    """A package that stands for flash-attn tells when it is called: the trial attends with it, as training does."""
    for name, text in FLASH_ATTN.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    calls = tmp_path / "calls"
    environment: dict[str, Any] = {"PYTHONPATH": str(tmp_path / "site"), "CALLS": str(calls)}
    done = on_card(ASK, "rtx-3080", memory="2GiB", env=environment)
    assert done.result == {"verdict": "ok", "message": ""}
    assert "(4, 64, 4, 32)" in calls.read_text().splitlines(), "the full micro-batch without a mask"
