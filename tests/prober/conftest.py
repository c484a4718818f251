"""One server of trials for all tests of this folder: what it imports is paid for once."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from brim.machine.budget import ForkServer

MODULES = (
    "torch", "torch._dynamo", "transformers", "transformers.models.llama.modeling_llama", "peft", "brim.prober.trial",
    "brim.prober.trainee", "tests.prober.subjects",
)  # fmt: skip


@cache
def shared_server() -> ForkServer:
    """The one of this process; it ends with it."""
    server = ForkServer()
    atexit.register(server.close)
    server.run(int, preload=MODULES)
    return server


@pytest.fixture(scope="session")
def server() -> ForkServer:
    return shared_server()


@contextmanager
def kept(server: ForkServer) -> Iterator[pytest.MonkeyPatch]:
    """Probes take this server for their trials, and leave it running."""
    from brim.prober import optimizer, runner

    class Kept(runner.Runner):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **{"server": server, **keywords})

        def __exit__(self, *details: object) -> None:
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "Runner", Kept)
        patch.setattr(optimizer, "Runner", Kept)
        yield patch


@pytest.fixture
def one_server(server: ForkServer) -> Iterator[None]:
    """The same, for one test."""
    with kept(server):
        yield
