"""What a rank was said to hold is what real processes hold: every allocation of a third step is recorded, on every rank."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "memory_sharding.py"
ZERO = ("zero1", "zero2", "zero3")
BAR_PERCENT = 5.0

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
MISSING = "DeepSpeed is not installed: pip install 'brim[deepspeed]'"
needs_deepspeed = pytest.mark.skipif(not HAS_DEEPSPEED, reason=MISSING)


def errors_of(*names: str) -> dict[str, float]:
    """Percent by which the prediction differs from the real run, for each case of the benchmark."""
    finished = subprocess.run(
        [sys.executable, str(BENCHMARK), *names, "--json"], capture_output=True, text=True, timeout=1500, check=False
    )
    assert finished.stdout, finished.stderr[-4000:]
    errors = {result["name"]: result["error_percent"] for result in json.loads(finished.stdout)}
    assert sorted(errors) == sorted(names)
    return errors


def far(*names: str) -> dict[str, float]:
    """Cases that are further off than the bar.

    Memory that gloo's threads let go of too late is not seen to go (the benchmark says more): the real run then seems to hold more than it
    does. That happens on busy cores, and not three times in a row.
    """
    found = dict.fromkeys(names, 0.0)
    for _attempt in range(3):
        found = {name: error for name, error in errors_of(*found).items() if abs(error) > BAR_PERCENT}
        if not found:
            break
    return found


@pytest.mark.timeout(1600)
@pytest.mark.long
def test_two_processes_hold_what_was_predicted() -> None:
    # One call for all engines: what takes long is importing what they need, in each process.
    engines = ("fsdp", *ZERO) if HAS_DEEPSPEED else ("fsdp",)
    assert not far(*[f"{engine}, short" for engine in engines])
    if not HAS_DEEPSPEED:
        pytest.skip(f"FSDP2 was checked, ZeRO was not: {MISSING}")


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("engine", ["fsdp", *[pytest.param(stage, marks=needs_deepspeed) for stage in ZERO]])
def test_so_they_do_with_adapters_accumulation_half_precision_another_family_and_three_ranks(engine: str) -> None:
    further = (
        "bf16", "bf16, lora", "lora, accumulated 4", "bf16, accumulated 4", "gpt2", "gpt2, bf16, accumulated 4", "gpt2, lora",
        "three ranks", "bf16, lora, three ranks", "gpt2, accumulated 4, three ranks",
    )  # fmt: skip
    assert not far(*[f"{engine}, {name}" for name in further])


@pytest.mark.slow
@pytest.mark.timeout(1600)
@needs_deepspeed
def test_so_they_do_where_little_may_be_gathered_at_once() -> None:
    assert not far("zero3, tight", "zero3, short, tight", "zero3, deep, tight")
