"""A box's links: the tap that QEMU gets, the veth pair to the host, what is set on them. Blocking; called in worker threads.

Born where they are needed (moving a link into another namespace costs 24 ms). The host-side link's name is the allocation of the slot:
the kernel creates a name once, so two creators, of whatever process, never get the same (report 43).
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from node.net.addresses import GATEWAY, GUEST, GUEST_MAC, GUEST_PREFIX, TAP_MAC, Slot, slot, slot_of_link, slots_in
from node.net.namespace import inside

TAP, VETH = "tap0", "veth0"
TUNSETIFF, TUNSETPERSIST = 0x400454CA, 0x400454CB
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
NUD_PERMANENT = 0x80

SYSCTLS = {  # of the namespace, set before it has any device so that none is ever without
    "ipv6/conf/all/disable_ipv6": 1,
    "ipv6/conf/default/disable_ipv6": 1,
    "ipv4/conf/all/rp_filter": 1,  # also keeps ARP from filling the neighbour table, whose limit all namespaces share
    "ipv4/conf/default/rp_filter": 1,
    "ipv4/conf/all/arp_ignore": 2,
    "ipv4/conf/all/arp_announce": 2,
    "ipv4/conf/all/accept_redirects": 0,
    "ipv4/conf/all/send_redirects": 0,
    "ipv4/conf/default/send_redirects": 0,
    "ipv4/conf/all/accept_source_route": 0,
    "ipv4/ip_forward": 1,
}


@dataclass(frozen=True)
class Counters:
    """Bytes between the box and the world beyond its namespace, since the network was made; without DNS and the node's own connections."""

    sent_bytes: int
    received_bytes: int


def write_sysctls(values: dict[str, int]) -> None:
    """In the calling thread's namespace. A kernel without IPv6 has nothing to switch off."""
    for key, value in values.items():
        path = Path("/proc/sys/net", key)
        if not key.startswith("ipv6/") or path.exists():
            path.write_text(str(value))


def link_names() -> Iterator[str]:
    """Names of the links in the calling thread's namespace."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]:
        yield line.partition(":")[0].strip()


def open_tap(netns: int) -> int:
    """A descriptor of the namespace's tap, created if need be. The tap itself outlives every descriptor. EBUSY while another is open."""
    with inside(netns):
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", TAP.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
            fcntl.ioctl(tap, TUNSETPERSIST, 1)
        except OSError:
            os.close(tap)
            raise
    return tap


def create_links(netns: int, host: int, *, pool: str, mtu: int, alias: str) -> Slot:
    """Takes a free slot of `pool` and connects the namespace `netns` by it to the namespace `host`. OSError(ENOSPC) if none is free."""
    with inside(netns):
        write_sysctls(SYSCTLS)
    os.close(open_tap(netns))
    taken = _take_slot(netns, host, pool, mtu, alias)
    with inside(netns), IPRoute() as links:
        tap = _up(links, TAP, GATEWAY, mtu=mtu, address=TAP_MAC)
        links.neigh("add", dst=GUEST, lladdr=GUEST_MAC, ifindex=tap, state=NUD_PERMANENT)  # no ARP of the guest can change it
        _up(links, VETH, taken.inner, mtu=mtu)
        links.route("add", dst="default", gateway=taken.host)
    return taken


def _take_slot(netns: int, host: int, pool: str, mtu: int, alias: str) -> Slot:
    with inside(host), IPRoute() as links:
        seen = set(link_names())
        for candidate in (slot(number, pool) for number in range(slots_in(pool))):
            if candidate.link in seen:
                continue
            try:
                links.link("add", ifname=candidate.link, kind="veth", peer={"ifname": VETH, "net_ns_fd": netns})
            except NetlinkError as error:
                if error.code != errno.EEXIST:
                    raise
                continue  # another creator was quicker
            links.link("set", ifname=candidate.link, ifalias=alias)
            write_sysctls({f"ipv6/conf/{candidate.link}/disable_ipv6": 1})
            _up(links, candidate.link, candidate.host, mtu=mtu)
            return candidate
    raise OSError(errno.ENOSPC, f"every slot of {pool} is taken")


def _up(links: Any, name: str, ip: str, **attributes: Any) -> int:
    index: int = links.link_lookup(ifname=name)[0]
    links.link("set", index=index, state="up", **attributes)
    links.addr("add", index=index, address=ip, prefixlen=GUEST_PREFIX)
    return index


def delete_links(netns: int) -> None:
    """The tap and both ends of the veth pair, also while sockets are open in the namespace. Safe to repeat. Blocks 20-50 ms."""
    with inside(netns), IPRoute() as links:
        for name in (VETH, TAP):
            _delete(links, name)


def delete_host_link(host: int, name: str) -> None:
    """A box's end at the host whose namespace is gone. Safe to repeat."""
    with inside(host), IPRoute() as links:
        _delete(links, name)


def _delete(links: Any, name: str) -> None:
    try:
        links.link("del", ifname=name)
    except NetlinkError as error:
        if error.code != errno.ENODEV:
            raise


def aliases(host: int, pool: str) -> dict[str, Slot]:
    """Every box's link in the namespace `host`, by its alias: what the kernel knows, so what counts after a restart."""
    with inside(host), IPRoute() as links:
        found = [(slot_of_link(link.get("ifname"), pool), link.get("ifalias")) for link in links.get_links(kind="veth")]
    return {alias: taken for taken, alias in found if taken and alias}


def read_counters(netns: int) -> Counters:
    """Of the namespace's way to the world. 20 us, no netlink."""
    with inside(netns):
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
            name, _, figures = line.partition(":")
            if name.strip() == VETH:
                columns = figures.split()
                return Counters(sent_bytes=int(columns[8]), received_bytes=int(columns[0]))
    return Counters(0, 0)
