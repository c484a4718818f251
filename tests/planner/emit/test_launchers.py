"""accelerate reads its own config back, and the shell reads the scripts."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from brim.planner.emit.write import emit, files_of
from tests import torchrun
from tests.planner.emit.plans import PLANS, make_plan


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
    emitted = emit(PLANS[name], ["accelerate", "torchrun", "slurm"], tmp_path)
    scripts = [path for path in emitted.paths if path.suffix == ".sh"]
    assert {path.name for path in scripts} == {"launch.sh", "torchrun.sh", "slurm.sh"}
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
    assert run(tmp_path / "torchrun.sh", "-m", "brim", "train").stdout.endswith("--nproc-per-node=2 -m brim train\n")
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


def directives(text: str) -> dict[str, str]:
    """What sbatch reads: comments before the first command."""
    before, _set, _rest = text.partition("\nset -euo pipefail")
    found = [line.removeprefix("#SBATCH --").partition("=") for line in before.splitlines() if line.startswith("#SBATCH --")]
    assert text.count("#SBATCH") == len(found)
    return {name: value for name, _equals, value in found}


def test_slurm_is_asked_for_the_planned_nodes_and_cards() -> None:
    asked = directives(files_of(PLANS["two nodes"], "slurm")["slurm.sh"])
    assert asked == {
        "job-name": "llama-3.1-8b", "nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "8", "cpus-per-task": "8", "output": "%x-%j.out",
    }  # fmt: skip
    workers = make_plan(num_workers=4)
    assert directives(files_of(workers, "slurm")["slurm.sh"])["cpus-per-task"] == "10"
    assert "gpus-per-node" not in directives(files_of(PLANS["full in fp32 on the cpu"], "slurm")["slurm.sh"])


@pytest.mark.parametrize("name", ["a model\n#SBATCH --nodes=900", "/tmp/$(touch hacked)/`x`", "мод ель", "-"])
def test_names_of_models_stay_names(name: str, tmp_path: Path) -> None:
    for format_name, file in (("slurm", "slurm.sh"), ("torchrun", "torchrun.sh")):
        text = files_of(make_plan(model=name, gpus="a100-80gb*8"), format_name)[file]
        assert text.count("#SBATCH") == (6 if file == "slurm.sh" else 0) + text.count("model #SBATCH")
        path = tmp_path / file
        path.write_text(text, encoding="utf-8")
        subprocess.run(["bash", "-n", str(path)], check=True)


def test_both_scripts_name_the_line_that_trains_with_brim(tmp_path: Path) -> None:
    (tmp_path / "my data.jsonl").write_text("{}\n", encoding="utf-8")
    for format_name, file, start in (("torchrun", "torchrun.sh", "bash torchrun.sh"), ("slurm", "slurm.sh", "sbatch slurm.sh")):
        text = files_of(PLANS["full, ddp"], format_name, data=str(tmp_path / "my data.jsonl"))[file]
        line = next(line for line in text.splitlines() if " -m brim " in line).removeprefix("#").strip()
        words = shlex.split(line)
        assert words[:2] == start.split()
        assert words[2:5] == ["-m", "brim", "train"]
        assert words[words.index("--data") + 1] == str(tmp_path / "my data.jsonl")
        assert words[words.index("--plan") + 1] == "plan.json"


MEETING = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
with open(os.path.join(sys.argv[1], f"rank-{dist.get_rank()}"), "w") as file:
    file.write(f"{int(total)} of {dist.get_world_size()} {sys.argv[2]}")
sys.stdout.flush()
os._exit(0)
"""
"""Ranks that meet and add up; gloo's threads may outlive the group, so each ends here and now."""
ON_ONE_MACHINE = '#!/bin/bash\nshift\nfor node in 0 1; do "$@" & nodes[$node]=$!; done\nfor one in "${nodes[@]}"; do wait "$one" || exit 1; done\n'
"""Stands for srun: its option is dropped, and both nodes are this machine."""


@pytest.mark.slow
@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sh"])
def test_two_nodes_really_meet(script: str, tmp_path: Path) -> None:
    plan = make_plan(8, 4, gpus="t4", nodes=2)
    emit(plan, [script.removesuffix(".sh")], tmp_path)
    (tmp_path / "meet.py").write_text(MEETING, encoding="utf-8")
    stands_in = tmp_path / "bin"
    stands_in.mkdir()
    for name, text in (("srun", ON_ONE_MACHINE), ("scontrol", "#!/bin/sh\necho 127.0.0.1\necho other\n")):
        (stands_in / name).write_text(text)
        (stands_in / name).chmod(0o755)
    path = os.pathsep.join([str(stands_in), str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", str(tmp_path / script), str(tmp_path / "meet.py"), str(tmp_path), "a word"]
    ended: list[tuple[int, str]] = []
    for _start in range(3):  # a port that was free may be taken by the time it is bound
        variables = {**torchrun.environment(), "PATH": path, "MASTER_PORT": str(free_port())}
        if script == "torchrun.sh":
            each = [{**variables, "MASTER_ADDR": "127.0.0.1", "NODE_RANK": str(node)} for node in range(2)]
        else:
            each = [{**variables, "SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "n[1-2]"}]
        nodes = [
            subprocess.Popen(command, env=one, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
            for one in each
        ]
        said = [node.communicate(timeout=120)[0] for node in nodes]
        ended = [(node.returncode, text) for node, text in zip(nodes, said, strict=True)]
        if all(code == 0 for code, _text in ended) or not any(torchrun.NEVER_MET.search(text) for _code, text in ended):
            break
    assert [code for code, _text in ended] == [0] * len(ended), ended
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["3 of 2 a word"] * 2


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
