"""What boxctl asks of the coordinator, all at its local socket: fleet and keys as its operator, boxes at its REST with the local key.

Never by `public_url`: this host may not resolve it, or not trust its certificate."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from node.cli.api import Api
from node.cli.failure import Failure
from node.cli.show import Report
from node.config import Places

LOCAL_KEY_NAME = "local"  # the key that `up` makes for this host's own agents
START = 900.0  # seconds that the start of a box may take: the first one of an image boots its template


class Coordinator:
    def __init__(self, places: Places, key: str = "") -> None:
        self._places = places
        self.key = key

    @classmethod
    def with_local_key(cls, places: Places) -> Coordinator:
        """Raises Failure when `up` has not made the key yet."""
        try:
            return cls(places, places.local_key.read_text().strip())
        except FileNotFoundError as error:
            raise Failure("this host has no local API key yet", remedy="`boxctl up` makes one.") from error

    @cached_property
    def _admin(self) -> Api:
        return Api.on_socket("coordinator", self._places.coordinator_socket)

    @cached_property
    def _rest(self) -> Api:
        return Api.on_socket("coordinator", self._places.coordinator_socket, below="/public", key=self.key)

    def status(self) -> Mapping[str, Any]:
        """{pid, version, url, mcpUrl, apiUrl, ...}: coordinator/rest/admin.py has the shapes of all that is asked here."""
        return self._admin.ask("GET", "/v1/status")

    def keys(self) -> list[Mapping[str, Any]]:
        return list(self._admin.ask("GET", "/v1/keys")["keys"])

    def create_key(self, name: str) -> Mapping[str, Any]:
        """{key, name, account}; the key in the clear, this once."""
        return self._admin.ask("POST", "/v1/keys", {"name": name})

    def revoke_key(self, name: str) -> Mapping[str, Any]:
        return self._admin.ask("DELETE", f"/v1/keys/{quote(name, safe='')}")

    def nodes(self) -> list[Mapping[str, Any]]:
        return list(self._admin.ask("GET", "/v1/nodes")["nodes"])

    def create_node_token(self, name: str, *, here: bool) -> Mapping[str, Any]:
        """{token, fleetCa, coordinator, expiresAt}: what a node enrols with, once; for a node of this host or of another."""
        return self._admin.ask("POST", "/v1/nodes/tokens", {"name": name, "here": here})

    def remove_node(self, node: str) -> None:
        self._admin.ask("DELETE", f"/v1/nodes/{quote(node, safe='')}")

    def key_works(self) -> bool:
        return bool(self.key) and self._rest.accepts("/v1/boxes")

    def keep_local_key(self) -> bool:
        """Makes the local key when there is none that works; True when it did."""
        if self.key_works():
            return False
        if any(key["name"] == LOCAL_KEY_NAME and not key["revokedAt"] for key in self.keys()):
            self.revoke_key(LOCAL_KEY_NAME)  # nobody has it any more
        self.key = str(self.create_key(LOCAL_KEY_NAME)["key"])
        write_secret(self._places.local_key, self.key + "\n")
        self.__dict__.pop("_rest", None)  # that one sends the key of before
        return True

    def start_box(self, name: str, goal: str, flavour: str | None, size: int, report: Report) -> Mapping[str, Any]:
        """The box, ready."""
        report(f"box {name!r}", None)
        return self._rest.ask("POST", "/v1/boxes", {"name": name, "goal": goal, "flavour": flavour, "size": size}, timeout=START)

    def stop_box(self, box: str, delete: bool, report: Report) -> Mapping[str, Any]:
        report(f"box {box} with its disk" if delete else f"box {box}; its disk is kept", None)
        method, path = ("DELETE", "") if delete else ("POST", "/stop")
        return self._rest.ask(method, f"/v1/boxes/{box}{path}", timeout=START)


def write_secret(path: Path, text: str) -> None:
    """Replaces a 0600 file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    new.replace(path)
