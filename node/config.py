"""What an operator may set, and where things lie.

/etc/boxfleet/config.toml, /var/lib/boxfleet and /run/boxfleet; BOXFLEET_STATE=<folder> moves all three into that folder (tests, trials).
"""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from node.errors import BadRequest

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Places:
    config: Path
    lib: Path  # survives a reboot
    run: Path  # does not: sockets, pid files

    @classmethod
    def from_environment(cls) -> Places:
        if state := os.environ.get("BOXFLEET_STATE"):
            root = Path(state).absolute()
            return cls(root / "config.toml", root / "lib", root / "run")
        return cls.usual()

    @classmethod
    def usual(cls) -> Places:
        """Where things lie on a host that nobody told otherwise."""
        return cls(Path("/etc/boxfleet/config.toml"), Path("/var/lib/boxfleet"), Path("/run/boxfleet"))

    @property
    def images(self) -> Path:
        return self.lib / "images"

    @property
    def node(self) -> Path:
        return self.lib / "node"

    @property
    def enrol_token(self) -> Path:
        """What `boxctl node token` printed; the node trades it for an identity and removes it."""
        return self.node / "enrol.token"

    @property
    def node_socket(self) -> Path:
        return self.run / "node.sock"

    @property
    def coordinator_socket(self) -> Path:
        return self.run / "coordinator.sock"

    @property
    def local_key(self) -> Path:
        """The API key that `up` made for `connect`, 0600."""
        return self.lib / "local.key"


@dataclass(frozen=True)
class Clocks:
    """Every period of DESIGN's lifecycle, in seconds."""

    freeze_after: float = 600.0  # idle
    url_use: float = 7200.0  # requests through URLs count for so long after the last call or wake
    background: float = 3600.0  # running commands keep a box awake for so long after the last call
    archive_after: float = 86_400.0  # since the last use
    delete_after: float = 30 * 86_400.0  # in the archive
    template_age: float = 7 * 86_400.0


@dataclass(frozen=True)
class NodeConfig:
    """The `[node]` table."""

    places: Places
    listen: str = "127.0.0.1:7082"  # the coordinator's door, mTLS; port 0 picks one
    address: str = ""  # how the coordinator reaches it; default: `listen`
    coordinator: str = ""  # its fleet door, if it has moved since the enrolment
    accel: str = "auto"  # auto | kvm | tcg
    development: bool = True  # False on a node that `make install` set up: KVM or not ready
    unit_memory: int = 0  # bytes of one size unit; 0: chosen to fit the host, at most 8 GiB
    unit_vcpus: int = 2
    unit_work: int = 40 * GIB
    cpu_overcommit: int = 8
    memory_reserve: int = 1 * GIB  # left to the host
    memory_backend: str = "file"  # file | tmpfs
    network_pool: str = "10.112.0.0/16"  # host ends of the boxes' links, a /30 each
    mtu: int = 1400
    allow: tuple[str, ...] = ()  # networks behind the deny floor that boxes may reach all the same
    parallel_starts: int = 2
    clocks: Clocks = field(default_factory=Clocks)


def read_table(path: Path) -> dict[str, Any]:
    """The configuration file as tables; a missing file is an empty one."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except tomllib.TOMLDecodeError as error:
        raise BadRequest(f"{path} is not valid TOML", cause=str(error), remedy="Correct the line that is named.") from error


def take(cls: type[Any], table: dict[str, Any], where: str) -> dict[str, Any]:
    """The table's values as arguments of the dataclass `cls`; unknown names and wrong types are refused by name."""
    known = {f.name: f for f in fields(cls)}
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name not in known:
            raise BadRequest(f"{where}.{name} is not a setting", remedy=f"Settings of [{where}]: {', '.join(sorted(known))}.")
        default = known[name].default
        if isinstance(default, tuple):
            value = tuple(value)
        elif isinstance(default, float) and isinstance(value, int):
            value = float(value)
        elif not isinstance(value, type(default)) and not isinstance(default, type(None)):
            raise BadRequest(f"{where}.{name} must be a {type(default).__name__}, not {value!r}")
        values[name] = value
    return values


def host_and_port(text: str) -> bool:
    return bool(re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:]+):\d{1,5}", text)) and int(text.rpartition(":")[2]) < 65536


def network(text: str) -> bool:
    try:
        return bool(ipaddress.ip_network(text))
    except ValueError:
        return False


RULES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("listen",), host_and_port, 'must be "host:port"'),
    (("address",), lambda text: not text or host_and_port(text), 'must be "host:port"'),
    (("coordinator",), lambda url: not url or (url.startswith("https://") and host_and_port(url[8:])), 'must be "https://host:port"'),
    (("network_pool",), network, 'must be a network like "10.112.0.0/16"'),
    (("allow",), lambda networks: all(isinstance(text, str) and network(text) for text in networks), "must hold networks only"),
    (("unit_vcpus", "unit_work", "cpu_overcommit", "mtu", "parallel_starts"), lambda number: number > 0, "must be above 0"),
    (("unit_memory", "memory_reserve"), lambda number: number >= 0, "must not be negative"),
)


def check(config: NodeConfig) -> None:
    """Raises BadRequest for a value that would fail only later, in the middle of a start."""
    for names, holds, words in RULES:
        for name in names:
            if not holds(value := getattr(config, name)):
                raise BadRequest(f"node.{name} {words}, not {value!r}")
    for period in fields(config.clocks):
        if not (value := getattr(config.clocks, period.name)) > 0:
            raise BadRequest(f"node.clocks.{period.name} must be above 0, not {value!r}")


def load_node_config(places: Places | None = None) -> NodeConfig:
    places = places or Places.from_environment()
    table = dict(read_table(places.config).get("node", {}))
    clocks = Clocks(**take(Clocks, table.pop("clocks", {}), "node.clocks"))
    table.pop("places", None)
    config = NodeConfig(places=places, clocks=clocks, **take(NodeConfig, table, "node"))
    check(config)
    return config
