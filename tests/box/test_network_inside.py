"""What a real guest reaches, and what it never does. The world is a namespace behind a link of this host: nothing leaves the machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address

import pytest
from pyroute2 import IPRoute

from tests.box.fleet import Agent, Fleet
from tests.box.test_network import CARRIER, INTERNET, INTRANET, METADATA, UPLINK, address_links, listener, temporary_namespace

LINK, GATEWAY = "world-up", "10.111.0.1"
PROBE = """
import socket, sys, threading

def reach(address):
    try:
        socket.create_connection((address, int(sys.argv[1])), timeout=5).close()
        print(address)
    except OSError:
        pass

for address in sys.argv[2:]:
    threading.Thread(target=reach, args=[address]).start()
"""
ASK = """
import socket
question = b"BX\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0\\3box\\7invalid\\0\\0\\1\\0\\1"
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
    client.settimeout(60)
    client.sendto(question, ("10.111.0.1", 53))
    print(client.recv(512)[:2].decode())
"""


@contextmanager
def world() -> Iterator[int]:
    """An internet that also has what no box may reach; the port at which all of its addresses, and all of this host's, accept."""
    with temporary_namespace() as internet, IPRoute() as links:
        links.link("add", ifname=LINK, kind="veth", peer={"ifname": "down", "net_ns_fd": internet})
        try:
            address_links(internet, {"lo": [f"{address}/32" for address in (METADATA, INTRANET, CARRIER)], "down": [f"{INTERNET}/24"]})
            index = links.link_lookup(ifname=LINK)[0]
            links.link("set", index=index, state="up")
            links.addr("add", index=index, address=UPLINK, prefixlen=24)
            for address in (METADATA, INTRANET, CARRIER):
                links.route("add", dst=f"{address}/32", gateway=INTERNET)
            with socket.create_server(("0.0.0.0", 0)) as host, listener(internet, port := host.getsockname()[1]):
                yield port
        finally:
            links.link("del", ifname=LINK)


def addresses_of_this_host() -> set[str]:
    with IPRoute() as links:
        found = {message.get_attr("IFA_LOCAL") for message in links.get_addr(family=socket.AF_INET)}
    return {address for address in found if not ip_address(address).is_loopback}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with world() as accepting:
        yield accepting


async def test_a_guest_reaches_the_internet_and_nothing_behind_the_floor(box: str, agent: Agent, port: int) -> None:  # report 45
    forbidden = {METADATA, INTRANET, CARRIER, GATEWAY, *addresses_of_this_host()}
    assert UPLINK in forbidden
    for address in (METADATA, INTRANET, CARRIER, UPLINK):  # they are there, for whoever may
        socket.create_connection((address, port), timeout=5).close()
    reached = await agent.run(box, f"python3 -c '{PROBE}' {port} {' '.join(forbidden)} {INTERNET}")
    assert reached.split() == [INTERNET]


async def test_a_guest_has_no_way_out_by_ipv6(box: str, agent: Agent) -> None:  # report 45
    assert await agent.run(box, "ip -6 -oneline address show scope global; ip -6 route show default") == ""


async def test_after_each_thaw_names_and_the_internet_answer(fleet: Fleet, box: str, agent: Agent, port: int) -> None:  # report 20
    for _ in range(3):
        fleet.change(box, "freeze")
        assert await agent.run(box, f"python3 -c '{PROBE}' {port} {INTERNET}; python3 -c '{ASK}'") == f"{INTERNET}\nBX"
