"""`brim env` tells what decides a run, and survives whatever is broken."""

from __future__ import annotations

import dataclasses
import signal

import pytest

from brim import Environment, ForkServer, env
from brim.machine import detect, environment
from brim.machine.host import host
from brim.machine.outcome import Outcome, explain_signal
from brim.sizes import MIB


@pytest.fixture(scope="module")
def here() -> Environment:
    return env()


def test_the_block_is_complete_and_a_record(here: Environment) -> None:
    assert Environment.from_json(here.to_json()) == here
    assert here.packages["torch"] is not None
    assert here.packages["transformers"] is not None
    assert here.torch is not None
    assert here.machine.host is not None
    assert here.cpu_bf16 is True


def test_no_token_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef")
    monkeypatch.setenv("WANDB_API_KEY", "key-abcdef")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:abcdef@mirror.example/hub")
    assert "abcdef" not in env().to_json()


def test_a_cpu_that_dies_of_bfloat16_is_reported_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(self: ForkServer, function: object, **settings: object) -> Outcome:
        if function is detect.bf16_works:
            return Outcome(verdict="killed", signal=signal.SIGILL, message=explain_signal(signal.SIGILL))
        return Outcome(verdict="ok", value=detect.torch_facts())

    monkeypatch.setattr(ForkServer, "run", dies)
    found = env()
    assert found.cpu_bf16 is False
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in found.problems[0]


def test_a_torch_that_cannot_be_imported_is_reported_and_the_rest_still_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ForkServer,
        "run",
        lambda *_arguments, **_settings: Outcome(verdict="crash", message="The child process failed: ImportError: libcuda"),
    )
    found = env()
    assert found.torch is None
    assert "torch cannot be used here" in found.problems[0]
    assert found.machine.host is not None


def test_a_small_shared_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(host(), shm_bytes=64 * MIB)
    monkeypatch.setattr(detect, "host", lambda: small)
    monkeypatch.setattr(environment, "ask_torch", lambda _server: (None, ""))
    assert "--shm-size" in env().problems[0]
