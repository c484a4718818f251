"""DeepSpeed's ZeRO: parameters that train are one flat row of numbers, of which every rank owns an equal part.

Read from deepspeed/runtime/zero (0.19):

- `stage_1_and_2.py`: a rank holds its part in float32 beside the model's parameters (`single_partition_of_fp32_groups`, even where those
  are float32), with the optimizer's state. Gradients are copied into a bucket of `reduce_bucket_size` elements as they come
  (`setup_buckets`; two with `overlap_comm`) and die; larger ones wait for the next. A full bucket is reduced; where it crosses a border
  between parts, in a copy (`allreduce_bucket`). What a rank owns is moved into a buffer that holds every parameter its part touches,
  whole (`copy_grads_in_partition`), made when the first of them comes. ZeRO-1 keeps whole gradients and does all that when backward has
  ended.
- The step takes norms in float64, one gradient at a time (`get_grad_norm_direct`), makes the part's gradients one flat tensor, casts it
  to float32, and lets the optimizer work on that one tensor. Gathering the new parameters takes no memory.
- `stage3.py`: the bucket and the part of the gradients are there for good. The float32 copy is made beside float32 parameters too
  (`_create_fp32_partitions` compares a device with a name, which is never equal).
- `partitioned_param_coordinator.py`: parameters are gathered by submodule. Every call of a submodule, be it a container without parameters
  of its own, fetches another `prefetch_bucket_size` ahead, so that gathering runs ahead of use until `max_live_parameters` are there.
  They are given back unless they are small (`param_persistence_threshold`: those always stay), or will be used again within
  `max_reuse_distance` elements or what is already fetched ahead: the last layers stay between forward and backward, and in a model of
  less than half a billion parameters all of them do. What lies before the first parameter that trains is not used again by backward.
- Offload of the optimizer takes state, float32 copies and the part of the gradients to the host; ZeRO-3's of parameters their parts too.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from brim.memory.sharding.split import Split
from brim.memory.sharding.walk import FORWARDS, Moment, Parameter, by_stage

if TYPE_CHECKING:
    from brim.memory.sharding.shard import Parallel
    from brim.memory.stream import Birth, Trace

# deepspeed/runtime/zero/config.py: elements.
_REDUCE_ELEMENTS = 500_000_000
_PREFETCH_ELEMENTS = 50_000_000
# deepspeed/runtime/zero/config.py, `sub_group_size`.
_GROUP_ELEMENTS = 1_000_000_000
_PERSISTENT_ELEMENTS = 100_000
# In the place of a stage: the embedding that is gathered for the head too.
_TIED = -1
# deepspeed/runtime/zero/utils.py, `get_norm_dtype`.
_NORM_BYTES = 8


class _Zero(Split):
    """What all stages share: the bucket and the step."""

    def __init__(self, trace: Trace, parallel: Parallel) -> None:
        super().__init__(trace, parallel, widens=True, on_host=parallel.offload != "none")
        hidden = parallel.hidden
        # transformers/integrations/deepspeed.py, `trainer_config_finalize`.
        self.bucket_elements = hidden * hidden if hidden else _REDUCE_ELEMENTS
        self.trained_bytes = sum(parameter.size for parameter in self.reading.trainable)
        self.largest_elements = max((parameter.elements for parameter in self.reading.trainable), default=0)
        self._filled = 0
        self._arrived = 0
        """Elements whose gradients came in this backward."""
        self._waiting: list[int] = []
        self._in_bucket = 0

    @property
    def bucket_bytes(self) -> int:
        """Of one bucket."""
        return self.bucket_elements * self._item_bytes

    def of_the_step(self, number: int, birth: Birth) -> None:
        """Only state is the old trace's: the optimizer works on one flat tensor, and its temporaries are `flat_step`'s."""
        if birth.kind == "optimizer":
            super().of_the_step(number, birth)

    def gradient(self, number: int) -> None:
        """A gradient goes into the bucket, or waits for its turn if it is too large."""
        self.writer.copy(number)
        birth = self.writer.old.births[number]
        tied = self.reading.tied
        if tied is not None and birth.size == self.writer.old.births[tied].size:
            self._waiting.append(number)
        else:
            self.fill(number, birth.size // self._item_bytes)

    def fill(self, number: int, elements: int) -> None:
        """Room is made first."""
        if self._filled and self._filled + elements > self.bucket_elements:
            self.flush()
        if elements > self.bucket_elements:
            self._waiting.append(number)
        else:
            self.writer.drop(number)
        self._filled += elements
        self._in_bucket += 1

    def flush(self) -> None:
        """Reduce what is in the bucket."""
        if self._filled:
            self.reduce(self._filled, self._in_bucket)
        for number in self._waiting:
            self.writer.drop(number)
        self._waiting.clear()
        self._arrived += self._filled
        self._filled = self._in_bucket = 0

    def reduce(self, elements: int, tensors: int) -> None:
        """What a reduction takes in passing."""

    def finish(self, phase: str, round_: int) -> None:  # noqa: ARG002
        """The last bucket is reduced where backward ends."""
        if phase == "backward":
            self.flush()
            self._arrived = 0

    def flat_step(self, norm_elements: int) -> int:
        """Norms, then the part's gradients as one tensor, then the optimizer on it; the gradients' number is returned."""
        self.writer.transient(norm_elements * _NORM_BYTES, "zero:norm", "temporary")
        return self.writer.bear(self.at_once(self.split(self.trained_bytes)), "zero:flat-gradients", "gradients")

    def at_once(self, part_bytes: int) -> int:
        """How much of a rank's part the step works on at a time."""
        return part_bytes

    def flat_update(self, flat: int) -> None:
        """In float32, with the temporaries that the optimizer's step has per element."""
        wide = flat
        if self.widened(self.trained_bytes) != self.trained_bytes:
            wide = self.writer.bear(
                self.at_once(self.split(self.widened(self.trained_bytes))), "zero:flat-gradients", "gradients"
            )
            self.writer.die(flat)
        base = self.trained_bytes if self.reading.steps_all_at_once else self.largest_elements * self._item_bytes
        part = self.at_once(self.split(self.widened(self.trained_bytes)))
        self.released()
        self.writer.transient(part * self.reading.step_bytes // max(1, base), "zero:step", "temporary")
        self.writer.die(wide)

    def released(self) -> None:
        """The flat gradients are made: what they were made of may die."""


class ZeroOptimizer(_Zero):
    """One rank of ZeRO-1 or ZeRO-2."""

    def __init__(self, trace: Trace, parallel: Parallel) -> None:
        super().__init__(trace, parallel)
        self._splits_gradients = parallel.sharding == "zero2"
        self._buckets: list[int] = []
        self._parts: list[int] = []
        """The rank's gradients, of this step's earlier micro-batches."""
        self._fresh_parts: list[int] = []
        self._fresh_elements = 0
        self._owned = _owned(self.reading.trainable, self.split(self.trained_bytes // self._item_bytes), parallel.ranks)

    def start(self, phase: str, round_: int) -> None:  # noqa: ARG002
        """The step begins with norms and flat gradients."""
        if phase == "optimizer" and not self.on_host:
            self.flat_update(self.flat_step(min(self.largest_elements, self.split(self.trained_bytes) // self._item_bytes)))

    def released(self) -> None:
        """The part's gradients are in the flat tensor."""
        self._give_back(self._parts)

    def gradient(self, number: int) -> None:
        """The first one of a backward makes the buckets. ZeRO-1 reduces nothing before the end."""
        if not self._buckets:
            count = 2 if self.parallel.overlap else 1
            self._buckets = [self.writer.bear(self.bucket_bytes, "zero:bucket") for _bucket in range(count)]
        if self._splits_gradients:
            super().gradient(number)
        else:
            self.writer.copy(number)

    def reduce(self, elements: int, tensors: int) -> None:  # noqa: ARG002
        """A bucket within one part is reduced in place. A rank makes room for what it owns when the first of that comes."""
        total = self.trained_bytes // self._item_bytes
        part = max(1, self.split(total))
        first, end = total - self._arrived - elements, total - self._arrived
        if self.parallel.ranks > 1 and -(-(first + 1) // part) * part < end:
            self.writer.transient(elements * self._item_bytes, "zero:reduce")
        self._keep(max(self._owned[max(0, first) // part :], default=0))

    def finish(self, phase: str, round_: int) -> None:
        """Where backward ends, the buckets are given back."""
        if phase == "build":
            self.writer.bear(0 if self.on_host else self.split(self.widened(self.trained_bytes)), "zero:master", "optimizer")
            if self.on_host:
                self.writer.bear(self.largest_elements * self._item_bytes, "zero:offload")
        super().finish(phase, round_)
        if phase != "backward":
            return
        if not self._splits_gradients and self.reading.is_last_round(round_):
            self._keep(self._most_beside_whole())
            for number in set(self.reading.gradients.values()):
                self.writer.drop(number)
            self._keep(max(self._owned, default=0))
        if self._splits_gradients or self.reading.is_last_round(round_):
            self._give_back(self._buckets)  # ZeRO-1 gives them back with the reduction, once a step (`_release_ipg_buffers`)
        if self._parts:
            self._give_back(self._fresh_parts)
        else:
            self._parts, self._fresh_parts = self._fresh_parts, []
        self._fresh_elements = 0

    def _keep(self, elements: int) -> None:
        """Let the room for a rank's gradients be at least so large."""
        if elements > self._fresh_elements and not self.on_host:
            added = (elements - self._fresh_elements) * self._item_bytes
            self._fresh_parts.append(self.writer.bear(added, "zero:gradients", "gradients"))
            self._fresh_elements = elements

    def _most_beside_whole(self) -> int:
        """ZeRO-1: elements of a rank's room, less what has gone through the bucket before it is made, where that is most.

        Gradients are reduced in the model's order. Those that fit into the bucket die there; larger ones only where backward ends.
        """
        part = max(1, self.split(self.trained_bytes // self._item_bytes))
        offset = gone = rank = most = 0
        for parameter in self.reading.trainable:
            offset += parameter.elements
            while rank < len(self._owned) and rank * part < offset:
                most = max(most, self._owned[rank] - gone)
                rank += 1
            gone += parameter.elements if parameter.elements <= self.bucket_elements else 0
        return most

    def _give_back(self, numbers: list[int]) -> None:
        for number in numbers:
            self.writer.die(number)
        numbers.clear()


def _owned(trainable: list[Parameter], part: int, ranks: int) -> list[int]:
    """Elements of the parameters that each rank's part touches: of those at its borders too it keeps the whole gradient."""
    owned = [0] * ranks
    offset = 0
    for parameter in trainable:
        end = offset + parameter.elements
        for rank in range(offset // max(1, part), min(ranks, -(-end // max(1, part)))):
            owned[rank] += parameter.elements
        offset = end
    return owned


class Zero3(_Zero):
    """One rank of ZeRO-3."""

    def __init__(self, trace: Trace, parallel: Parallel) -> None:
        super().__init__(trace, parallel)
        hidden = parallel.hidden
        self._prefetch = min(int(0.9 * hidden * hidden) if hidden else _PREFETCH_ELEMENTS, parallel.live_elements)
        persistent = 10 * hidden if hidden else _PERSISTENT_ELEMENTS
        self._persistent = [each for each in self.reading.parameters if each.elements <= persistent]
        self._groups = by_stage(each for each in self.reading.parameters if each.elements > persistent)
        # A frozen embedding that is the head too is used again there, though backward does not come back to the first stage.
        self._tied = [each for each in self._groups.get(0, []) if each.number == self.reading.tied and not self._returns(0)]
        self._groups[0] = [each for each in self._groups[0] if each not in self._tied]
        self._gathered: dict[int, list[int]] = {}
        # One rank alone has nothing to gather, unless its parameters are on the host (partition_parameters.py, `NoGatherHandle`).
        self._gathers = parallel.ranks > 1 or parallel.offload == "parameters"

    def parameter(self, parameter: Parameter) -> None:
        """A part, on the device or on the host."""
        if self.parallel.offload != "parameters":
            self.writer.copy(parameter.number, self.split(parameter.size))

    def start(self, phase: str, round_: int) -> None:  # noqa: ARG002
        """The step begins with norms and flat gradients."""
        if phase == "optimizer" and not self.on_host:
            self.flat_update(self.flat_step(self.split(self.largest_elements)))

    def at_once(self, part_bytes: int) -> int:
        """One group of the part after the other (deepspeed/runtime/zero/stage3.py, `_create_fp16_sub_groups`)."""
        elements = self.split(self.trained_bytes) // self._item_bytes
        return part_bytes * min(_GROUP_ELEMENTS, elements) // max(1, elements)

    def finish(self, phase: str, round_: int) -> None:
        """What is there for good is made when the model is built; whatever is gathered at the end of backward is given back."""
        super().finish(phase, round_)
        if phase == "build":
            if not self.on_host:
                self.writer.bear(self.split(self.widened(self.trained_bytes)), "zero:master", "optimizer")
                self.writer.bear(self.split(self.trained_bytes), "zero:gradients", "gradients")
            self.writer.bear(self.bucket_bytes, "zero:bucket")
            if self._gathers:
                self.writer.bear(sum(parameter.size for parameter in self._persistent), "zero:persistent", "parameters")
        elif phase in {"backward", "evaluation"}:
            for stage in list(self._gathered):
                self._give_back(stage)

    def enter(self, moment: Moment) -> None:
        """Gather what the stage needs."""
        if moment.stage in self._gathered or not self._gathers or moment.phase not in {*FORWARDS, "backward"}:
            return
        if moment.phase in FORWARDS and moment.stage == 0:
            self._gathered[_TIED] = [self.writer.bear(parameter.size, "zero:gather") for parameter in self._tied]
        if moment.phase == "forward" and self._stays(moment.stage):
            self._gathered[moment.stage] = [
                self.writer.bear(parameter.size, "zero:gather") for parameter in self._groups[moment.stage]
            ]
        elif moment.phase in FORWARDS or self._returns(moment.stage):
            sizes = max(self._window(moment.stage), self._ahead(moment), key=sum)
            self._gathered[moment.stage] = [self.writer.bear(size, "zero:gather") for size in sizes]

    def leave(self, moment: Moment) -> None:
        """Give it back, unless it is used again soon."""
        if moment.phase == "backward" or (
            moment.phase in FORWARDS and not (moment.phase == "forward" and self._stays(moment.stage))
        ):
            self._give_back(moment.stage)

    def reduce(self, elements: int, tensors: int) -> None:
        """Several gradients are interleaved in a copy (deepspeed/runtime/comm/coalesced_collectives.py, `reduce_scatter_coalesced`)."""
        if tensors > 1:
            self.writer.transient(elements * self._item_bytes, "zero:reduce")

    def _returns(self, stage: int) -> bool:
        """Whether backward comes as far as the stage: it ends at the first parameter that trains."""
        return any(each.stage <= stage for each in self.reading.trainable)

    def _stays(self, stage: int) -> bool:
        if not self._returns(stage):
            return False
        behind = sum(each.elements for each in self.reading.parameters if each.stage > stage)
        return 2 * behind < max(self.parallel.reuse_elements, self.parallel.live_elements)

    def _ahead(self, moment: Moment) -> list[int]:
        """What is gathered before it is used, where not all stays: parameter by parameter, the nearest first."""
        backward = moment.phase == "backward"
        to_come = [
            parameter
            for stage in sorted(self._groups, reverse=backward)
            if (stage <= moment.stage if backward else stage >= moment.stage) and stage not in self._gathered
            for parameter in self._groups[stage]
        ]
        staying = sum(each.elements for stage in self._gathered for each in self._groups.get(stage, self._tied))
        room = max(0, self.parallel.live_elements - staying)
        elements = accumulate(each.elements for each in to_come)
        return [each.size for each, so_far in zip(to_come, elements, strict=True) if so_far <= room]

    def _window(self, stage: int) -> list[int]:
        """The most that is gathered at once: a submodule's parameter, and those that follow it until the prefetch is full."""
        parameters = self._groups.get(stage, [])
        most: list[int] = []
        for index, parameter in enumerate(parameters):
            sizes, ahead = [parameter.size], 0
            for following in [*parameters[index + 1 :], *parameters[:index]]:
                if ahead >= self._prefetch:
                    break
                ahead += following.elements
                sizes.append(following.size)
            most = max(most, sizes, key=sum)
        return most

    def _give_back(self, stage: int) -> None:
        for number in self._gathered.pop(stage, []):
            self.writer.die(number)
