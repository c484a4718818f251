"""Where the machines of a run meet, and the secret that they share."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
from typing import TYPE_CHECKING, Final

from brim.errors import UsageError
from brim.locale import _
from brim.trainer.ranks import SECRET_VARIABLE

if TYPE_CHECKING:
    from pathlib import Path

    from brim.trainer.group import Group

_SHORTEST_SECRET: Final = 16
_LONGEST_SECRET: Final = 1 << 16


def address_of(group: Group) -> tuple[str, int]:
    """Where the machines meet."""
    host, colon, port = (group.rendezvous or "").rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 1 << 16:
        raise UsageError(
            _("--rendezvous {given} is not HOST:PORT.").format(given=group.rendezvous),
            hint=_("Give the first machine's address on each: --rendezvous HOST:29500."),
        )
    return host.strip("[]"), int(port)


def secret_for(host: str, file: Path | None) -> bytes:
    """What the machines of a run share: from a file, else the environment. On the loopback address none is needed."""
    if file is not None:
        secret = _secret_in(file)
        source = str(file)
    else:
        secret = os.environ.get(SECRET_VARIABLE, "").strip().encode()
        source = SECRET_VARIABLE
    if secret and len(secret) < _SHORTEST_SECRET:
        raise UsageError(
            _("The secret in {source} is too short: it needs {count} characters.").format(source=source, count=_SHORTEST_SECRET),
            hint=how_to_set(),
        )
    is_given = file is not None or SECRET_VARIABLE in os.environ
    if not secret and is_given:
        raise UsageError(_("The secret in {source} is empty.").format(source=source), hint=how_to_set())
    if not secret and not is_loopback(host):
        text = _("The machines of a run need a shared secret, and {source} is not set.")
        raise UsageError(text.format(source=source), hint=how_to_set())
    return secret


def how_to_set() -> str:
    """The hint of every error about the secret."""
    return _(
        "Make one with `openssl rand -hex 32` and set the same on every machine: export {variable}=..., or "
        "--rendezvous-secret-file FILE, a file that only you can read."
    ).format(variable=SECRET_VARIABLE)


def _secret_in(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            secret = stream.read(_LONGEST_SECRET).strip()
    except OSError as error:
        text = _("Cannot read the secret in {path}: {why}.")
        raise UsageError(text.format(path=file, why=error.strerror or error), hint=how_to_set()) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(
            _("Others can read the secret in {path}.").format(path=file), hint=_("chmod 600 {path}").format(path=file)
        )
    return secret


def is_loopback(host: str) -> bool:
    """Whether this leads nowhere but to this machine."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(each[4][0]).is_loopback for each in found)


def listen_at(host: str, port: int) -> socket.socket:
    """A socket that listens at this address of this machine and at no other. OSError where there is no such address."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    error = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    for family, _kind, _protocol, _name, address in found:
        try:
            return socket.create_server(address, family=family)
        except OSError as failed:
            error = failed
    raise error


def is_only_here(host: str) -> bool:
    """Whether a name of this machine leads to its loopback address, as /etc/hosts of Debian has it. Other machines mean another by it."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost" and is_loopback(host)
    return False


def listener_for_others(host: str, port: int) -> socket.socket:
    """The same for the first of several machines; a UsageError where the others could not come there."""
    if is_only_here(host):
        text = _("{host} is a loopback address on this machine (see /etc/hosts), and other machines cannot reach it.")
        hint = _("Give the address of this machine in the network on each machine: --rendezvous 10.0.0.5:{port}.")
        raise UsageError(text.format(host=host), hint=hint.format(port=port))
    try:
        return listen_at(host, port)
    except (OSError, OverflowError) as error:
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: Exception) -> UsageError:
    why = getattr(error, "strerror", None) or str(error)
    if getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
        return UsageError(
            _("{host} is not an address of this machine, the first one.").format(host=host),
            hint=_(
                "Give an address of this machine. Where the port is forwarded to it, give --rendezvous 0.0.0.0:{port} here, which listens "
                "on all addresses."
            ).format(port=port),
        )
    return UsageError(
        _("The machines cannot meet at port {port} of this one: {why}.").format(port=port, why=why),
        hint=_("Give another port on each machine: --rendezvous HOST:PORT."),
    )
