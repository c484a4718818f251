"""Settings take the words of the command line, and answer a wrong one with the nearest."""

from __future__ import annotations

from typing import Any

import pytest

from brim import UsageError
from brim.workload.settings import Settings, read_settings


def test_defaults_are_those_of_the_command_line() -> None:
    settings = read_settings({})
    assert settings == Settings()
    assert (settings.method, settings.precision, settings.optimizer) == ("full", "fp32", "adamw")
    assert (settings.checkpointing, settings.padded, settings.accumulation, settings.ranks) == ("none", True, 1, 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"method": "loar"}, "Did you mean 'lora'?"),
        ({"precision": "float8"}, "One of: fp32, bf16"),
        ({"metod": "lora"}, "Did you mean 'method'?"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"checkpointing": "every:0"}, "every:N"),
        ({"seq_len": -5}, "seq_len"),
        ({"max_grad_norm": 0}, "max_grad_norm"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_settings(given)
    assert said in str(caught.value)


def test_short_and_long_names_of_dtypes_mean_the_same() -> None:
    assert read_settings({"method": "lora", "base_dtype": "fp32"}) == read_settings({"method": "lora", "base_dtype": "float32"})


def test_one_name_is_a_list_of_one() -> None:
    assert read_settings({"method": "lora", "lora_targets": "all-linear"}).lora_targets == ("all-linear",)
