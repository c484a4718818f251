"""`recommend_batch_size`: three words in, a size that the memory model stands for."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings

import pytest
from hypothesis import given, settings, strategies as st

from brim.errors import UsageError
from brim.planner.recommend import MODELS, TASKS, _needed, predicted_bytes, recommend_batch_size
from brim.workload.cards import find_card

KEYS = {
    "recommended_batch_size", "memory_per_sample", "estimated_memory_usage", "gradient_accumulation_for_32",
    "gradient_accumulation_for_64", "fits", "reason", "assumptions",
}  # fmt: skip


def test_the_answer_holds_together() -> None:
    found = recommend_batch_size("1b", 16, "generation")
    assert set(found) == KEYS
    size = found["recommended_batch_size"]
    assert size > 1
    assert found["fits"]
    assert 0 < found["memory_per_sample"] < found["estimated_memory_usage"] < 16
    said = " ".join(found["assumptions"])
    assert "QLoRA" in said
    assert "512 tokens" in said
    assert MODELS["1b"] in said


@pytest.mark.parametrize("size", MODELS)
def test_the_batch_times_the_accumulation_is_exactly_the_target(size: str) -> None:
    for memory in (8, 16, 24, 40, 80):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = recommend_batch_size(size, memory)
        if found["fits"]:
            assert found["recommended_batch_size"] * (found["gradient_accumulation_for_32"] or 0) == 32
            assert found["recommended_batch_size"] * (found["gradient_accumulation_for_64"] or 0) == 64
            assert found["reason"]


def test_classification_is_the_task_that_was_not_named() -> None:
    assert recommend_batch_size("1b", 12) == recommend_batch_size("1b", 12, "classification")


def test_a_classifier_has_no_logits_over_the_vocabulary_and_needs_less() -> None:
    generation, classification, qa = (recommend_batch_size("1b", 12, task) for task in ("generation", "classification", "qa"))
    assert classification["memory_per_sample"] < generation["memory_per_sample"]
    assert classification["recommended_batch_size"] >= generation["recommended_batch_size"]
    assert qa["recommended_batch_size"] == generation["recommended_batch_size"]


def test_where_nothing_fits_the_reason_and_a_warning_say_what_would() -> None:
    with pytest.warns(UserWarning, match="Not even one sequence fits") as caught:
        found = recommend_batch_size("13b", 8)
    assert found["recommended_batch_size"] == 0
    assert not found["fits"]
    assert found["gradient_accumulation_for_32"] is None
    assert found["gradient_accumulation_for_64"] is None
    assert found["estimated_memory_usage"] > 8
    assert str(caught[0].message) == found["reason"]
    assert caught[0].filename == __file__
    assert "The largest size that fits in 8 GB is 7b." in found["reason"]
    needed = int(re.findall(r"13b needs a GPU with (\d+) GB", found["reason"])[0])
    assert recommend_batch_size("13b", needed)["fits"]


def test_twelve_calls_trace_nothing() -> None:
    """Well under 3 s together (benchmarks say how long): no torch, no trace."""
    program = (
        "import sys, warnings; warnings.simplefilter('ignore'); import brim;"
        "print([brim.recommend_batch_size(size, memory)['recommended_batch_size'] for size in ('1b', '7b', '13b') for memory in (8, 16, 24, 40)]);"
        "print('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "False"


@settings(max_examples=50, deadline=None)
@given(
    size=st.sampled_from(sorted(MODELS)),
    one=st.floats(min_value=0.1, max_value=300),
    other=st.floats(min_value=0.1, max_value=300),
)
def test_more_memory_never_gives_less(size: str, one: float, other: float) -> None:
    low, high = sorted((one, other))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small, large = (recommend_batch_size(size, memory, "generation") for memory in (low, high))
    assert small["recommended_batch_size"] <= large["recommended_batch_size"]
    assert not small["fits"] or small["estimated_memory_usage"] <= low


@pytest.mark.parametrize("size", ["1b", pytest.param("7b", marks=pytest.mark.slow), pytest.param("70b", marks=pytest.mark.slow)])
@pytest.mark.parametrize("task", ["generation", "classification"])
@pytest.mark.long
def test_the_kept_figures_are_those_of_the_memory_model(size: str, task: str) -> None:
    """If this fails: `python -m brim.planner.recommend` writes the table."""
    kept, predicted = _needed(size, task), predicted_bytes(size, TASKS[task])
    assert list(kept.values()) == pytest.approx(predicted, rel=0.005)


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
