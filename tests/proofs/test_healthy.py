"""Models that are right are not called wrong: neither those of the library nor those that know nothing of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from brim.proofs.verify import verify
from tests.proofs.healthy import CAUSAL, HEALTHY, Healthy

OTHERS = ("T5", "BERT, masked", "BERT, classifier", "Llama with LoRA", "Transformer in plain torch", "Mistral, sliding")
PROOFS = ["causality", "batch", "pad", "pack", "accumulation"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def quick_and_slow() -> list[Any]:
    """Sixteen architectures that keep all five laws, and one of each other sort, at once; the others take their time."""
    all_five = [one for one in HEALTHY if one.passes_all and "," not in one.name][:16]
    others = [one for one in HEALTHY if one.name in OTHERS]
    return [pytest.param(one, id=one.name, marks=() if one in all_five + others else pytest.mark.slow) for one in HEALTHY]


@pytest.mark.parametrize("healthy", quick_and_slow())
def test_a_healthy_model_is_not_called_wrong(healthy: Healthy) -> None:
    found = verify(healthy.build())
    assert sorted(proof.name for proof in found.proofs) == sorted(PROOFS)
    alarms = [proof for proof in found.failures() if (proof.name, proof.signature) not in healthy.known]
    assert alarms == []
    if healthy.passes_all:
        assert {proof.name: proof.verdict for proof in found.proofs} == dict.fromkeys(PROOFS, "pass")
    for proof in found.proofs:
        assert proof.verdict != "not-applicable" or proof.diagnosis, proof


@pytest.mark.parametrize("name", ["Llama", "Mistral, sliding", "GPT-2"])
def test_a_healthy_model_passes_with_either_attention(name: str) -> None:
    (healthy,) = [one for one in HEALTHY if one.name == name]
    found = verify(healthy.build(), attention=("sdpa", "eager"))
    assert [proof.attention for proof in found.proofs] == ["sdpa"] * 5 + ["eager"] * 5
    assert {proof.verdict for proof in found.proofs} == {"pass"}


@pytest.mark.parametrize("healthy", [one for one in CAUSAL if one.known], ids=lambda healthy: healthy.name)
def test_what_is_wrong_in_the_library_itself_is_found(healthy: Healthy) -> None:
    found = verify(healthy.build())
    assert {(proof.name, proof.signature) for proof in found.proofs if proof.verdict != "pass"} == set(healthy.known)
    assert all(proof.diagnosis and proof.verdict == "not-applicable" for proof in found.proofs if proof.signature)


def test_at_least_fourteen_architectures_keep_all_five_laws() -> None:
    architectures = {healthy.name.split(",")[0] for healthy in HEALTHY if healthy.passes_all}
    assert len(architectures) >= 14
