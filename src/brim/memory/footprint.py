"""The memory of one structure at many micro-batches: what a search asks again and again, so everything is made once and kept.

A family gives every micro-batch from one trace, a replay gives what the device must hold, and the figures themselves are kept on disk, so
that the same question is answered again without a replay. Where there is no family, each micro-batch is traced itself.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from brim.memory.allocator import Requests
from brim.memory.cache import key_of, load, store
from brim.memory.estimate import Held, Needs, Question
from brim.memory.obtain import Obtained, obtain_family
from brim.memory.parallel import parallel_of
from brim.memory.peaks import on_card
from brim.memory.sharding.shard import shard
from brim.records import MemoryPrediction

if TYPE_CHECKING:
    from brim.memory.family import Facts, Family
    from brim.memory.setup import Setup, Target
    from brim.memory.stream import Trace
    from brim.memory.work import Work

_kept: dict[tuple[int, int, int], tuple[Family, Trace]] = {}
_MOST_KEPT = 12


def _trace_of(family: Family, micro_batch: int, length: int) -> Trace:
    """The stream of one shape, the last few kept: engines that shard it differently start from the same."""
    key = id(family), micro_batch, length
    if key not in _kept:
        if len(_kept) >= _MOST_KEPT:
            del _kept[next(iter(_kept))]
        _kept[key] = family, family.at(micro_batch, length)
    return _kept[key][1]


_NEVER = 1 << 60
"""Bytes that no device has."""
_MORE = 64
"""Sequences over which the bytes of one more are told: beyond a few, activations decide the peak."""


@dataclass
class Footprint:
    """One structure on one device."""

    question: Question
    """Of any micro-batch; its accumulation decides whether gradients live through forward."""
    _device_bytes: dict[int, int] = field(default_factory=dict)
    _least_bytes: dict[int, int] = field(default_factory=dict)
    _bounds: dict[int, int] = field(default_factory=dict)
    _predictions: dict[int, dict[str, Any]] = field(default_factory=dict)
    _obtained: dict[int, Obtained] = field(default_factory=dict)
    _is_read: bool = False
    _grew: bool = False

    def device_bytes(self, micro_batch: int, *, limit: int = _NEVER) -> int:
        """What nvidia-smi would show at the peak; any number above `limit` where it is more than that."""
        self._read()
        if micro_batch not in self._device_bytes:
            if micro_batch not in self._least_bytes:
                self._least_bytes[micro_batch] = self._least(micro_batch)
                self._grew = True
            if self._least_bytes[micro_batch] > limit:
                return self._least_bytes[micro_batch]
            self._device_bytes[micro_batch] = self._replayed(micro_batch, self._obtain(micro_batch))
            self._grew = True
        return self._device_bytes[micro_batch]

    def device_bytes_within(self, micro_batch: int, limit_bytes: int) -> int:
        """What nvidia-smi would show at the peak, if the allocator releases cached segments to stay within a limit."""
        unlimited = self.device_bytes(micro_batch)
        if unlimited <= limit_bytes or self.question.where.gpu is None:
            return unlimited
        return self._replayed(micro_batch, self._obtain(micro_batch), limit_bytes)

    def alone_at_most(self) -> int:
        """Bytes for a micro-batch of one, from the trace of several: alone it needs as much, or less where nothing is repeated."""
        self._read()
        if 1 in self._device_bytes:
            return self._device_bytes[1]
        if 1 not in self._bounds:
            family = self._family(2)
            length = self.question.settings.seq_len
            if family is None or length is None:
                return self.device_bytes(1)
            self._bounds[1] = self._replayed(1, Obtained(family.deep.at(1, length), family.facts))
            self._grew = True
        return self._bounds[1]

    def sequence_bytes(self) -> int:
        """What one more sequence needs at least, on a device that trains alone; 0 where each micro-batch is traced itself."""
        family = self._family(2)
        length = self.question.settings.seq_len
        if family is None or length is None:
            return 0
        few, many = (family.deep.least_allocated_bytes(size, length) for size in (2, 2 + _MORE))
        return (many - few) // _MORE

    def prediction(self, micro_batch: int) -> MemoryPrediction:
        """The whole answer, as `brim estimate` gives it."""
        self._read()
        if micro_batch not in self._predictions:
            question = self._at(micro_batch)
            held = Held.of(question, self._obtain(micro_batch))
            needs = Needs.of(held, question.where, question.settings.ranks)
            self._predictions[micro_batch] = asdict(needs.prediction(held.walk, question.where.limit_bytes))
            self._device_bytes[micro_batch] = needs.device
            self._grew = True
        limit = self.question.where.limit_bytes
        stored = self._predictions[micro_batch]
        fits = stored["smallest_surviving_limit_bytes"] <= limit
        return MemoryPrediction(**{**stored, "limit_bytes": limit, "fits": fits})

    @property
    def work(self) -> Work:
        """What the structure computes."""
        family = self._family(2)
        if family is not None:
            return family.work
        work = self._obtain(self.question.settings.micro_batch).work
        assert work is not None
        return work

    @property
    def facts(self) -> Facts:
        """Of the model as it is built."""
        family = self._family(2)
        return family.facts if family is not None else self._obtain(self.question.settings.micro_batch).facts

    @property
    def attention_kernel(self) -> str:
        """What attention runs on."""
        return Obtained(cast("Any", None), self.facts).attention_kernel

    def wanted(self, micro_batch: int) -> tuple[Setup, Target] | None:
        """What must be traced for a micro-batch; None where its figures are known, or nothing can be kept."""
        self._read()
        question = self._at(micro_batch)
        if question.config is None or not question.cache or micro_batch in self._predictions:
            return None
        return question.setup(), question.where.target

    def keep(self) -> None:
        """Write down what was found out."""
        if self._grew and self.question.cache and self.question.config is not None:
            said = {
                "device": self._device_bytes,
                "least": self._least_bytes,
                "bounds": self._bounds,
                "predictions": self._predictions,
            }
            store(self._name(), {"json": np.frombuffer(json.dumps(said).encode(), dtype=np.uint8)})
            self._grew = False

    def _read(self) -> None:
        if self._is_read:
            return
        self._is_read = True
        stored = load(self._name()) if self.question.cache and self.question.config is not None else None
        if stored is not None:
            said = json.loads(stored["json"].tobytes())
            for name, known in (("device", self._device_bytes), ("least", self._least_bytes), ("bounds", self._bounds)):
                known.update({int(size): count for size, count in said[name].items()})
            self._predictions.update({int(size): found for size, found in said["predictions"].items()})

    def _name(self) -> str:
        question = self._at(1)
        around = question.where.outside(question.settings.ranks)
        return key_of(
            {
                "footprint": vars(question.settings),
                "config": dict(question.config),
                "target": vars(question.where.target),
                "outside": asdict(around),
                "is_cpu": question.where.gpu is None,
            }
        )

    def _family(self, micro_batch: int) -> Family | None:
        question = self._at(micro_batch)
        if question.config is None:
            return None
        return obtain_family(question.setup(), question.where.target, cache=question.cache)

    def _obtain(self, micro_batch: int) -> Obtained:
        if micro_batch not in self._obtained:
            family = self._family(micro_batch)
            question = self._at(micro_batch)
            if family is not None:
                assert question.settings.seq_len is not None
                return Obtained(_trace_of(family, micro_batch, question.settings.seq_len), family.facts)
            self._obtained[micro_batch] = question.obtain()
        return self._obtained[micro_batch]

    def _least(self, micro_batch: int) -> int:
        """A bound that costs nothing: blocks of 512 bytes, on a device that trains alone. Shards hold less."""
        question = self._at(micro_batch)
        family = self._family(micro_batch) if question.settings.sharding in {"none", "ddp"} else None
        if family is None:
            return 0
        assert question.settings.seq_len is not None
        beyond = question.where.outside(question.settings.ranks).device_bytes if question.where.gpu is not None else 0
        return family.deep.least_allocated_bytes(micro_batch, question.settings.seq_len) + beyond

    def _replayed(self, micro_batch: int, obtained: Obtained, limit_bytes: int | None = None) -> int:
        """Bytes at the peak within the limit; without a limit, if they do not fit."""
        question = self._at(micro_batch)
        trace = obtained.trace
        parallel = parallel_of(question.settings, question.config, on_cpu=question.where.gpu is None)
        if parallel is not None:
            trace = shard(trace, parallel)[0]
        if question.where.gpu is None:
            return question.walk(obtained).peak_bytes()
        around = question.where.outside(question.settings.ranks)
        trace = on_card(trace, around)
        requests = Requests.of(trace.events, [birth.size for birth in trace.births])
        beyond = around.device_bytes
        done = requests.replay(limit_bytes=None if limit_bytes is None else limit_bytes - beyond)
        return (done if done.survived else requests.replay()).peak_reserved_bytes + beyond

    def _at(self, micro_batch: int) -> Question:
        return replace(self.question, settings=replace(self.question.settings, micro_batch=micro_batch))
