"""How many processes train, who starts them, and how they hold the model: what was asked for, held against where brim was started."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from brim.errors import UsageError
from brim.locale import _
from brim.records import Plan
from brim.trainer.group import Group
from brim.trainer.ranks import World, sharding_of_environment
from brim.trainer.rendezvous import address_of, secret_for

if TYPE_CHECKING:
    from brim.trainer.request import TrainRequest

ENGINES = ("fsdp", "zero1", "zero2", "zero3")
_ALIKE = 0.03
"""Of the largest: GPUs whose free memory differs by less are alike."""
_NODE_RANK = ("SLURM_NODEID", "NODE_RANK", "GROUP_RANK")


def planned_in(path: Path) -> Plan:
    """The plan of `--plan`: a file, or the folder that `brim plan -o` wrote."""
    return Plan.read(path / "plan.json" if path.is_dir() else path)


def as_planned(request: TrainRequest) -> TrainRequest:
    """With the processes and the engine of the plan that was given, where flags say nothing else."""
    if request.plan is None:
        return request
    plan = planned_in(request.plan)
    best = plan.best
    if best is None or best.world_size == 1:
        return request
    nodes = plan.machine.nodes
    told: dict[str, Any] = {"gpus": best.world_size // nodes, "nodes": nodes, "sharding": best.sharding, "offload": best.offload}
    return replace(
        request, settings=replace(request.settings, **{name: told[name] for name in told if name not in request.pinned})
    )


def group_of(request: TrainRequest, world: World) -> Group | None:
    """The processes that brim has to start; None where somebody else did, or one is enough."""
    settings = request.settings
    if not world.is_alone:
        _check_against(request, world)
        return None
    if settings.ranks == 1 and request.launch is None:
        _refuse_alone(request)
        return None
    if settings.ranks == 1:
        raise UsageError(_("--launch starts several processes: say how many with --gpus N."))
    _check_nodes(request)
    group = Group(
        launcher=request.launch or "torchrun",
        gpus=settings.gpus,
        nodes=settings.nodes,
        node_rank=_node_rank(request),
        rendezvous=request.rendezvous,
        device=request.device,
    )
    if group.nodes == 1:
        return group
    host, _port = address_of(group)
    file = request.rendezvous_secret_file
    return replace(group, secret=secret_for(host, None if file is None else Path(file).expanduser()))


def crew_of(request: TrainRequest, world: World, group: Group | None) -> tuple[TrainRequest, World]:
    """The request with its engine and number of processes, and the world as the first process will see it."""
    if group is not None:
        world = World(0, group.gpus * group.nodes, 0, group.gpus)
    if world.is_alone:
        return request, world
    request = _with_memory_of_each(request, world)
    for name, several in (("memory", request.memories), ("speeds", request.speeds)):
        if several and len(several) != world.size:
            text = _("--{name} has {count} values, and there are {size} processes.")
            raise UsageError(text.format(name=name, count=len(several), size=world.size))
    if request.settings.gradient_as_bucket_view:
        raise UsageError(
            _("--gradient-as-bucket-view belongs to torch's wrapper, and `brim train` sums gradients without it."),
            hint=_("Leave it out: there are no buckets as large as the gradients."),
        )
    if len(set(request.memories)) == 1:
        request = replace(request, memories=())
    sharding = request.settings.sharding or sharding_of_environment()
    if sharding not in ENGINES:
        if request.settings.offload != "none":
            raise UsageError(_("--offload belongs to --sharding fsdp, zero1, zero2 or zero3."))
        return request, world
    micro = request.settings.micro_batch
    if request.is_pinned and request.effective_batch is not None and micro * world.size > request.effective_batch:
        text = _("{micro} (--micro-batch) x {size} (processes) = {product}, and the effective batch is {effective}.")
        raise UsageError(
            text.format(micro=micro, size=world.size, product=micro * world.size, effective=request.effective_batch),
            hint=_("Take --micro-batch {count} or less.").format(count=max(1, request.effective_batch // world.size)),
        )
    settings = replace(
        request.settings,
        gpus=world.local_size,
        nodes=world.nodes,
        sharding=cast("Any", sharding),
        sync_each_batch=sharding == "fsdp",
    )
    names = ("gpus", "nodes", "sharding", "sync_each_batch")
    pinned = {**request.pinned, **{name: getattr(settings, name) for name in names}}
    return replace(request, settings=settings, pinned=pinned), world


def _with_memory_of_each(request: TrainRequest, world: World) -> TrainRequest:
    """GPUs of one machine that differ, or of which one drives the display: each process may take what is free on its own."""
    if request.memory is not None or request.device == "cpu" or world.nodes > 1:
        return request
    from brim.machine.detect import detect

    cards = detect().accelerators[: world.local_size]
    limits = tuple(card.free_bytes or card.total_bytes for card in cards)
    if len(limits) < world.local_size or max(limits) - min(limits) <= _ALIKE * max(limits):
        return request
    return replace(request, memory=min(limits), memories=limits)


def _check_against(request: TrainRequest, world: World) -> None:
    """What a launcher has done cannot be asked for once more."""
    if request.launch is not None:
        raise UsageError(_("A launcher has started this process already: leave --launch out."))
    if request.settings.ranks not in {1, world.size}:
        text = _("--gpus and --nodes ask for {asked} processes, and the launcher has started {size}.")
        raise UsageError(text.format(asked=request.settings.ranks, size=world.size), hint=_("Leave --gpus and --nodes out."))
    told = sharding_of_environment()
    asked = request.settings.sharding
    if told is not None and asked not in {None, told}:
        text = _("accelerate was told to use {told}, and --sharding says {asked}.")
        raise UsageError(text.format(told=told, asked=asked), hint=_("Say the same in both, or in one of them."))


def _refuse_alone(request: TrainRequest) -> None:
    settings = request.settings
    if settings.sharding in ENGINES or settings.offload != "none":
        raise UsageError(
            _("--sharding and --offload spread a model over several processes, and one was asked for."),
            hint=_("Say how many: --gpus N."),
        )
    if request.memories or len(request.speeds) > 1:
        raise UsageError(_("--memory and --speeds with several values are for several processes: say how many with --gpus N."))


def _check_nodes(request: TrainRequest) -> None:
    if request.settings.nodes == 1:
        return
    if request.rendezvous is None:
        raise UsageError(
            _("With --nodes, the machines must know where to meet."),
            hint=_("Give the first machine's address on each: --rendezvous HOST:29500."),
        )
    if request.output is None:
        raise UsageError(_("With --nodes, every machine must write to the same folder."), hint=_("Give it: -o /shared/run."))


def _node_rank(request: TrainRequest) -> int:
    """As said; else as Slurm and launch scripts say it."""
    nodes = request.settings.nodes
    if request.node_rank is not None:
        return _checked_rank("--node-rank", request.node_rank, nodes)
    if nodes == 1:
        return 0
    for name in _NODE_RANK:
        if os.environ.get(name, "").isdecimal():
            return _checked_rank(name, int(os.environ[name]), nodes)
    raise UsageError(
        _("With --nodes, each machine must know which one it is."), hint=_("Give --node-rank 0 on the first, 1 on the next.")
    )


def _checked_rank(name: str, rank: int, nodes: int) -> int:
    if rank >= nodes:
        text = _("{name} {rank} of {nodes} nodes: they count from 0.")
        raise UsageError(text.format(name=name, rank=rank, nodes=nodes), hint=_("Say which machine this is: --node-rank N."))
    return rank
