"""What ranks say to each other in one optimizer step: one small talk, then one sum of the gradients.

Data-parallel wrappers reduce while backward runs, so a rank that fails in the middle leaves the others waiting. Here every rank finishes
its own micro-batches first, says how it went, and only then are gradients summed: nothing that can fail stands between the first
collective of the sum and its last. The talk goes through gloo, which needs no memory of a GPU; the buffers of the sum are taken before
training starts.

Rounding: a gradient is copied to a buffer, multiplied by its rank's scale there, summed there and copied back. Buffers of 16-bit
gradients are float32, so these are rounded once, at the end, whatever the number of ranks; wider ones are rounded by the product and by
each sum, as in any reduction. It costs twice the bytes on the wire for 16-bit gradients, and their sum cannot overflow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist

from brim.errors import OutOfMemoryError, RunError, UnsupportedError, UsageError, out_of_memory_family
from brim.locale import _
from brim.step.exchange import gather

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")

BUCKET_BYTES: Final = 25 << 20
"""As much as DistributedDataParallel sends at once."""

# What a parameter's gradient is on one rank, then on all of them together.
_NONE, _DENSE, _SPARSE = 0, 1, 2
_EVERYWHERE, _SOMEWHERE = 1, 2

_SAME_SUM: Final = 1e-5
"""Of the sum of a tensor's magnitudes, by which two sums of the same weights may differ."""
_WIRE: Final = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Ranks:
    """All processes of the default process group, which hold the same parameters in the same order.

    With one process every method is local and free. With more, making one is collective, and so are `gather` and `reduce`: all ranks call
    them, in the same order. Parameters must be on their devices by then; frozen ones may be among them, and may be unfrozen later.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.parameters = list({id(parameter): parameter for parameter in parameters}.values())
        _refuse_sharded(self.parameters)
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if together else 0
        self.size = dist.get_world_size() if together else 1
        self.wish: Callable[[], int] = _nothing
        """Bits that this rank wants all to hear; asked whenever facts are gathered, and sent with them."""
        self._heard = 0
        self._buffers: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        if self.size > 1:
            self._talk: dist.ProcessGroup | None = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
            self._check_same_parameters()
            self._take_buffers(bucket_bytes)

    def gather(self, fact: T) -> list[T]:
        """What each rank has to say, by rank. A fact is small and plain (`exchange.py`)."""
        if self.size == 1:
            return [fact]
        said = gather((fact, self.wish()), self._talk)
        self._heard = 0
        for _fact, wish in said:
            self._heard |= wish
        return [each for each, _wish in said]

    def heard(self) -> int:
        """What any rank wished when facts were gathered last: the same on every rank, so all can act on it at the same step."""
        return self.wish() if self.size == 1 else self._heard

    def gradients(self) -> bytes:
        """Which parameters have a gradient here, one byte each: this rank's part of the talk, for `merge`."""
        return bytes(_kind(parameter.grad) for parameter in self.parameters)

    def merge(self, gradients: Sequence[bytes]) -> bytes:
        """Which parameters have a gradient on any rank, from what each rank said: not 0 where one has; for `reduce`.

        A sparse gradient is refused here, on every rank alike, because every rank has heard the same.
        """
        merged = bytearray(len(self.parameters))
        for index, kinds in enumerate(zip(*gradients, strict=True)):
            if _SPARSE in kinds:
                raise UnsupportedError(
                    _(
                        "The gradient of the parameter with shape {shape} is sparse, and only dense ones can be accumulated."
                    ).format(shape=list(self.parameters[index].shape)),
                    hint=_("Build the embedding with sparse=False."),
                )
            merged[index] = _EVERYWHERE if all(kinds) else _SOMEWHERE if any(kinds) else _NONE
        return bytes(merged)

    @torch.no_grad()
    def reduce(self, scale: float, has_gradient: bytes | None = None) -> None:
        """Replace each gradient by the sum over ranks of gradient times that rank's own `scale`.

        `has_gradient` is what `merge` gave; without it, ranks talk about it here.
        A gradient that is missing here and not elsewhere counts as zeros and is there afterwards. One that no rank has stays None, so that
        neither momentum nor weight decay moves its parameter.
        """
        if has_gradient is None:
            has_gradient = self.merge(self.gather(self.gradients()))
        if self.size == 1:
            _scale([parameter.grad for parameter in self.parameters if parameter.grad is not None], scale)
            return
        if _SOMEWHERE in has_gradient:
            self._fill(has_gradient)
        for (dtype, device), buffer in self._buffers.items():
            group = self._talk if device.type == "cpu" else None
            gradients = [
                parameter.grad
                for parameter, present in zip(self.parameters, has_gradient, strict=True)
                if present and parameter.grad is not None and _place(parameter) == (dtype, device)
            ]
            for bucket in _buckets(gradients, buffer.numel()):
                _sum_bucket(bucket, buffer, scale, group)

    def _fill(self, has_gradient: bytes) -> None:
        """Give zeros to what is missing here. Memory can run out on one rank, so all hear how it went before any of them sums."""
        missing = [
            parameter
            for parameter, present in zip(self.parameters, has_gradient, strict=True)
            if present and parameter.grad is None
        ]
        failure: Exception | None = None
        try:
            for parameter in missing:
                parameter.grad = torch.zeros_like(parameter)
        except (RuntimeError, MemoryError) as error:
            failure = error
        said = self.gather(None if failure is None else (str(failure), out_of_memory_family(failure)))
        if not any(said):
            return
        for parameter in missing:
            parameter.grad = None
        if failure is not None:
            raise failure
        rank, (message, family) = next((rank, words) for rank, words in enumerate(said) if words)
        text = _("Rank {rank} could not prepare its gradients: {message}").format(rank=rank, message=message)
        raise OutOfMemoryError(text, family=family) if family else RunError(text)

    def _check_same_parameters(self) -> None:
        """Sums of different parameters would hang, or mix them up without a word."""
        described = repr([(list(parameter.shape), _place(parameter)[0]) for parameter in self.parameters])
        said = self.gather((len(self.parameters), crc32(described.encode()), [device.type for _dtype, device in self._places()]))
        if any(words != said[0] for words in said):
            raise UsageError(
                _("The ranks hold different parameters: {counts} of them, by rank, or of other shapes and types.").format(
                    counts=", ".join(str(words[0]) for words in said)
                ),
                hint=_("Build the same model and optimizer on every rank."),
            )
        self._check_same_weights()

    def _check_same_weights(self) -> None:
        """Ranks that begin apart stay apart: a sum of gradients does not bring weights together. Sums may differ by rounding."""
        with torch.no_grad():
            weights = [parameter for parameter in self.parameters if parameter.is_floating_point()]
            sums = [[float(weight.sum(dtype=torch.float32)), float(weight.abs().sum(dtype=torch.float32))] for weight in weights]
        for rank, others in enumerate(self.gather(sums)):
            if any(abs(mine - theirs) > _SAME_SUM * size for (mine, size), (theirs, _size) in zip(sums, others, strict=True)):
                raise UsageError(
                    _("Rank {rank} begins with other weights than rank {other}.").format(rank=rank, other=self.rank),
                    hint=_("Load the same checkpoint, or set the same seed before the model is built, on every rank."),
                )

    def _places(self) -> dict[tuple[torch.dtype, torch.device], int]:
        """The bytes that would be summed if every parameter had a gradient, by what the buffer must be."""
        places: dict[tuple[torch.dtype, torch.device], int] = {}
        for parameter in self.parameters:
            if parameter.is_floating_point() or parameter.is_complex():
                place = _place(parameter)
                places[place] = places.get(place, 0) + parameter.numel() * place[0].itemsize
        return places

    def _take_buffers(self, bucket_bytes: int) -> None:
        """One sum in each, now: a communication library takes its own memory when it is first used."""
        for (dtype, device), total_bytes in self._places().items():
            elements = max(1, min(bucket_bytes, total_bytes) // dtype.itemsize)
            self._buffers[dtype, device] = buffer = torch.zeros(elements, dtype=dtype, device=device)
            dist.all_reduce(buffer[:1], group=self._talk if device.type == "cpu" else None)


def _nothing() -> int:
    return 0


def _place(parameter: torch.nn.Parameter) -> tuple[torch.dtype, torch.device]:
    return _WIRE.get(parameter.dtype, parameter.dtype), parameter.device


def _kind(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return _NONE
    return _DENSE if gradient.layout == torch.strided else _SPARSE


def _refuse_sharded(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Each rank holds another piece of a sharded parameter (FSDP2, tensor parallelism): to sum them would mix pieces."""
    if any(hasattr(parameter, "device_mesh") for parameter in parameters):
        raise UnsupportedError(
            _("The model is sharded over ranks, and only gradients of whole parameters can be summed."),
            hint=_("Train a model that every rank holds whole (as with DistributedDataParallel)."),
        )


def _scale(gradients: list[torch.Tensor], scale: float) -> None:
    """In place. The product of a 16-bit gradient is formed in float32 and rounded once."""
    if scale != 1:
        for gradient in gradients:
            gradient.mul_(scale)


def _buckets(gradients: list[torch.Tensor], elements: int) -> Iterator[list[torch.Tensor]]:
    """Views of the gradients, in their order, in groups of at most `elements` numbers: by shapes alone, so the same on every rank."""
    bucket: list[torch.Tensor] = []
    room = elements
    for gradient in gradients:
        for piece in _pieces(gradient, elements):
            if piece.numel() > room:
                yield bucket
                bucket, room = [], elements
            bucket.append(piece)
            room -= piece.numel()
    if bucket:
        yield bucket


def _pieces(gradient: torch.Tensor, elements: int) -> Iterator[torch.Tensor]:
    """Rows of a gradient that is larger than a bucket. Only views: a flat copy of one that is not contiguous would need memory."""
    if gradient.numel() <= elements:
        yield gradient
        return
    row = gradient[0].numel()
    if row > elements:
        for part in gradient:
            yield from _pieces(part, elements)
    else:
        yield from torch.split(gradient, elements // row)


def _sum_bucket(bucket: list[torch.Tensor], buffer: torch.Tensor, scale: float, group: dist.ProcessGroup | None) -> None:
    sizes = [piece.numel() for piece in bucket]
    used = buffer[: sum(sizes)]
    places = [place.view(piece.shape) for place, piece in zip(torch.split(used, sizes), bucket, strict=True)]
    for place, piece in zip(places, bucket, strict=True):
        place.copy_(piece)
    _scale([used], scale)
    dist.all_reduce(used, group=group)
    for place, piece in zip(places, bucket, strict=True):
        piece.copy_(place)
