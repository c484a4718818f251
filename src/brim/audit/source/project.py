"""All files of a project, parsed once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from brim.audit.source.module import Module, Source

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass
class Project:
    """What one `brim doctor TARGET` audits."""

    modules: list[Module] = field(default_factory=list)
    shells: list[Source] = field(default_factory=list)
    """Launchers: .sh files."""
    configs: list[Source] = field(default_factory=list)
    """.yaml, .yml, .json and .toml files that lie beside the code."""
    gpu: str | None = None
    """The GPU that the code will run on, if it is known: a name of the catalogue."""
    notes: list[str] = field(default_factory=list)
    needing_newer: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    """Files that the running Python cannot parse, by the version that could."""

    def module(self, name: str) -> Module | None:
        """The module of that dotted name, or of the path that ends with it."""
        return self._by_name().get(name)

    def sources(self) -> list[Source]:
        """The texts of all files."""
        return [*(module.source for module in self.modules), *self.shells, *self.configs]

    def with_files(self, changed: Mapping[str, bytes]) -> Project:
        """The same project with other contents of some files; nothing is read from the disk.

        Raises SyntaxError or ValueError if a changed file cannot be parsed.
        """
        from brim.audit.source.files import module_of, text_of_config  # files imports this module

        return replace(
            self,
            modules=[
                module_of(changed[each.source.file], each) if each.source.file in changed else each for each in self.modules
            ],
            shells=[text_of_config(changed[each.file], each.file) if each.file in changed else each for each in self.shells],
            configs=[text_of_config(changed[each.file], each.file) if each.file in changed else each for each in self.configs],
            notes=[],
            _names={},
        )

    def _by_name(self) -> dict[str, Module]:
        if len(self._names) != len(self.modules):
            self._names = {each.name: each for each in self.modules}
        return self._names

    _names: dict[str, Module] = field(default_factory=dict, repr=False)
