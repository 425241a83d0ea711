"""Slots of a pool and the deny floor."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.net.addresses import FLOOR, reachable, slot, slot_of_link, slots_in

POOL = "10.112.0.0/16"
NUMBERS = st.integers(0, slots_in(POOL) - 1)


@given(NUMBERS, NUMBERS)
def test_slots_share_no_address_and_lie_in_the_pool(one: int, other: int) -> None:
    mine, theirs = slot(one, POOL), slot(other, POOL)
    assert ({mine.host, mine.inner} & {theirs.host, theirs.inner} == set()) == (one != other)
    assert IPv4Address(mine.host) in IPv4Network(POOL)
    assert IPv4Network(f"{mine.host}/30", strict=False) == IPv4Network(f"{mine.inner}/30", strict=False)


@given(NUMBERS)
def test_a_slot_is_known_again_by_its_link(number: int) -> None:
    assert slot_of_link(slot(number, POOL).link, POOL) == slot(number, POOL)
    assert len(slot(number, POOL).link) <= 15  # IFNAMSIZ


@pytest.mark.parametrize("name", ["bf", "bf01", "bf-1", "bfx", "eth0", "bf²", "bf16384", "bf9999999999", "xbf1"])
def test_a_link_of_another_name_is_no_slot(name: str) -> None:
    assert slot_of_link(name, POOL) is None


def test_a_pool_has_an_end() -> None:
    assert slots_in("10.112.0.0/30") == 1
    with pytest.raises(ValueError, match="no slot 1"):
        slot(1, "10.112.0.0/30")


@given(st.ip_addresses(v=4))
def test_what_is_reachable_is_either_outside_of_the_floor_or_allowed(address: IPv4Address) -> None:
    behind = any(address in IPv4Network(network) for network in FLOOR)
    assert reachable(str(address)) == (not behind)
    assert reachable(str(address), [f"{address}/32"])


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "10.0.0.1", "172.31.0.1", "192.168.1.1", "100.64.0.1", "127.0.0.53", "0.0.0.0", "224.0.0.251", "255.255.255.255"],
)
def test_no_box_reaches_metadata_private_or_local_networks(address: str) -> None:  # report 45
    assert not reachable(address)
