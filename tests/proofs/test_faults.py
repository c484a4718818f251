"""Every seeded fault is found by the proof that should, and called by its name; the same model without it passes."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from brim.proofs.verify import verify
from brim.records.verifications import Proof, Verification
from tests.proofs.faults import FAULTS, FLAT_MASKS, Fault, first_of_each


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@cache
def verified(fault: Fault) -> Verification:
    return verify(fault.build())


def proof_of(found: Verification, name: str) -> Proof:
    (proof,) = [one for one in found.proofs if one.name == name]
    return proof


@pytest.mark.parametrize("fault", first_of_each(FAULTS))
def test_a_fault_is_found_and_named_by_its_proof(fault: Fault) -> None:
    found = verified(fault)
    assert not found.is_proven
    for name in (fault.proof, *fault.also):
        proof = proof_of(found, name)
        assert proof.verdict == "fail", proof
        assert proof.signature in fault.names(), proof
        assert proof.diagnosis
        assert proof.mend


@pytest.mark.parametrize("fault", first_of_each(FAULTS))
def test_the_same_model_without_the_fault_passes(fault: Fault) -> None:
    found = verify(fault.mended())
    assert found.failures() == ()
    assert proof_of(found, fault.proof).verdict == "pass"


@pytest.mark.parametrize("fault", FLAT_MASKS, ids=lambda fault: fault.name)
def test_the_mask_of_the_model_in_its_layers_is_told_with_both_shapes_and_the_way_out(fault: Fault) -> None:
    found = verified(fault)
    causality, batch = proof_of(found, "causality"), proof_of(found, "batch")
    assert (causality.verdict, batch.verdict) == ("fail", "fail")
    length = told_length(causality, rows=1)
    assert f"[1, 1, {length}, {length}]" in causality.diagnosis
    length = told_length(batch, rows=2)
    assert f"[2, 1, {length}, {length}]" in batch.diagnosis
    assert "create_causal_mask" in causality.mend
    assert "create_causal_mask" in batch.mend


def told_length(proof: Proof, rows: int) -> int:
    """The S of the [rows, S] in a diagnosis."""
    lengths = [length for length in range(2, 257) if f"[{rows}, {length}]" in proof.diagnosis]
    assert len(lengths) == 1, proof.diagnosis
    return lengths[0]


def test_at_least_ten_kinds_of_fault_are_told_apart() -> None:
    assert len({fault.signature for fault in FAULTS}) >= 10
