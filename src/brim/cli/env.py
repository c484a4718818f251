"""`brim env`: the block for a bug report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.cli._command import verb
from brim.cli._machine import machine_rows
from brim.cli._output import grid, print_json, show
from brim.locale import N_, _

if TYPE_CHECKING:
    from rich.table import Table

    from brim.machine.environment import Environment


@verb(N_("Show this machine and this installation: the block to paste into a bug report. No token and no secret is in it."))
def command(as_json: bool) -> None:
    """Print the environment."""
    from brim.machine.environment import env

    found = env()
    if as_json:
        print_json(found.to_dict())
        return
    show(*environment_blocks(found))


def environment_blocks(found: Environment) -> list[Table]:
    """The block."""
    return [grid(_rows(found), indent=0)]


def _rows(found: Environment) -> list[tuple[str, str]]:
    rows = [("brim", found.brim), ("Python", found.python), (_("System"), found.platform)]
    rows += machine_rows(found.machine)
    if found.torch is not None:
        text = _("{version}, built for {target}, {threads} threads, CPU kernels {capability}")
        rows.append(
            ("torch", text.format(
                version=found.torch.version, target=found.torch.built_for, threads=found.torch.threads,
                capability=found.torch.cpu_capability,
            ))
        )  # fmt: skip
    if found.cpu_bf16 is not None:
        rows.append((_("bfloat16 on the CPU"), _("works") if found.cpu_bf16 else _("does not work")))
    rows += [(name, version) for name, version in found.packages.items() if version is not None and name != "torch"]
    missing = ", ".join(name for name, version in found.packages.items() if version is None)
    rows.append((_("Not installed"), missing or "-"))
    rows += list(found.variables.items())
    rows.append((_("Cache folder"), found.cache_folder))
    return rows + [(_("Problem"), text) for text in found.problems]
