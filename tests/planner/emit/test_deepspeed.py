"""DeepSpeed's own config class takes the JSON, for the planned number of ranks."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from brim import UnsupportedError
from brim.planner.emit.write import files_of
from brim.records import Plan
from tests.planner.emit.plans import LORA, PLANS, make_plan

EXPRESSIBLE = [name for name in PLANS if "fsdp" not in name and " in bf16" not in name and "momentum" not in name]


def config_of(plan: Plan) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(files_of(plan, "deepspeed")["deepspeed.json"])
    return read


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_deepspeed_accepts_the_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install deepspeed")
    module: Any = importlib.import_module("deepspeed.runtime.config")

    plan = PLANS[name]
    assert plan.best is not None

    # As many ranks as planned, without starting them.
    ranks = plan.best.world_size
    monkeypatch.setattr("deepspeed.runtime.config.dist.get_rank", lambda: 0)
    monkeypatch.setattr("deepspeed.runtime.config.dist.get_world_size", lambda: ranks)
    file = tmp_path / "deepspeed.json"
    file.write_text(files_of(plan, "deepspeed")["deepspeed.json"])
    config = module.DeepSpeedConfig(str(file))
    assert config.world_size == ranks
    assert config.train_batch_size == plan.best.effective_batch
    assert (
        config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps * config.world_size == config.train_batch_size
    )
    stage = int(plan.best.sharding[-1]) if plan.best.sharding.startswith("zero") else 0
    assert config.zero_optimization_stage == stage
    assert config.gradient_clipping == (plan.workload.max_grad_norm or 0.0)
    assert (config.zero_config.offload_optimizer is not None) == (plan.best.offload != "none")
    assert (config.zero_config.offload_param is not None) == (plan.best.offload == "parameters")


def test_the_buckets_are_those_of_the_trainers_auto() -> None:
    zero = config_of(PLANS["zero 3, parameters on the host"])["zero_optimization"]
    assert zero["reduce_bucket_size"] == 4096 * 4096
    assert zero["stage3_prefetch_bucket_size"] == int(0.9 * 4096 * 4096)
    assert zero["stage3_param_persistence_threshold"] == 40960
    assert zero["overlap_comm"] is False


def test_float32_weights_under_autocast_are_kept_without_zero() -> None:
    assert config_of(make_plan())["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
    assert config_of(make_plan(**LORA))["bf16"] == {"enabled": True}
    assert config_of(make_plan(sharding="zero2", precision="amp-fp16"))["fp16"]["enabled"] is True
    assert "bf16" not in config_of(make_plan(precision="fp32"))


def test_what_deepspeed_would_hold_twice_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="float32 copy"):
        files_of(make_plan(precision="bf16"), "deepspeed")
    with pytest.raises(UnsupportedError, match="FSDP2"):
        files_of(PLANS["fsdp, offload"], "deepspeed")


def test_an_optimizer_that_deepspeed_does_not_build_is_left_to_the_trainer() -> None:
    config = config_of(make_plan(sharding="zero2", optimizer="adafactor"))
    assert "optimizer" not in config
    assert config["zero_allow_untested_optimizer"] is True
    assert config_of(make_plan(sharding="zero2", optimizer="adamw-fused"))["optimizer"]["params"]["fused"] is True
    assert "torch_adam" not in config_of(PLANS["zero 2, optimizer on the host"])["optimizer"]["params"]
