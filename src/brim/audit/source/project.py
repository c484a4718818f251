"""All files of a project, parsed once."""

from __future__ import annotations

from dataclasses import dataclass, field

from brim.audit.source.module import Module, Source


@dataclass
class Project:
    """What one `brim doctor TARGET` looks at."""

    modules: list[Module] = field(default_factory=list)
    shells: list[Source] = field(default_factory=list)
    """Launchers: .sh files."""
    configs: list[Source] = field(default_factory=list)
    """.yaml, .yml, .json and .toml files that lie beside the code."""
    gpu: str | None = None
    """The card that the code will run on, if it is known: a name of the catalogue."""
    notes: list[str] = field(default_factory=list)

    def module(self, name: str) -> Module | None:
        """The module of that dotted name, or of the path that ends with it."""
        return self._by_name().get(name)

    def _by_name(self) -> dict[str, Module]:
        if len(self._names) != len(self.modules):
            self._names = {each.name: each for each in self.modules}
        return self._names

    _names: dict[str, Module] = field(default_factory=dict, repr=False)
