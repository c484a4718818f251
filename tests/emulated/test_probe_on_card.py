"""`brim probe` on emulated cards: every method trains in its trials, the answer equals brute force, memory includes the CUDA context."""

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
probes = [brim.probe(folder, objective="largest", seq_len=64, max_trials=1, micro_batch=4, cache=False, **recipe) for recipe in recipes]
result = {
    "trials": [(trial.verdict, trial.message) for probe in probes for trial in probe.trials],
    "largest": [probe.largest.micro_batch for probe in probes],
    "own": own_bytes(0),
}
""",
        memory="2GiB",
    )
    assert done.result["trials"] == [["ok", ""]] * 4
    assert done.result["largest"] == [4] * 4
    assert done.result["own"] == 0, "the calling process must not hold a CUDA context: trials could not use that memory"


def test_the_prediction_matches_a_step_without_a_mask(on_card: RunOnCard) -> None:
    """On a T4, attention with grouped heads and no mask uses the math kernel, which needs 12 % more memory here. A trial also runs mixed
    lengths, an evaluation and a save, so its peak differs slightly from the prediction.
    """
    done = on_card(
        """
import brim

probe = brim.probe("smollm2-135m", objective="largest", method="lora", precision="amp-fp16", seq_len=256, cache=False)
result = {
    "measured": probe.versus.measured_bytes, "predicted": probe.versus.predicted_bytes,
    "peaks": [trial.peak_device_bytes for trial in probe.trials], "budget": probe.limit_bytes - probe.margin_bytes,
    "largest": probe.largest.micro_batch, "predicted_largest": probe.versus.predicted_largest,
}
""",
        memory="4600MiB",
    )
    result = done.result
    assert result["predicted"] == pytest.approx(result["measured"], rel=0.03)
    assert 0 <= result["largest"] - result["predicted_largest"] <= 1
    assert all(peak <= result["budget"] for peak in result["peaks"] if peak), "peaks include the CUDA context"


@pytest.mark.parametrize("number", [2, 6, 14])
def test_the_answer_equals_brute_force(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = probe_emulated.CASES[number - 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    runner = [sys.executable, "-m", "brim.emulator"]
    probe = probe_emulated.probe_result(spec, runner, sys.executable)
    brute_force = probe_emulated.brute_force_result(spec, runner, sys.executable, probe.get("largest"))
    assert "error" not in probe, probe
    assert "error" not in brute_force, brute_force
    assert probe["largest"] == brute_force["largest"]
    assert 2 <= brute_force["largest"] <= 60


FLASH_ATTN: dict[str, str] = {
    "flash_attn/__init__.py": """
import os
import torch

__version__ = "2.8.3"


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, **rest):
    with open(os.environ["CALLS"], "a") as file:
        file.write(f"{tuple(q.shape)}\\n")
    heads = q.shape[2] // k.shape[2]
    k, v = (tensor.repeat_interleave(heads, dim=2) for tensor in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*(tensor.transpose(1, 2) for tensor in (q, k, v)), is_causal=causal)
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

PROBE_WITH_FLASH2 = (
    TINY
    + """
try:
    probe = brim.probe(folder, objective="largest", attention="flash2", precision="bf16", seq_len=64, max_trials=1, micro_batch=4,
                       cache=False)
    result = {"verdict": probe.trials[0].verdict, "message": probe.trials[0].message}
except brim.UnsupportedError as error:
    result = {"error": error.message, "hint": error.hint}
"""
)


def test_flash2_is_refused_where_it_cannot_be_imported(on_card: RunOnCard) -> None:
    done = on_card(PROBE_WITH_FLASH2, "rtx-3080", memory="2GiB")
    assert done.result["error"] == "--attention flash2 cannot run here: the package flash-attn is not installed."
    assert "--attention sdpa" in done.result["hint"]


def test_a_probe_with_flash2_runs_the_package(on_card: RunOnCard, tmp_path: Path) -> None:
    """A stub package in place of flash-attn records its calls: the trial uses it for attention, as training does."""
    for name, text in FLASH_ATTN.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    calls = tmp_path / "calls"
    environment: dict[str, Any] = {"PYTHONPATH": str(tmp_path / "site"), "CALLS": str(calls)}
    done = on_card(PROBE_WITH_FLASH2, "rtx-3080", memory="2GiB", env=environment)
    assert done.result == {"verdict": "ok", "message": ""}
    assert "(4, 64, 4, 32)" in calls.read_text().splitlines(), "the full micro-batch without a mask"
