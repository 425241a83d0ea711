"""Where the coordinator listens, and by which URLs that is reached."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from coordinator.config import CoordinatorConfig
from coordinator.errors import BadInput

STUCK = 30_000  # ms after which a client that stops reading is dropped; without it a shutdown hangs on it (STACK.md)
LAST_PORT = 65535
LOOPBACK = "127.0.0.1"
EVERYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with, not bound


def listen(address: str) -> socket.socket:
    """A bound TCP socket for "host:port" or "[v6]:port". Raises BadInput."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if int(port) > LAST_PORT:
            raise ValueError(f"a port is at most {LAST_PORT}")
        listener = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=256)
    except (OSError, ValueError) as error:
        remedy = "Free the port, or set another in [coordinator]."
        raise BadInput(f"Cannot listen at {address!r}", cause=str(error), remedy=remedy) from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STUCK)
    return listener


def listen_again(address: str, kept: Path) -> socket.socket:
    """As `listen`. For port 0 the port of the last time, which `kept` tells, while it is free: agents' URLs and enrolled nodes outlive a
    restart."""
    host, _, port = address.rpartition(":")
    if port != "0":
        return listen(address)
    try:
        listener = listen(f"{host}:{int(kept.read_text())}")
    except (FileNotFoundError, ValueError, BadInput):
        listener = listen(address)
    kept.write_text(f"{listener.getsockname()[1]}\n")
    return listener


def listen_local(path: Path) -> socket.socket:
    """The operator's socket, 0600; one that nobody listens at is a leftover and is replaced."""
    path.unlink(missing_ok=True)
    local = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        local.bind(str(path))
    finally:
        os.umask(before)
    local.listen(64)
    return local


def url_of(listener: socket.socket, scheme: str, *, everywhere: str = LOOPBACK) -> str:
    """`everywhere` names this host when the socket listens at all its addresses."""
    host, port = listener.getsockname()[:2]
    host = everywhere if host in EVERYWHERE else host
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def fleet_name(config: CoordinatorConfig) -> str:
    """What other hosts call this one: as the operator says, else as agents do, else nothing that they could use."""
    return next(iter(config.fleet_names), "") or urlsplit(config.public_url).hostname or LOOPBACK


def door_names(config: CoordinatorConfig) -> list[str]:
    """What nodes may call the fleet door: this machine, where it listens, and what the operator says."""
    host = config.fleet_listen.rpartition(":")[0].strip("[]")
    return sorted({"localhost", LOOPBACK, "::1", host, fleet_name(config), *config.fleet_names} - {""} - EVERYWHERE)
