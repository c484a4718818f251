"""Installs the parts of the agent, each when the module that it patches is imported."""

# ruff: noqa: PTH118, PTH123 (no pathlib in the user's interpreter)

from __future__ import annotations

import functools
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from . import longest, redirect, shadow
from .watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable


def start() -> None:
    """Install the agent. Called at interpreter startup, once per process of the command."""
    session = os.environ["BRIM_EMULATE_SESSION"]
    with open(os.path.join(session, "settings.json")) as stream:
        settings = json.load(stream)
    open(os.path.join(session, f"python-{os.getpid()}"), "w").close()
    files = None
    if not settings["allow_writes"]:
        files = shadow.Shadow(os.path.join(session, "shadow"), (session, *shadow.default_passed()))
    watch = Watch(session, settings, files.written if files is not None else {})
    if files is not None:
        redirect.install(files)
    after_import(_installers(watch, files, settings))
    watch.start()


def _installers(watch: Watch, files: shadow.Shadow | None, settings: dict[str, Any]) -> dict[str, Callable[[Any], None]]:
    def on_torch(torch: Any) -> None:
        watch.on_torch(torch)
        if files is not None:
            redirect.redirect_torch(torch, files)
        _watch_call(torch, "save", watch.saving)
        torch.serialization.save = torch.save
        if settings["longest"]:
            longest.install(torch, watch.note)

    def on_safetensors(module: Any) -> None:
        if files is not None:
            redirect.redirect_safetensors(module, files)
        if hasattr(module, "serialize_file"):
            _watch_call(module, "serialize_file", watch.saving)

    def on_pyarrow(module: Any) -> None:
        if files is not None:
            redirect.redirect_pyarrow(module, files)

    def on_tokenizers(module: Any) -> None:
        if files is not None:
            redirect.redirect_tokenizers(module, files)

    return {
        "torch": on_torch,
        "deepspeed.runtime.engine": watch.on_deepspeed,
        "pyarrow": on_pyarrow,
        "safetensors": on_safetensors,
        "safetensors.torch": on_safetensors,
        "safetensors.numpy": on_safetensors,
        "transformers.tokenization_utils_base": on_tokenizers,
    }


def _watch_call(owner: Any, name: str, before: Callable[[], None]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*given: Any, **options: Any) -> Any:
        before()
        return original(*given, **options)

    setattr(owner, name, call)


class _Finder:
    """An import hook, first on `sys.meta_path`: delegates to the other finders and calls a function after some modules are imported."""

    def __init__(self, callbacks: dict[str, Callable[[Any], None]]) -> None:
        self._callbacks = callbacks

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        callback = self._callbacks.get(name)
        if callback is None:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module

                def exec_module(module: Any, execute: Any = execute, callback: Any = callback) -> None:
                    execute(module)
                    callback(module)

                spec.loader.exec_module = exec_module
                return spec
        return None


def after_import(callbacks: dict[str, Callable[[Any], None]]) -> None:
    """Call each function with its module, after that module is imported."""
    sys.meta_path.insert(0, _Finder(callbacks))
