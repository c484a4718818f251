"""`recommend_batch_size`: three words in, a size that the memory model stands for."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from brim.errors import UsageError
from brim.planner.recommend import MODELS, TASKS, recommend_batch_size
from brim.step.accumulation import calculate_gradient_accumulation
from brim.workload.cards import find_card

KEYS = {
    "recommended_batch_size", "memory_per_sample", "estimated_memory_usage", "gradient_accumulation_for_32",
    "gradient_accumulation_for_64", "fits", "assumptions",
}  # fmt: skip


def test_the_answer_holds_together() -> None:
    found = recommend_batch_size("1b", 16, "generation")
    assert set(found) == KEYS
    size = found["recommended_batch_size"]
    assert size > 1
    assert found["fits"]
    assert 0 < found["memory_per_sample"] < found["estimated_memory_usage"] < 16
    assert found["gradient_accumulation_for_32"] == calculate_gradient_accumulation(32, size)["accumulation_steps"]
    assert found["gradient_accumulation_for_64"] == calculate_gradient_accumulation(64, size)["accumulation_steps"]
    said = " ".join(found["assumptions"])
    assert "QLoRA" in said
    assert "512 tokens" in said
    assert MODELS["1b"] in said


@pytest.mark.long
def test_a_classifier_has_no_logits_over_the_vocabulary_and_needs_less() -> None:
    generation, classification, qa = (recommend_batch_size("1b", 12, task) for task in ("generation", "classification", "qa"))
    assert classification["memory_per_sample"] < generation["memory_per_sample"]
    assert classification["recommended_batch_size"] >= generation["recommended_batch_size"]
    assert qa["recommended_batch_size"] == generation["recommended_batch_size"]


@pytest.mark.slow
def test_where_nothing_fits_there_is_no_size_and_no_accumulation() -> None:
    found = recommend_batch_size("70b", 16, "generation")
    assert found["recommended_batch_size"] == 0
    assert not found["fits"]
    assert found["gradient_accumulation_for_32"] is None
    assert found["gradient_accumulation_for_64"] is None
    assert found["estimated_memory_usage"] > 16


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(one=st.floats(min_value=0.1, max_value=100), other=st.floats(min_value=0.1, max_value=100))
def test_more_memory_never_gives_less(one: float, other: float) -> None:
    low, high = sorted((one, other))
    small, large = (recommend_batch_size("1b", size, "generation") for size in (low, high))
    assert small["recommended_batch_size"] <= large["recommended_batch_size"]
    assert not small["fits"] or small["estimated_memory_usage"] <= low


@pytest.mark.parametrize(("size", "task"), [("2b", "qa"), ("7b", "translation"), ("", "qa"), (7, "qa"), ("7b", None)])
def test_an_unknown_word_is_refused_with_those_that_are_known(size: str, task: str) -> None:
    with pytest.raises(UsageError) as caught:
        recommend_batch_size(size, 24, task)
    words = MODELS if size not in MODELS else TASKS
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("memory", [0, -1, float("nan"), float("inf"), "24", True])
def test_memory_that_is_none_is_refused(memory: float) -> None:
    with pytest.raises(UsageError):
        recommend_batch_size("1b", memory, "qa")


def test_case_and_spaces_do_not_matter() -> None:
    assert recommend_batch_size(" 1B ", 8, "QA") == recommend_batch_size("1b", 8, "qa")


def test_every_size_stands_for_a_model_of_llamas_architecture() -> None:
    for size, name in MODELS.items():
        card = find_card(name)
        assert card is not None
        assert card.config["model_type"] == "llama"
        assert 0.8 < card.parameters / (float(size[:-1]) * 1e9) < 1.2
