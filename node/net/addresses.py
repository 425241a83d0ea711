"""Which address is whose. Pure, standard library only (the resolver process imports it too).

    guest 10.111.0.2 -- tap0 10.111.0.1 (gateway, DNS) | namespace | veth0 <slot.inner> -- bf<number> <slot.host> | host

The guest's side is the same for every box, so a snapshot carries no identity; a box differs in its slot only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

GUEST, GATEWAY, GUEST_PREFIX = "10.111.0.2", "10.111.0.1", 30
GUEST_MAC, TAP_MAC = "02:00:00:00:00:02", "02:00:00:00:00:01"  # both fixed: the guest remembers its gateway's over a freeze
LINK_PREFIX = "bf"

FLOOR = (
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",  # metadata services of clouds
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "224.0.0.0/3",  # multicast, reserved, broadcast
)
"""Networks no box may reach, whatever else is allowed; only the operator's `allow` stands before it."""


@dataclass(frozen=True)
class Slot:
    """A /30 of the pool and the link that carries it. Whoever created the link `bf<number>` has the slot."""

    number: int
    host: str  # the host's end
    inner: str  # the namespace's end: what the world beyond the namespace sees of the box

    @property
    def link(self) -> str:
        return f"{LINK_PREFIX}{self.number}"


def slots_in(pool: str) -> int:
    """How many boxes' links `pool` (a network in CIDR notation) has room for."""
    return IPv4Network(pool).num_addresses // 4


def slot(number: int, pool: str) -> Slot:
    """Slot `number`, counted from 0. ValueError outside of the pool."""
    if not 0 <= number < slots_in(pool):
        raise ValueError(f"{pool} has no slot {number}")
    first = IPv4Network(pool).network_address + 4 * number
    return Slot(number, str(first + 1), str(first + 2))


def is_box_link(name: str) -> bool:
    return re.fullmatch(rf"{LINK_PREFIX}(0|[1-9][0-9]{{0,8}})", name) is not None


def slot_of_link(name: str, pool: str) -> Slot | None:
    """The slot that the link `name` takes, None for a link that is no box's or lies outside of the pool."""
    number = int(name.removeprefix(LINK_PREFIX)) if is_box_link(name) else slots_in(pool)
    return slot(number, pool) if number < slots_in(pool) else None


def reachable(address: str, allow: Iterable[str] = ()) -> bool:
    """May a box reach this IPv4 address: not behind the floor, or in one of the networks that the operator allows."""
    ip = IPv4Address(address)
    return any(ip in IPv4Network(network) for network in allow) or not any(ip in network for network in _FLOOR)


_FLOOR = tuple(IPv4Network(network) for network in FLOOR)
