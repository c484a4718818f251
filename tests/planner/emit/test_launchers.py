"""accelerate reads its own config back, and the shell reads the scripts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from brim.planner.emit.write import emit, files_of
from tests.planner.emit.plans import PLANS


@pytest.mark.parametrize("name", list(PLANS))
def test_accelerate_reads_its_config(name: str, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    plan = PLANS[name]
    assert plan.best is not None
    emit(plan, ["accelerate"], tmp_path)
    config = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert config.num_processes == plan.best.world_size
    assert config.num_machines == plan.machine.nodes
    kinds = {"ddp": "MULTI_GPU", "none": "NO", "fsdp": "FSDP"}
    assert config.distributed_type.value == kinds.get(plan.best.sharding, "DEEPSPEED")
    if plan.best.sharding.startswith("zero"):
        # accelerate refuses a mixed precision beside a DeepSpeed file, which has its own.
        assert config.mixed_precision is None
        assert config.deepspeed_config["deepspeed_config_file"] == "deepspeed.json"
        assert (tmp_path / "deepspeed.json").is_file()
    else:
        assert config.mixed_precision == {"amp-bf16": "bf16", "amp-fp16": "fp16"}.get(plan.best.precision, "no")
    if plan.best.sharding == "fsdp":
        assert config.fsdp_config["fsdp_version"] == 2
        assert config.fsdp_config["fsdp_offload_params"] == (plan.best.offload == "parameters")


def test_accelerates_launcher_takes_the_files(tmp_path: Path) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    for name in ("full, ddp", "zero 3, parameters on the host", "fsdp, offload", "two nodes"):
        plan = PLANS[name]
        assert plan.best is not None
        folder = tmp_path / name.replace(" ", "-")
        emit(plan, ["accelerate"], folder)
        arguments = launch_command_parser().parse_args(["--config_file", str(folder / "accelerate.yaml"), "train.py"])
        checked, _defaults, _from_file = _validate_launch_command(arguments)
        assert checked.num_processes == plan.best.world_size
        assert checked.use_deepspeed == plan.best.sharding.startswith("zero")
        assert checked.use_fsdp == (plan.best.sharding == "fsdp")


@pytest.mark.parametrize("name", list(PLANS))
def test_the_shell_reads_the_scripts(name: str, tmp_path: Path) -> None:
    emitted = emit(PLANS[name], ["accelerate", "torchrun"], tmp_path)
    scripts = [path for path in emitted.paths if path.suffix == ".sh"]
    assert {path.name for path in scripts} == {"launch.sh", "torchrun.sh"}
    for path in scripts:
        subprocess.run(["bash", "-n", str(path)], check=True)
        assert path.stat().st_mode & 0o100


def run(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """With stand-ins for the launchers, that print what they were given."""
    folder = script.parent / "bin"
    folder.mkdir(exist_ok=True)
    for name in ("accelerate", "torchrun"):
        (folder / name).write_text('#!/bin/sh\necho "$@"\n')
        (folder / name).chmod(0o755)
    variables = {"PATH": f"{folder}:/usr/bin:/bin", **environment}
    return subprocess.run(["bash", str(script), *arguments], env=variables, capture_output=True, text=True, check=False)


def test_torchrun_starts_the_planned_number_of_processes(tmp_path: Path) -> None:
    emit(PLANS["full, ddp"], ["torchrun", "accelerate"], tmp_path)
    assert run(tmp_path / "torchrun.sh").stdout.split() == ["--standalone", "--nnodes=1", "--nproc-per-node=2", "train.py"]
    assert run(tmp_path / "torchrun.sh", "other.py", "--a", "b c").stdout.endswith("other.py --a b c\n")
    assert run(tmp_path / "launch.sh").stdout == f"launch --config_file {tmp_path}/accelerate.yaml train.py\n"


def test_several_nodes_need_an_address_and_a_rank(tmp_path: Path) -> None:
    emit(PLANS["two nodes"], ["torchrun", "accelerate"], tmp_path)
    missing = run(tmp_path / "torchrun.sh")
    assert missing.returncode != 0
    assert "MASTER_ADDR" in missing.stderr
    found = run(tmp_path / "torchrun.sh", MASTER_ADDR="10.0.0.1", NODE_RANK="1").stdout
    assert "--nnodes=2 --nproc-per-node=8" in found
    assert "--node-rank=1" in found
    assert "--rdzv-endpoint=10.0.0.1:29500" in found
    assert "--machine_rank 1 --main_process_ip 10.0.0.1" in run(
        tmp_path / "launch.sh", MASTER_ADDR="10.0.0.1", NODE_RANK="1"
    ).stdout  # fmt: skip


def test_the_scripts_say_what_train_py_must_do() -> None:
    for name, file in (("torchrun", "torchrun.sh"), ("accelerate", "launch.sh")):
        text = " ".join(files_of(PLANS["full, ddp"], name)[file].replace("\n#  ", "").split())
        assert "micro-batches of 4 and 8 accumulation steps" in text
