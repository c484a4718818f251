"""What a plan may choose: flash-attention 2 is a package, and only the machine that trains can tell whether it is there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from brim.errors import UnsupportedError
from brim.machine import detect
from brim.memory.estimate import fill
from brim.memory.where import Where, find_where
from brim.planner import space
from brim.workload.resolve import find_model
from brim.workload.settings import read_settings


def card(*, is_here: bool) -> Where:
    where = find_where("a100-40gb", None, None)
    assert where is not None
    return replace(where, is_here=is_here)


def attentions(where: Where, **pinned: Any) -> set[str | None]:
    model = find_model("gpt2")
    base = fill(read_settings({"seq_len": 64, **pinned}), model, where)
    found = space.structures_of(pinned, base, model, where, frozenset())
    return {structure.settings.attention for structure in found.structures}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "why_no_flash_attention", lambda: "")


def test_flash2_is_not_offered_where_the_package_is_not_importable() -> None:
    assert detect.why_no_flash_attention()
    assert "flash2" not in attentions(card(is_here=True))


@pytest.mark.usefixtures("installed")
def test_flash2_is_offered_on_the_machine_that_has_it() -> None:
    assert "flash2" in attentions(card(is_here=True))


@pytest.mark.usefixtures("installed")
def test_what_is_installed_here_says_nothing_of_another_machine() -> None:
    assert "flash2" not in attentions(card(is_here=False))


def test_flash2_is_planned_where_it_is_asked_for() -> None:
    assert attentions(card(is_here=False), attention="flash2", precision="amp-bf16") == {"flash2"}


def test_a_missing_package_is_named_with_what_to_do() -> None:
    with pytest.raises(UnsupportedError, match="flash-attn is not installed") as caught:
        detect.require_flash_attention()
    assert "--attention sdpa" in str(caught.value.hint)


def test_a_package_that_cannot_be_imported_counts_as_missing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn.py").write_text("raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c10')\n")
    monkeypatch.syspath_prepend(tmp_path)
    detect.why_no_flash_attention.cache_clear()
    try:
        assert "undefined symbol" in detect.why_no_flash_attention()
    finally:
        detect.why_no_flash_attention.cache_clear()
