"""The seeded faults break the law they are said to break, and their twins keep all five: judged in plain torch, before any proof is."""

from __future__ import annotations

import pytest
import torch

from tests.proofs import laws
from tests.proofs.faults import FAULTS, Fault, first_of_each
from tests.proofs.healthy import CAUSAL, Healthy

# What a model must take for a law to be put to it.
NEEDS = {"causality": set(), "batch": set(), "pad": {"attention_mask"}, "pack": {"position_ids"}, "accumulation": {"labels"}}
TOLERANCE = 1e-4
PLAIN = 1e-2


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def distance(law: str, model: torch.nn.Module) -> float:
    """How far the model is from this law; for accumulation, how far from the right length and direction."""
    if law != "accumulation":
        found: float = getattr(laws, law)(model)
        return found
    cosine, ratio = laws.accumulation(model)
    return max(1 - cosine, abs(ratio - 1))


@pytest.mark.parametrize("fault", first_of_each(FAULTS))
def test_the_fault_is_there(fault: Fault) -> None:
    for law in (fault.proof, *fault.also):
        assert distance(law, fault.build()) > PLAIN


@pytest.mark.parametrize("fault", first_of_each(FAULTS))
def test_the_twin_keeps_every_law(fault: Fault) -> None:
    model = fault.mended()
    assert {law: found for law in applying(model) if (found := distance(law, model)) > TOLERANCE} == {}


@pytest.mark.slow
@pytest.mark.parametrize("healthy", CAUSAL, ids=lambda healthy: healthy.name)
def test_a_library_model_breaks_no_law_but_what_is_known_of_it(healthy: Healthy) -> None:
    model = healthy.build()
    broken = {law for law in applying(model) if distance(law, model) > TOLERANCE}
    assert broken == {law for law, _ in healthy.known}


def applying(model: torch.nn.Module) -> list[str]:
    return [law for law, needs in NEEDS.items() if needs <= laws.names(model)]
