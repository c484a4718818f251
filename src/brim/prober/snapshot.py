"""A live module may be trained in this process, and is afterwards what it was, to the bit: weights, gradients, modes, random numbers.

    with unchanged(model):
        train_two_steps(model)      # may also run out of memory in the middle of the optimizer's step

The copy of the weights goes into a file without a name. It takes no memory of the device and none that a limit on this process counts,
so that a trial has all the memory that training would have. Putting back needs a buffer of some MiB, which is held from the beginning,
because at the end there may be nothing left to take.

What counts is storages, not tensors: each is copied once, whoever shares it, and put back in place, so that what was tied stays tied.
Of what hangs at a module, lists, dicts and sets are looked into, one level deep; an object of another kind (a config, an array of
NumPy) is put back as the same object, and not looked into.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import os
import random
import shutil
import signal
import tempfile
import threading
from collections import deque
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import torch
from torch._C import DisableTorchFunctionSubclass
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from brim.errors import RunError, UnsupportedError, is_out_of_memory
from brim.locale import _
from brim.sizes import MIB, format_bytes
from brim.step.devices import device_of
from brim.step.oom import release
from brim.step.randomness import Randomness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from brim.machine.device import Device

CHUNK_BYTES: Final = 4 * MIB
"""What is read or written at once."""
SPARE_BYTES: Final = 4 * MIB
"""Held during a trial and given up before anything is put back: Python itself must not be short of memory then."""
_CONTAINERS: Final = (list, dict, set, deque)
_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")


@contextmanager
def unchanged(model: torch.nn.Module, *, device: Device | None = None) -> Iterator[None]:
    """Whatever happens inside, the module is afterwards what it was.

    Gradients are set aside, so that a trial begins without any, and the same tensors come back. An error of memory passes through
    with its message and without what its frames held. Where there is no room for the copy, nothing has been touched yet.
    """
    modules = [_Module(module) for module in model.modules()]
    tensors = [_Tensor(tensor) for tensor in _tensors_of(model, modules)]
    device = device or device_of(_main_device(tensors))
    flags, generators = _flags(), Generators()
    device.synchronize()
    with _Copy(_storages_of(tensors)) as copy:
        spare = [bytearray(SPARE_BYTES)]
        versions = _versions(tensors)
        try:
            for tensor in tensors:
                tensor.set_grad_aside()
            yield
        except BaseException as error:
            if is_out_of_memory(error):
                release(error, device)
            raise
        finally:
            spare.clear()
            with _uninterrupted(), ExitStack() as last_to_first:  # each is done, also when another fails
                last_to_first.callback(_put_flags_back, flags)
                last_to_first.callback(generators.restore)
                last_to_first.callback(_each, [tensor.give_grad_back for tensor in tensors])
                last_to_first.push(versions)
                last_to_first.callback(copy.restore)
                last_to_first.callback(free, device)
                last_to_first.callback(_each, [tensor.restore for tensor in tensors])
                last_to_first.callback(_each, [module.restore for module in modules])


def fingerprint(model: torch.nn.Module) -> str:
    """A digest of all that training changes: names, ties, shapes, dtypes, bytes, gradients, what is trained, modes."""
    digest, first_names = hashlib.sha256(), dict[int, str]()
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        is_first = id(tensor) not in first_names
        tied_to = first_names.setdefault(id(tensor), name)
        digest.update(repr((name, tied_to, tensor.requires_grad)).encode())
        if is_first:
            with DisableTorchFunctionSubclass():
                _digest(tensor.data, digest)
                _digest(tensor.grad if tensor.is_leaf else None, digest)
    for name, module in model.named_modules(remove_duplicate=False):
        digest.update(repr((name, module.training)).encode())
    return digest.hexdigest()


class Generators:
    """The random numbers of this process: Python's, NumPy's, torch's, and those of every accelerator that is in use."""

    def __init__(self) -> None:
        self._seed = torch.initial_seed()
        self._taken = {device: Randomness.of(device) for device in devices_in_use()}

    def restore(self) -> None:
        """Put all back. An accelerator that was not in use yet had drawn nothing, so it begins with the seed that it would have had."""
        for device, randomness in self._taken.items():
            randomness.restore(device)
        for kind in {device.type for device in devices_in_use() if device not in self._taken}:
            backend = torch.get_device_module(kind)
            getattr(backend, "manual_seed_all", backend.manual_seed)(self._seed)


class _Module:
    """What is written at one module itself: its attributes, what its lists, dicts and sets hold, its mode and its class."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module, self._kind, self._is_training = module, type(module), module.training
        self._attributes = _flat(vars(module))
        held = [value for value in self._attributes[1::2] if isinstance(value, _CONTAINERS)]
        self._contents = [(value, _flat(value)) for value in held]
        self._generators = [put_back for value in self._attributes[1::2] if (put_back := _generator_of_its_own(value))]

    def tensors(self) -> Iterator[torch.Tensor]:
        for value in chain(self._attributes, *(items for _container, items in self._contents)):
            if isinstance(value, torch.Tensor):
                yield value

    def restore(self) -> None:
        if type(self._module) is not self._kind:  # parametrisations and lazy modules change it
            self._module.__class__ = self._kind
        _refill(vars(self._module), self._attributes)
        for container, items in self._contents:
            _refill(container, items)
        if self._module.training != self._is_training:  # a scripted module keeps it elsewhere
            self._module.training = self._is_training
        _each(self._generators)


class _Tensor:
    """What there is about one tensor besides its bytes. The tensor itself stays the same object, on the same storage."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self._kind = tensor, type(tensor)
        with DisableTorchFunctionSubclass():
            self.data, self._is_leaf, self._is_trained = tensor.data, tensor.is_leaf, tensor.requires_grad
            self._grad = tensor.grad if self._is_leaf else None
            self._attributes = _flat(vars(tensor))
            self._hooks = [(name, held := getattr(tensor, name), _flat(held or {})) for name in _HOOKS]

    def set_grad_aside(self) -> None:
        if self._grad is not None:
            self.tensor.grad = None

    def restore(self) -> None:
        tensor = self.tensor
        with DisableTorchFunctionSubclass(), torch.no_grad():
            if self._is_leaf and not tensor.is_leaf:  # written to in place by something that is differentiated
                with suppress(RuntimeError):  # a view cannot be
                    tensor.detach_()
            if tensor.is_leaf:
                tensor.grad = None
            if _place(tensor) != _place(self.data):
                tensor.data = self.data
            if tensor.is_leaf and tensor.requires_grad != self._is_trained:
                tensor.requires_grad_(self._is_trained)
            for name, held, items in self._hooks:
                if getattr(tensor, name) is not held:
                    setattr(tensor, name, held)
                _refill(held or {}, items)
            _refill(vars(tensor), self._attributes)
            if type(tensor) is not self._kind:
                tensor.__class__ = self._kind

    def give_grad_back(self) -> None:
        if self._grad is not None:
            self.tensor.grad = self._grad


class _Copy:
    """The bytes of some storages, in a file that has no name: it is gone with this process, however that ends."""

    def __init__(self, storages: list[torch.UntypedStorage]) -> None:
        self._storages = [(storage, storage.nbytes()) for storage in storages]
        self._bytes = sum(size for _storage, size in self._storages)
        self._buffer = torch.zeros(min(CHUNK_BYTES, self._bytes), dtype=torch.uint8, device="cpu")
        self._close = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._file = self._close.enter_context(tempfile.TemporaryFile(prefix="brim-", buffering=0))
            if self._bytes > shutil.disk_usage(tempfile.gettempdir()).free:  # told before the disk is full
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # noqa: TRY301 (as writing would)
            for piece in self._pieces():
                data = _memory(piece if piece.device.type == "cpu" else self._buffer[: len(piece)].copy_(piece))
                while data:
                    data = data[self._file.write(data) :]
        except OSError as error:
            self._close.close()
            text = _("A copy of the weights ({bytes}) could not be written to a temporary file: {why}. Nothing was changed.")
            raise RunError(
                text.format(bytes=format_bytes(self._bytes), why=error.strerror or error),
                hint=_("Make room for it, or set TMPDIR to a folder on a disk that has more."),
            ) from error
        except BaseException:
            self._close.close()
            raise
        return self

    def __exit__(self, *details: object) -> None:
        self._close.close()

    def restore(self) -> None:
        """Write back what differs, and only that: weights that are mapped from a file stay mapped, and may be read-only."""
        for storage, size in self._storages:
            if storage.nbytes() != size:
                storage.resize_(size)
        self._file.seek(0)
        for piece in self._pieces():
            before = self._buffer[: len(piece)]
            self._read(_memory(before))
            if piece.device.type != "cpu" or not torch.equal(_in_words(piece), _in_words(before)):
                piece.copy_(before)

    def _read(self, room: memoryview) -> None:
        while room:
            count = self._file.readinto(room)
            if not count:
                raise RunError(_("The copy of the weights is shorter than they are: they could not be put back."))
            room = room[count:]

    def _pieces(self) -> Iterator[torch.Tensor]:
        for storage, _size in self._storages:
            whole = _as_bytes(storage)
            yield from (whole[start : start + CHUNK_BYTES] for start in range(0, len(whole), CHUNK_BYTES))


def _tensors_of(model: torch.nn.Module, modules: list[_Module]) -> list[torch.Tensor]:
    """Every tensor once. A scripted module has its parameters not among its attributes."""
    found = chain(model.parameters(), model.buffers(), *(module.tensors() for module in modules))
    return list({id(tensor): tensor for tensor in found}.values())


def _storages_of(tensors: list[_Tensor]) -> list[torch.UntypedStorage]:
    """Every storage once. What is on the meta device has none."""
    found: dict[tuple[torch.device, int, int], torch.UntypedStorage] = {}
    for part in chain.from_iterable(_parts(tensor.data) for tensor in tensors):
        storage = _storage_of(part)
        if part.device.type != "meta" and storage.nbytes():
            found.setdefault((part.device, storage.data_ptr(), storage.nbytes()), storage)
    return list(found.values())


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError) as error:
        text = _("A tensor of this model ({kind}, {layout}) keeps its numbers where they cannot be copied from.")
        raise UnsupportedError(text.format(kind=type(tensor).__name__, layout=tensor.layout)) from error


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a tensor is made of: itself, or what a sparse, sharded or quantised one wraps."""
    if _is_wrapper(tensor):
        flatten: Any = tensor.__tensor_flatten__  # type: ignore[attr-defined]
        names, _context = flatten()
        yield from chain.from_iterable(_parts(getattr(tensor, name)) for name in names)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())  # noqa: SLF001 (the public ones want it coalesced, which copies)
    elif tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    else:
        yield tensor


def _is_wrapper(tensor: Any) -> bool:
    return is_traceable_wrapper_subclass(tensor)


def _place(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Where its numbers are, and how they are read."""
    if tensor.layout is not torch.strided or _is_wrapper(tensor):
        return None
    start = tensor.untyped_storage().data_ptr() if tensor.device.type != "meta" else 0
    return (start, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype, tensor.device)


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _in_words(data: torch.Tensor) -> torch.Tensor:
    """Bytes by the eight where they can be had so: they are compared several times as fast."""
    return data if len(data) % 8 else data.view(torch.int64)


def _memory(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)


def _digest(tensor: torch.Tensor | None, digest: Any) -> None:
    for part in () if tensor is None else _parts(tensor):
        digest.update(repr((tuple(part.shape), str(part.dtype))).encode())
        if part.device.type == "meta" or not part.numel():
            continue
        whole = part.contiguous()
        start = whole.storage_offset() * whole.element_size()
        data = _as_bytes(whole.untyped_storage())[start : start + whole.numel() * whole.element_size()]
        for begin in range(0, len(data), CHUNK_BYTES):
            digest.update(_memory(data[begin : begin + CHUNK_BYTES].cpu()))


def _flat(container: Any) -> list[Any]:
    """What it holds, in its order; of a dict, keys and values in turn."""
    return list(chain.from_iterable(container.items())) if isinstance(container, dict) else list(container)


def _refill(container: Any, items: list[Any]) -> None:
    """The same container with what it held before; untouched where it still holds that."""
    now = _flat(container)
    if len(now) == len(items) and all(one is other for one, other in zip(now, items, strict=True)):
        return
    container.clear()
    if isinstance(container, dict):
        container.update(zip(items[::2], items[1::2], strict=True))
    elif isinstance(container, set):
        container.update(items)
    else:
        container.extend(items)


def _generator_of_its_own(value: Any) -> Callable[[], Any] | None:
    """How to put back a generator that a module keeps for itself."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, random.Random):
        numbers = value.getstate()
        return lambda: value.setstate(numbers)
    if isinstance(value, np.random.Generator):
        words = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", words)
    return None


def devices_in_use() -> list[torch.device]:
    """The CPU, and every accelerator that has been initialised."""
    here = [torch.device("cpu")]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        backend: Any = torch.get_device_module(accelerator.type)
        if getattr(backend, "is_initialized", lambda: True)():
            here += [torch.device(accelerator.type, index) for index in range(backend.device_count())]
    return here


def _main_device(tensors: list[_Tensor]) -> torch.device:
    """An accelerator if any tensor is on one."""
    found = {tensor.data.device for tensor in tensors if tensor.data.device.type not in {"cpu", "meta"}}
    return min(found, key=str, default=torch.device("cpu"))


def _versions(tensors: list[_Tensor]) -> Any:
    """How often each tensor has been written to. With the same bits again, a graph that was built before may still be used."""
    counted = tuple(one.tensor for one in tensors if not one.data.is_inference())
    return _unsafe_preserve_version_counter(counted)


def _flags() -> list[tuple[Callable[[Any], object], Callable[[], Any], Any]]:
    """What torch keeps for the whole process and a trial may change: how to set it, how to read it, and what it was."""
    pairs: list[tuple[Callable[[Any], object], Callable[[], Any]]] = [
        (torch.set_grad_enabled, torch.is_grad_enabled),
        (torch.set_default_dtype, torch.get_default_dtype),
        (torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled),
        (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision),
        (
            lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
            lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        ),
        (lambda value: torch.set_default_device(None if value.type == "cpu" else value), torch.get_default_device),
        *(
            (partial(setattr, torch.backends.cudnn, name), partial(getattr, torch.backends.cudnn, name))
            for name in ("benchmark", "deterministic")
        ),
    ]  # fmt: skip
    for kind in {device.type for device in devices_in_use()}:
        pairs += [
            (partial(torch.set_autocast_enabled, kind), partial(torch.is_autocast_enabled, kind)),
            (partial(torch.set_autocast_dtype, kind), partial(torch.get_autocast_dtype, kind)),
        ]
    return [(put, get, get()) for put, get in pairs]


def _put_flags_back(flags: list[tuple[Callable[[Any], object], Callable[[], Any], Any]]) -> None:
    torch.clear_autocast_cache()  # it may hold casts of the trial's weights
    for put, get, before in flags:
        if get() != before:
            put(before)


def free(device: Device) -> None:
    """Drop what only refers to itself, and give the allocator's cache back."""
    gc.collect()
    device.give_back()


def _each(actions: Iterable[Callable[[], object]]) -> None:
    for action in actions:
        action()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until all is back."""
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came and callable(before):
            before(*came[0])
