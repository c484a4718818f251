"""Who starts the processes: accelerate's config with its launch script, torchrun, and torchrun under Slurm."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

from brim.locale import _
from brim.planner.emit import deepspeed
from brim.planner.emit.arguments import by_fsdp
from brim.planner.emit.files import Files
from brim.planner.emit.loss_division import loss_division_notes
from brim.planner.emit.said import head
from brim.planner.emit.text import comments, yaml_text

if TYPE_CHECKING:
    from brim.planner.emit.recipe import Recipe

ACCELERATE = "accelerate.yaml"
LAUNCH = "launch.sh"
TORCHRUN = "torchrun.sh"
SLURM = "slurm.sh"
_PORT = 29500
_HERE = 'here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\n'


def accelerate_files(recipe: Recipe) -> Files:
    """Accelerate's config, its launch script, and `deepspeed.json` where ZeRO needs it."""
    texts = {ACCELERATE: accelerate_text(recipe), LAUNCH: _launch(recipe)}
    if recipe.zero_stage is not None:
        texts[deepspeed.NAME] = deepspeed.deepspeed_text(recipe)
    return Files(texts, (*recipe.notes, *_notes(recipe)))


def torchrun_files(recipe: Recipe) -> Files:
    """`torchrun.sh`."""
    return Files({TORCHRUN: _torchrun(recipe)}, (*recipe.notes, *_notes(recipe)))


def slurm_files(recipe: Recipe) -> Files:
    """`slurm.sh`, for sbatch."""
    partition = _("slurm.sh names no partition, account or time limit: give them to sbatch.")
    return Files({SLURM: _slurm(recipe)}, (*recipe.notes, *_notes(recipe), partition))


def _notes(recipe: Recipe) -> list[str]:
    text = _(
        "A launcher starts processes only: your train.py must take micro-batches of {micro} and {accumulation} accumulation steps, as in "
        "training_arguments.py (--emit transformers)."
    )
    cut = text.format(micro=recipe.cut.micro_batch, accumulation=recipe.cut.accumulation)
    return [cut, *loss_division_notes(recipe, sets_it=False)]


def accelerate_text(recipe: Recipe) -> str:
    """The config that `accelerate launch --config_file` reads."""
    nodes = recipe.plan.machine.nodes
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _distributed_type(recipe),
        "num_processes": recipe.best.world_size,
        "num_machines": nodes,
        "machine_rank": 0,
        "use_cpu": recipe.on_cpu,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
    }
    if recipe.zero_stage is None:
        settings["mixed_precision"] = recipe.mixed or "no"
    if nodes > 1:
        settings |= {"main_process_ip": "127.0.0.1", "main_process_port": _PORT}
    if recipe.zero_stage is not None:
        zero3 = recipe.zero_stage == 3
        settings["deepspeed_config"] = {"deepspeed_config_file": deepspeed.NAME, "zero3_init_flag": zero3}
    if recipe.is_fsdp:
        settings["fsdp_config"] = _fsdp(recipe)
    return yaml_text(head(recipe, "accelerate launch --config_file accelerate.yaml train.py", *_notes(recipe)), settings)


def _distributed_type(recipe: Recipe) -> str:
    if recipe.zero_stage is not None:
        return "DEEPSPEED"
    if recipe.is_fsdp:
        return "FSDP"
    return "MULTI_GPU" if recipe.best.world_size > 1 else "NO"


def _fsdp(recipe: Recipe) -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_activation_checkpointing": by_fsdp(recipe),
        "fsdp_offload_params": recipe.best.offload == "parameters",
    }


def _script(lines: list[str]) -> str:
    return "#!/usr/bin/env bash\n" + lines[0] + "\nset -euo pipefail\n" + "".join(lines[1:])


def _launch(recipe: Recipe) -> str:
    command = ['accelerate launch --config_file "$here/accelerate.yaml"']
    if recipe.zero_stage is not None:
        command.append('--deepspeed_config_file "$here/deepspeed.json"')
    if recipe.plan.machine.nodes > 1:
        command.append('--machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT"')
    start = head(recipe, _("bash launch.sh train.py --your --arguments; without a name it starts train.py."), *_notes(recipe))
    return _script([comments([*start, *_variables(recipe)]), _HERE, *_defaults(recipe), _command(command)])


def _torchrun(recipe: Recipe) -> str:
    nodes, each = recipe.plan.machine.nodes, recipe.gpus_per_node
    command = [f"torchrun --nnodes={nodes} --nproc-per-node={each}"]
    if nodes > 1:
        command.append(
            '--node-rank="$NODE_RANK" --rdzv-backend=c10d --rdzv-id="$JOB_ID" --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"'
        )
    else:
        command[0] = f"torchrun --standalone --nnodes=1 --nproc-per-node={each}"
    start = head(recipe, _("bash torchrun.sh train.py --your --arguments; without a name it starts train.py."), *_notes(recipe))
    ranks = _(
        "torchrun gives every process RANK, LOCAL_RANK and WORLD_SIZE (here {ranks}); the Trainer and accelerate read them."
    )
    said = [*start, ranks.format(ranks=recipe.best.world_size), *_variables(recipe)]
    return _script(
        [comments(said) + _with_brim(recipe, f"bash {TORCHRUN}"), *_defaults(recipe), *_job(recipe), _command(command)]
    )


def _slurm(recipe: Recipe) -> str:
    nodes, each = recipe.plan.machine.nodes, recipe.gpus_per_node
    directives = {
        "job-name": re.sub(r"[^\w.-]+", "-", recipe.plan.workload.model.rsplit("/", 1)[-1]) or "training",
        "nodes": nodes,
        "ntasks-per-node": 1,
        **({} if recipe.on_cpu else {"gpus-per-node": each}),
        # Every rank computes on a core of its own beside its loader workers.
        "cpus-per-task": each * (1 + recipe.best.num_workers),
        "output": "%x-%j.out",
    }
    start = head(recipe, _("sbatch slurm.sh train.py --your --arguments; without a name it starts train.py."), *_notes(recipe))
    one = _("One task a node starts torchrun, which starts {each} processes; the first node of the job is where they meet.")
    said = comments([*start, one.format(each=each)]) + _with_brim(recipe, f"sbatch {SLURM}")
    asked = "".join(f"#SBATCH --{name}={value}\n" for name, value in directives.items())
    command = [
        f"srun --kill-on-bad-exit=1 torchrun --nnodes={nodes} --nproc-per-node={each}",
        '--rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="${names[0]}:$MASTER_PORT"',
    ]
    meeting = [
        'mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")\n',
        f': "${{MASTER_PORT:=$(({_PORT} + SLURM_JOB_ID % 1000))}}"\n',
    ]
    return _script([said + asked, *meeting, _command(command)])


def _with_brim(recipe: Recipe, start: str) -> str:
    """The planned training by brim itself, as one line that can be copied."""
    words = ["train", recipe.plan.workload.model, "--data", recipe.data or "FILE", "--plan", "plan.json", "-o", "RUN"]
    line = " ".join(shlex.join(words).split())
    return comments([_("With brim as the program, which cuts every batch exactly:")]) + f"#   {start} -m brim {line}\n"


def _variables(recipe: Recipe) -> list[str]:
    said = []
    if not recipe.on_cpu:
        said.append(
            _("CUDA_VISIBLE_DEVICES chooses the cards; {count} of them must be visible on a node.").format(
                count=recipe.gpus_per_node
            )
        )
    if recipe.plan.machine.nodes > 1:
        text = _("Start it on each of {nodes} nodes: MASTER_ADDR is the first node's address, NODE_RANK 0 to {last}.")
        said.append(text.format(nodes=recipe.plan.machine.nodes, last=recipe.plan.machine.nodes - 1))
    return said


def _defaults(recipe: Recipe) -> list[str]:
    if recipe.plan.machine.nodes == 1:
        return []
    return [
        ': "${MASTER_ADDR:?MASTER_ADDR=first.node.example}"\n',
        ': "${NODE_RANK:?NODE_RANK=0}"\n',
        f': "${{MASTER_PORT:={_PORT}}}"\n',
    ]


def _job(recipe: Recipe) -> list[str]:
    return [': "${JOB_ID:=training}"\n'] if recipe.plan.machine.nodes > 1 else []


def _command(parts: list[str]) -> str:
    whole = " \\\n  ".join([*parts, '"$@"'])
    return f'if [ "$#" -eq 0 ]; then set -- train.py; fi\nexec {whole}\n'
