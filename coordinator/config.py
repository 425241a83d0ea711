"""The `[coordinator]` table of the configuration file, and where the coordinator's things lie.

/etc/boxfleet/config.toml, /var/lib/boxfleet/coordinator and /run/boxfleet; BOXFLEET_STATE=<folder> moves all three into that folder.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from coordinator.errors import BadInput


@dataclass(frozen=True)
class Places:
    config: Path
    lib: Path  # survives a reboot
    run: Path  # does not: the admin socket, the pid file

    @classmethod
    def from_environment(cls) -> Places:
        if state := os.environ.get("BOXFLEET_STATE"):
            root = Path(state).absolute()
            return cls(root / "config.toml", root / "lib" / "coordinator", root / "run")
        return cls(Path("/etc/boxfleet/config.toml"), Path("/var/lib/boxfleet/coordinator"), Path("/run/boxfleet"))

    @property
    def database(self) -> Path:
        return self.lib / "coordinator.db"

    @property
    def certificates(self) -> Path:
        return self.lib / "certificates"

    @property
    def url_key(self) -> Path:
        """Signs output URLs; long-lived, so that a restart breaks no link."""
        return self.lib / "url.key"

    def port(self, setting: str) -> Path:
        """Keeps the port that a `setting` of port 0 got."""
        return self.lib / f"{setting}.port"

    @property
    def socket(self) -> Path:
        return self.run / "coordinator.sock"


@dataclass(frozen=True)
class Presence:
    """When a conversation counts as gone or idle, in seconds."""

    silent: float = 180.0  # without a heartbeat: gone
    idle: float = 3600.0  # without a call


@dataclass(frozen=True)
class CoordinatorConfig:
    places: Places
    listen: str = "127.0.0.1:7080"  # agents and people; port 0 picks one, once
    fleet_listen: str = "127.0.0.1:7081"  # nodes, TLS
    fleet_names: tuple[str, ...] = ()  # further names and addresses by which nodes reach the fleet door
    public_url: str = ""  # how the world reaches `listen`; default: http(s)://<listen>
    box_domain: str = "box.localhost"
    tls_certificate: str = ""  # PEM files for `listen`; empty: plain HTTP, for loopback or behind a proxy
    tls_key: str = ""
    default_flavour: str = ""  # empty: `full` where a node has it, else whatever is there
    development: bool = True  # may boxes be placed on nodes without KVM
    heartbeat_misses: int = 3  # of the nodes' 5 s heartbeats; then the node's boxes are unreachable
    node_grace: float = 300.0  # s of silence after which an unreachable box is called lost (report 63)
    repeat_start: float = 60.0  # s in which the same (conversation, name, goal) is the same start
    repeat_stop: float = 600.0  # s in which a repeated stop gets the first answer
    max_capacity_wait: float = 1800.0  # s
    url_valid: float = 3600.0  # s that an output URL works
    graceful_stop: float = 5.0  # s for open requests at shutdown
    presence: Presence = field(default_factory=Presence)


def load_config(places: Places | None = None) -> CoordinatorConfig:
    """Reads the configuration file. Raises BadInput that names the setting; a missing file is an empty one."""
    places = places or Places.from_environment()
    try:
        tables = tomllib.loads(places.config.read_text())
    except FileNotFoundError:
        tables = {}
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{places.config} is not valid TOML", cause=str(error), remedy="Correct the line that is named.") from error
    table = dict(tables.get("coordinator", {}))
    presence = Presence(**_take(Presence, table.pop("presence", {}), "coordinator.presence"))
    return CoordinatorConfig(places=places, presence=presence, **_take(CoordinatorConfig, table, "coordinator"))


def _take(cls: type[Any], table: dict[str, Any], where: str) -> dict[str, Any]:
    """The table's values as arguments of `cls`; unknown names and wrong types are refused by name."""
    known = {f.name: f.default for f in fields(cls) if isinstance(f.default, str | int | float | tuple)}
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name not in known:
            raise BadInput(f"{where}.{name} is not a setting", remedy=f"Settings of [{where}]: {', '.join(sorted(known))}.")
        values[name] = _fit(value, type(known[name]), f"{where}.{name}")
    return values


def _fit(value: Any, kind: type, where: str) -> Any:
    if kind is tuple and isinstance(value, list):
        return tuple(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise BadInput(f"{where} must be a {kind.__name__}, not {value!r}")
    return value
