"""`brim.verify` on modules, folders, adapters and functions: what it runs, what it says, and what it leaves alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from brim.errors import BrimError, UnsupportedError, UsageError
from brim.proofs.verify import verify
from brim.records import Verification

LLAMA: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 97, "max_position_embeddings": 64,
}  # fmt: skip


def llama(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**LLAMA, **more}))  # type: ignore[no-untyped-call]


def verdicts(found: Verification) -> dict[str, str]:
    return {proof.name: proof.verdict for proof in found.proofs}


ALL_PASS = dict.fromkeys(("causality", "batch", "pad", "pack", "accumulation"), "pass")


def test_a_record_is_written_and_read_again(tmp_path: Path) -> None:
    found = verify(llama())
    assert verdicts(found) == ALL_PASS
    assert found.is_proven
    assert found.weights == "own"
    again = Verification.read(found.write(tmp_path / "proofs.json"))
    assert again.proofs == found.proofs
    document = json.loads((tmp_path / "proofs.json").read_text(encoding="utf-8"))
    assert document["schema"] == "brim.verify/1"
    assert {"name", "verdict", "value", "diagnosis", "mend"} <= set(document["proofs"][0])


def test_a_model_is_left_as_it_was() -> None:
    model = llama(attention_dropout=0.1)
    model.train()
    model.model.layers[1].eval()
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    states = random.getstate(), torch.get_rng_state()
    threads = torch.get_num_threads()
    verify(model, attention="all")
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert bool((model.lm_head.weight.grad == 1).all())
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if name != "lm_head.weight")
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert model.config._attn_implementation == "sdpa"
    assert model.model.layers[0].self_attn.attention_dropout == 0.1
    assert torch.get_num_threads() == threads


def test_every_attention_that_runs_here_and_a_word_on_those_that_do_not() -> None:
    found = verify(llama(), attention="all")
    assert [proof.attention for proof in found.proofs] == ["eager"] * 5 + ["sdpa"] * 5
    assert any("flash2" in note for note in found.notes)
    with pytest.raises(UnsupportedError, match="flash2 was not verified"):
        verify(llama(), attention="flash2")


def test_frozen_models_have_no_gradient_to_compare() -> None:
    model = llama()
    model.requires_grad_(False)
    proof = verify(model).proofs[-1]
    assert (proof.name, proof.verdict) == ("accumulation", "not-applicable")
    assert "frozen" in proof.diagnosis


@pytest.mark.parametrize("precision", ["bf16", "amp-bf16"])
def test_half_precision_has_a_tolerance_that_its_own_rounding_sets(precision: Any) -> None:
    found = verify(llama(), precision=precision)
    assert verdicts(found) == ALL_PASS
    first = found.proofs[0]
    assert first.tolerance is not None
    assert 2e-2 <= first.tolerance < 0.5


def test_a_fault_shows_at_half_precision_too() -> None:
    from tests.proofs.faults import FAULTS

    fault = next(each for each in FAULTS if each.signature == "mask-2d" and each.proof == "causality")
    found = verify(fault.build(), precision="bf16")
    assert verdicts(found)["causality"] == "fail"


def test_only_the_proofs_that_are_asked_for() -> None:
    assert [proof.name for proof in verify(llama(), proofs=("pad", "causality")).proofs] == ["causality", "pad"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "int3"}, "precision='int3' is not known"),
        ({"attention": "fast"}, "attention='fast' is not known"),
        ({"proofs": ("spelling",)}, "no proof 'spelling'"),
        ({"length": 3}, "12 to 4096 tokens"),
        ({"task": "poetry"}, "task='poetry' is not known"),
        ({"size": "shrunk"}, "cannot be shrunk"),
    ],
)
def test_wrong_wishes_get_one_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        verify(llama(), **options)


def test_a_module_without_tokens_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no embedding of tokens"):
        verify(nn.Linear(4, 4))


def test_a_model_that_does_not_run_is_an_error_and_not_a_failure_of_ours() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 8)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            raise ValueError("no such thing")

    found = verify(Broken())
    assert not found.is_proven
    assert {proof.verdict for proof in found.proofs} <= {"error", "not-applicable"}
    assert "no such thing" in found.proofs[0].diagnosis


def test_a_tokenizer_says_what_pads_and_what_is_special() -> None:
    class Words:
        pad_token_id = 5
        all_special_ids = (5, 6)

        def __len__(self) -> int:
            return 60

    assert verify(llama(), Words()).is_proven


def test_a_catalogue_name_is_proven_on_a_shrunk_copy() -> None:
    found = verify("llama-3.1-70b")
    assert verdicts(found) == ALL_PASS
    assert found.weights == "fresh"
    assert found.shrunk is not None
    assert "80 to" in found.shrunk
    assert found.parameters < 2_000_000


def test_a_folder_runs_with_its_own_weights_and_shrunk_if_asked(tmp_path: Path) -> None:
    llama(num_hidden_layers=6).save_pretrained(tmp_path)
    own = verify(str(tmp_path), proofs=("batch",))
    assert (own.weights, own.shrunk) == ("own", None)
    shrunk = verify(str(tmp_path), size="shrunk", proofs=("batch",))
    assert shrunk.weights == "fresh"
    assert shrunk.shrunk is not None


def test_a_config_alone_gets_fresh_weights_and_may_be_a_classifier(tmp_path: Path) -> None:
    config = LlamaConfig(**LLAMA)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False), encoding="utf-8")
    assert verify(str(tmp_path / "config.json")).weights == "fresh"
    found = verify(str(tmp_path / "config.json"), task="classification")
    assert found.class_name == "LlamaForSequenceClassification"
    assert found.is_proven
    assert verdicts(found)["causality"] == "not-applicable"


def test_an_adapter_is_proven_on_its_base(tmp_path: Path) -> None:
    import peft

    llama().save_pretrained(tmp_path / "base")
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    adapted.save_pretrained(str(tmp_path / "adapter"))
    found = verify(str(tmp_path / "adapter"))
    assert verdicts(found) == ALL_PASS
    assert found.weights == "own"
    (tmp_path / "base" / "model.safetensors").unlink()
    fresh = verify(str(tmp_path / "adapter"))
    assert verdicts(fresh) == ALL_PASS
    assert any("fresh weights" in note for note in fresh.notes)


def test_a_folder_that_is_no_adapter_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(BrimError, match="not a PEFT adapter that can be read"):
        verify(str(tmp_path))


def test_a_function_builds_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_mine.py").write_text(
        "from tests.proofs.test_verify import llama\n\ndef build():\n    return llama()\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert verify("of_mine:build", proofs=("causality",)).is_proven
    with pytest.raises(UsageError, match="cannot shrink it"):
        verify("of_mine:build", size="shrunk")


def test_a_module_of_ones_own_that_gives_one_answer_a_row_is_a_classifier() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 3)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(self.embed(tokens).mean(dim=1))
            return scores

    found = verify(Mean())
    assert found.is_proven
    assert verdicts(found)["batch"] == "pass"
    assert verdicts(found)["causality"] == "not-applicable"
