"""What the card cannot do is found by name; what it can, and what is not known of it, is not."""

from __future__ import annotations

import pytest

from tests.audit.config.parts import ACCELERATE, ARGUMENTS, AXOLOTL, DEEPSPEED, LLAMA_FACTORY, TRL, examined, mended, rules

RULE = "config-gpu-cannot"
BF16 = {
    "transformers": ARGUMENTS + "bf16: true\n",
    "transformers with both": ARGUMENTS + "bf16: true\nfp16: false\n",
    "accelerate": ACCELERATE.replace("fp16", "bf16"),
    "axolotl": AXOLOTL.replace("bf16: auto", "bf16: true"),
    "deepspeed": DEEPSPEED[:-2] + ', "bf16": {"enabled": true}}',
}


@pytest.mark.parametrize("name", sorted(BF16))
def test_bfloat16_on_a_turing_card_is_found_in_every_format(name: str) -> None:
    [found] = examined(BF16[name], gpu="t4")
    assert found.rule == RULE
    assert "NVIDIA T4" in found.message
    assert examined(BF16[name], gpu="rtx-3090") == []
    assert examined(BF16[name]) == []
    if name != "deepspeed":
        assert examined(mended(BF16[name], found), gpu="t4") == []


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        (TRL + "attn_implementation: flash_attention_2\n", "t4", "a100-80gb"),
        (AXOLOTL + "flash_attention: true\n", "v100-16gb", "rtx-4090"),
        (LLAMA_FACTORY + "flash_attn: fa2\n", "t4", "l4"),
        (TRL + "attn_implementation: flash_attention_3\n", "a100-80gb", "h100-80gb"),
        (ARGUMENTS + "tf32: true\n", "t4", "rtx-3060"),
        (ACCELERATE.replace("fp16", "fp8"), "a100-80gb", "h100-80gb"),
        (AXOLOTL.replace("bf16: auto", "bf16: auto\nfp8: true"), "rtx-3090", "rtx-4090"),
    ],
)
def test_kernels_and_numbers_that_came_later_are_found(text: str, old: str, new: str) -> None:
    [found] = examined(text, gpu=old)
    assert found.rule == RULE
    assert rules(examined(text, gpu=new)) == []
    if found.edits:
        assert rules(examined(mended(text, found), gpu=old)) == []


def test_trl_takes_bfloat16_where_nothing_is_said() -> None:
    text = TRL.replace("fp16: true\n", "")
    [found] = examined(text, gpu="t4")
    assert (found.rule, found.confidence) == (RULE, "medium")
    assert examined(text, gpu="l4") == []
    assert examined(TRL, gpu="t4") == []


def test_nothing_is_said_of_a_card_of_which_only_the_memory_is_known() -> None:
    assert examined(BF16["transformers"], gpu="16GiB") == []


def test_a_card_that_nobody_knows_is_noted() -> None:
    notes: list[str] = []
    assert examined(BF16["transformers"], gpu="t44", notes=notes) == []
    assert len(notes) == 1
    assert "t44" in notes[0]
