"""Which configs belong together: named by path, or the only ones of their kind in one folder."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from brim.audit.config.kinds import TRAINER_KINDS, Config

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PATHS: Final = ("deepspeed", "deepspeed_config.deepspeed_config_file", "accelerate_config")


@dataclass(frozen=True)
class Pair:
    """A config and another that is read together with it."""

    one: Config
    other: Config
    is_named: bool
    """Whether one names the other; else they only lie in one folder."""


def link(configs: Sequence[Config]) -> list[Pair]:
    """Find the pairs; what a config names is also kept in its `links`."""
    by_file = {_plain(config.file): config for config in reversed(configs) if config.inside is None}
    pairs = [Pair(config.inside, config, True) for config in configs if config.inside is not None]
    for config in configs:
        for name in _PATHS:
            path = config.value(name)
            other = _find(config.file, path, by_file) if isinstance(path, str) else None
            if other is not None and other is not config:
                config.links.append(other)
                pairs.append(Pair(config, other, True))
    return pairs + list(_neighbours(configs, pairs))


def engine_of(config: Config) -> Config | None:
    """The DeepSpeed config that is in force with this one: named here, or by the accelerate config that is named here."""
    reach = [*config.links, *(third for other in config.links for third in other.links)]
    return next((other for other in reach if other.kind == "deepspeed"), None)


def processes(config: Config, pairs: Sequence[Pair]) -> int | None:
    """How many processes train, if this config or one beside it says so."""
    own = config.whole("num_processes")
    if own is not None:
        return own
    for pair in pairs:
        for one, other in ((pair.one, pair.other), (pair.other, pair.one)):
            if one is config and other.kind == "accelerate":
                return other.whole("num_processes")
    # A DeepSpeed file: whoever names it may say, or be started by one who does.
    users = [pair.one for pair in pairs if pair.other is config and pair.one.kind in TRAINER_KINDS]
    return next((found for user in users if (found := processes(user, pairs)) is not None), None)


def _neighbours(configs: Sequence[Config], pairs: Sequence[Pair]) -> Iterator[Pair]:
    """The only training config of a folder, with the only launcher or engine beside it."""
    folders: dict[str, list[Config]] = {}
    for config in configs:
        if config.inside is None:
            folders.setdefault(posixpath.dirname(_plain(config.file)), []).append(config)
    named = {id(pair.other) for pair in pairs if pair.is_named}
    for inside in folders.values():
        trained = [config for config in inside if config.kind in TRAINER_KINDS]
        if len(trained) != 1:
            continue
        for kind in ("accelerate", "deepspeed"):
            beside = [config for config in inside if config.kind == kind]
            has_engine = kind == "deepspeed" and engine_of(trained[0]) is not None
            if len(beside) == 1 and id(beside[0]) not in named and not has_engine:
                yield Pair(trained[0], beside[0], False)


def _find(file: str, path: str, by_file: dict[str, Config]) -> Config | None:
    """The file that a path means: seen from the config's folder, or from a folder above it, where the run may be started."""
    folder = posixpath.dirname(_plain(file))
    wanted = _plain(path)
    while True:
        found = by_file.get(posixpath.normpath(posixpath.join(folder, wanted)))
        if found is not None or not folder or folder == "/":
            return found
        folder = posixpath.dirname(folder)


def _plain(path: str) -> str:
    return posixpath.normpath(path.replace("\\", "/"))
