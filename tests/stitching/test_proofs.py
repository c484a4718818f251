"""The five proofs of `brim verify`, put to stitched models: under every attention, with and without checkpointing, whole and shrunk."""

from __future__ import annotations

from pathlib import Path

import pytest

import brim
from brim.proofs.shrinking import shrink
from brim.proofs.verify import verify
from brim.stitching.config import StitchedConfig
from brim.stitching.model import StitchedModel
from brim.stitching.saving import save
from tests.stitching.small import SLOW, STITCHES, some, stitched


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=SLOW)])
@pytest.mark.parametrize("name", some("three-donors"))
def test_every_proof_passes(name: str, attention: str) -> None:
    model = stitched(name, attention)
    model.requires_grad_(True)
    found = verify(model)
    assert {proof.name: proof.verdict for proof in found.proofs} == dict.fromkeys(
        ("causality", "batch", "pad", "pack", "accumulation"), "pass"
    )


@pytest.mark.parametrize("is_reentrant", [False, pytest.param(True, marks=SLOW)])
def test_every_proof_passes_with_checkpointing(is_reentrant: bool) -> None:
    model = stitched(sorted(STITCHES)[0])
    model.requires_grad_(True)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": is_reentrant})
    assert {proof.verdict for proof in verify(model, proofs=("batch", "accumulation")).proofs} == {"pass"}


def test_a_saved_model_is_verified_by_its_folder(tmp_path: Path) -> None:
    save(stitched("llama-qwen2-linear"), tmp_path / "model")
    found = brim.verify(str(tmp_path / "model"), proofs=("batch", "pack"), attention="all")
    assert found.is_proven
    assert (found.weights, found.class_name) == ("own", "StitchedModel")


def test_a_large_one_is_proven_on_a_small_copy_of_every_part() -> None:
    whole = brim.stitch(Path(__file__).parents[2] / "examples" / "stitch.yaml", with_weights=False, device="meta")
    small = shrink(whole.config.to_dict())
    assert small.words == "20 to 4 layers, widths 2048, 896, 2048 to 128, 112, 128"
    model = StitchedModel(StitchedConfig(**small.config))
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    assert [part["class_name"] for part in small.config["parts"]] == [part["class_name"] for part in whole.config.parts]
    assert [adapter["kind"] for adapter in small.config["adapters"]] == ["linear", "mlp"]
    assert shrink(small.config).words == ""
    assert verify(model, proofs=("batch", "pad")).is_proven
