"""FSDP2: every module's parameters are split over the ranks, gathered when it runs, and given back.

Wrapped as accelerate does (accelerate/utils/fsdp_utils.py, `fsdp2_prepare_model`): every layer; the embedding; and last norm with head (and
the embedding, if they are one), which alone is not given back between forward and backward. Read from
torch/distributed/fsdp/_fully_shard:

- `_fsdp_param_group.py`, `wait_for_unshard`: a gather fills a flat buffer that is copied out into whole parameters. In forward the buffer
  lives until the next module's is copied out, so that both can overlap; in backward it dies at once, and the module before is gathered
  ahead (`_backward_prefetch`).
- `post_backward`: the parameters are given back, then the last module's reduction buffer is freed, then this one's is made
  (`_fsdp_collectives.py`, `foreach_reduce`): all gradients of the module are copied into it before they die. What a rank keeps is its
  output. The buffer of the last module lives until the next module's turn or the end of backward.
- One rank gathers by copying, without the flat buffer (`unshard`, `world_size == 1`).
- With `no_sync`, which the Trainer uses between micro-batches, whole gradients stay until the last one.
- Mixed precision: shards are cast into a flat buffer before they are gathered; the reduced gradient is cast back.
- `CPUOffloadPolicy`: shards, gradients and state are the host's; the device sees a module's shard when it is gathered.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from brim.memory.sharding.split import Split
from brim.memory.sharding.walk import FORWARDS, Moment, Parameter, by_stage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from brim.memory.sharding.shard import Parallel
    from brim.memory.stream import Trace

_PACKED_BYTES_A_SCALE = 32


class FullyShard(Split):
    """One rank of FSDP2."""

    def __init__(self, trace: Trace, parallel: Parallel) -> None:
        super().__init__(trace, parallel, widens=parallel.master, on_host=parallel.offload != "none")
        reading = self.reading
        self._ignored = set(_left_whole(reading.parameters, splits_packed=parallel.splits_packed))
        self._groups = by_stage(each for each in reading.parameters if each.number not in self._ignored)
        if reading.tied is not None:
            self._groups[reading.last] += self._groups.pop(0, [])
        self._flying: dict[int, int] = {}
        """Stages with a gather under way, and its buffer."""
        self._lingering = -1
        self._whole: dict[int, list[int]] = {}
        self._held: dict[int, list[int]] = defaultdict(list)
        """Whole gradients by stage."""
        self._shards: dict[int, int] = {}
        self._reducing = -1

    def parameter(self, parameter: Parameter) -> None:
        """A shard, of float32 where a master copy is wanted."""
        if parameter.number in self._ignored:
            self.writer.copy(parameter.number)
        elif not self.on_host:
            widened = self.widened(parameter.size) if parameter.trains else parameter.size
            self.writer.copy(parameter.number, self.split(widened))

    def enter(self, moment: Moment) -> None:
        """Gather what the stage needs; in backward, what the next one needs as well."""
        tied_now = moment.stage == 0 and self.reading.tied is not None
        if moment.phase in FORWARDS:
            self._gather(self.reading.last if tied_now else moment.stage)
            self._copy_out(self.reading.last if tied_now else moment.stage, lingers=True)
        elif moment.phase == "backward" and moment.stage != self.reading.last:
            self._gather(moment.stage)
            self._copy_out(moment.stage, lingers=False)
            self._gather(moment.stage - 1)

    def leave(self, moment: Moment) -> None:
        """Give the parameters back; in backward, reduce the gradients."""
        if moment.phase in FORWARDS and moment.stage != self.reading.last:
            self._give_back(moment.stage)
        elif moment.phase == "backward" and not (self.reading.tied is not None and moment.stage == self.reading.last):
            self._prefetch_from_head(moment.stage)
            self._give_back(moment.stage)
            self._reduce(moment.stage, moment.round)

    def finish(self, phase: str, round_: int) -> None:
        """What is left over at the end of forward, of backward, of the step."""
        if phase in FORWARDS:
            self.writer.die(self._lingering)
        elif phase == "backward":
            for stage in sorted(self._held, reverse=True):
                self._give_back(stage)
                self._reduce(stage, round_)
            for stage in list(self._whole):
                self._give_back(stage)
            for stage in list(self._flying):
                self.writer.die(self._flying.pop(stage))
            self.writer.die(self._reducing)
        elif phase == "optimizer":
            for stage in list(self._shards):
                self.writer.die(self._shards.pop(stage))

    def gradient(self, number: int) -> None:
        """A whole gradient lives until its stage is reduced."""
        self.writer.copy(number)
        self._prefetch_from_head(self.now.stage)
        home = self.reading.gradients[number]
        if home == number or self.parallel.synchronise_each:
            self._held[self.now.stage].append(number)

    def death(self, number: int) -> None:
        """A gradient that is held dies when it is reduced, not when one device would have added it up."""
        if number not in self._held[self.now.stage]:
            super().death(number)

    def _prefetch_from_head(self, stage: int) -> None:
        """The head is there already; its turn in backward is where the last layer is gathered ahead."""
        if stage == self.reading.last and self.reading.layers:
            self._gather(stage - 1)

    def _gather(self, stage: int) -> None:
        if stage in self._whole or stage in self._flying or stage not in self._groups:
            return
        size = sum(parameter.size for parameter in self._groups[stage])
        cast = -1
        if self.on_host or self.parallel.master:
            cast = self.writer.bear(self.split(size), "fsdp:gather-input")
        self._flying[stage] = self.writer.bear(size if self.parallel.ranks > 1 else 0, "fsdp:gather")
        self.writer.die(cast)

    def _copy_out(self, stage: int, *, lingers: bool) -> None:
        if stage not in self._flying:
            return
        self._whole[stage] = [self.writer.bear(parameter.size, "fsdp:whole") for parameter in self._groups[stage]]
        buffer = self._flying.pop(stage)
        if lingers:
            buffer, self._lingering = self._lingering, buffer
        self.writer.die(buffer)

    def _give_back(self, stage: int) -> None:
        for number in self._whole.pop(stage, []):
            self.writer.die(number)

    def _reduce(self, stage: int, round_: int) -> None:
        self.writer.die(self._reducing)
        if not (self.parallel.synchronise_each or self.reading.is_last_round(round_)):
            return
        gradients = self._held.pop(stage, [])
        size = sum(self.writer.old.births[number].size for number in gradients)
        self._reducing = self.writer.bear(size, "fsdp:reduce-input")
        for number in gradients:
            self.writer.drop(number)
        output = self.writer.bear(self.split(size), "fsdp:reduce-output", "gradients")
        if self.parallel.master:
            wide = self.writer.bear(self.split(self.widened(size)), "fsdp:reduce-output", "gradients")
            self.writer.die(output)
            output = wide
        if self.on_host or stage in self._shards:
            self.writer.die(output)
        elif size:
            self._shards[stage] = output


def _left_whole(parameters: Iterable[Parameter], *, splits_packed: bool) -> Iterator[int]:
    """Numbers of what bitsandbytes keeps in bytes and every rank holds whole.

    Accelerate leaves out bytes, which would not survive being split; packed weights that are stored as floating-point numbers it
    takes. Their scales are no parameters for bitsandbytes, and are always whole: there is one for 64 weights, a byte for 32.
    """
    before = 0
    for each in parameters:
        if not each.trains and each.item_bytes == 1:
            if not splits_packed or each.size * _PACKED_BYTES_A_SCALE in range(before, before + _PACKED_BYTES_A_SCALE):
                yield each.number
            before = each.size
