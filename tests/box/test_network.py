"""The network of a box in the real kernel: a host, an internet and guests, each a namespace of this machine. Needs root, no VM.

A guest is a namespace with a tap whose frames are carried to the box's tap and back, so it is a computer that may say anything.
Nothing is sent outside of these namespaces.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from pyroute2 import IPRoute

from node.config import NodeConfig, Places
from node.errors import GuestError, NetworkError
from node.net import firewall, link, namespace, network
from node.net.addresses import GATEWAY, GUEST, GUEST_MAC, TAP_MAC, slot
from node.net.namespace import inside
from node.net.network import BoxNetwork
from node.net.resolver import open_resolver

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")

INTERNET, UPLINK = "198.51.100.1", "198.51.100.2"
METADATA, INTRANET, CARRIER = "169.254.169.254", "10.20.30.40", "100.64.7.7"
ADDRESS_MARK, MAC_MARK, TRUE_MARK, IPV6_MARK = b"forged address", b"forged MAC", b"true sender", b"version 6"


@dataclass(frozen=True)
class Lab:
    config: NodeConfig
    host: int
    internet: int
    seen_at_host: socket.socket  # every frame that arrives there

    @asynccontextmanager
    async def box(self, **settings: Any) -> AsyncIterator[BoxNetwork]:
        config = replace(self.config, **settings)
        box_id = secrets.token_hex(6)
        box = await BoxNetwork.create(box_id, config, host=self.host)
        try:
            yield box
        finally:
            box.close()
            with trio.CancelScope(shield=True):
                await network.remove(box_id, config, host=self.host)


@dataclass(frozen=True)
class Guest:
    netns: int

    async def reaches(self, address: str, port: int, within: float = 5.0) -> bool:
        """Within seconds: short where a packet that is dropped in silence is waited for."""
        with inside(self.netns):
            sock = trio.socket.socket()
        with sock, trio.move_on_after(within), suppress(OSError):
            await sock.connect((address, port))
            return True
        return False

    def send(self, frame: bytes) -> None:
        with inside(self.netns), socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
            sock.bind(("tap0", 0))
            sock.send(frame)


def mac(address: str) -> bytes:
    return bytes.fromhex(address.replace(":", ""))


def datagram(payload: bytes, source: str = GUEST, source_mac: str = GUEST_MAC) -> bytes:
    """A frame with a UDP datagram to the internet, made by hand."""
    udp = struct.pack("!4H", 1000, 1000, 8 + len(payload), 0) + payload
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(udp), 0, 0, 64, 17, 0, socket.inet_aton(source), socket.inet_aton(INTERNET))
    total = sum(struct.unpack("!10H", ip))
    total = (total & 0xFFFF) + (total >> 16)
    ip = ip[:10] + struct.pack("!H", ~total & 0xFFFF) + ip[12:]
    return mac(TAP_MAC) + mac(source_mac) + b"\x08\x00" + ip + udp


@contextmanager
def temporary_namespace() -> Iterator[int]:
    name = f"bftest-{secrets.token_hex(4)}"
    netns = namespace.create(name)
    try:
        yield netns
    finally:
        os.close(netns)
        namespace.delete(name)


def address_links(netns: int, addresses: dict[str, list[str]]) -> None:
    with inside(netns), IPRoute() as links:
        for name, wanted in addresses.items():
            index = links.link_lookup(ifname=name)[0]
            links.link("set", index=index, state="up")
            for address in wanted:
                ip, length = address.split("/")
                links.addr("add", index=index, address=ip, prefixlen=int(length))


def listener(netns: int, port: int) -> socket.socket:
    with inside(netns):
        return socket.create_server(("0.0.0.0", port))


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    yield
    assert not list(namespace.FOLDER.glob("bftest-*"))


@pytest.fixture
async def lab(tmp_path: Path, nothing_is_left: None) -> AsyncIterator[Lab]:
    config = NodeConfig(Places(tmp_path / "config.toml", tmp_path / "lib", tmp_path / "run"))
    with temporary_namespace() as internet, temporary_namespace() as host:
        with inside(host), IPRoute() as links:
            links.link("add", ifname="up", kind="veth", peer={"ifname": "down", "net_ns_fd": internet})
        address_links(host, {"lo": [], "up": [f"{UPLINK}/24"]})
        address_links(internet, {"lo": [f"{METADATA}/32", f"{INTRANET}/32", f"{CARRIER}/32"], "down": [f"{INTERNET}/24"]})
        with inside(host), IPRoute() as links:
            links.route("add", dst="default", gateway=INTERNET)
            sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, socket.htons(3))
        await network.ensure_host_rules(config, host=host)
        with sniffer, listener(internet, 80), listener(host, 22):
            yield Lab(config, host, internet, sniffer)
        assert await network.list_networks(config, host=host) == {}
        with inside(host):
            assert set(link.link_names()) == {"lo", "up"}


@asynccontextmanager
async def guest_of(box: BoxNetwork) -> AsyncIterator[Guest]:
    async with AsyncExitStack() as stack:
        netns = stack.enter_context(temporary_namespace())
        theirs, ours = link.open_tap(box.netns), link.open_tap(netns)
        stack.callback(os.close, theirs)
        stack.callback(os.close, ours)
        with inside(netns), IPRoute() as links:
            links.link("set", ifname="tap0", address=GUEST_MAC)
        address_links(netns, {"lo": [], "tap0": [f"{GUEST}/30"]})
        with inside(netns), IPRoute() as links:
            links.route("add", dst="default", gateway=GATEWAY)
        nursery = await stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(carry, ours, theirs)
        nursery.start_soon(carry, theirs, ours)
        try:
            yield Guest(netns)
        finally:
            nursery.cancel_scope.cancel()


async def carry(source: int, target: int) -> None:
    while True:
        await trio.lowlevel.wait_readable(source)
        with suppress(BlockingIOError):
            os.write(target, os.read(source, 1 << 16))


def switch_rules_off(netns: int) -> None:
    """So that an attack is seen to work before it is seen to fail. Translation of addresses stays."""
    script = "*raw\nCOMMIT\n*filter\n:INPUT ACCEPT\n:OUTPUT ACCEPT\n:FORWARD ACCEPT\nCOMMIT\n"
    with inside(netns):
        for program in ("iptables-legacy-restore", "iptables-nft-restore"):
            subprocess.run([program], input=script, text=True, check=True, capture_output=True)
        for name in set(link.link_names()):
            Path(f"/proc/sys/net/ipv4/conf/{name}/rp_filter").write_text("0")
        Path("/proc/sys/net/ipv4/conf/all/rp_filter").write_text("0")


async def frames_at_host(lab: Lab, box: BoxNetwork, last: bytes) -> list[bytes]:
    """What came out of the box, up to a frame that holds `last`."""
    frames: list[bytes] = []
    with trio.fail_after(5):
        while not (frames and last in frames[-1]):
            await trio.lowlevel.wait_readable(lab.seen_at_host)
            packet, (name, _, direction, *_) = lab.seen_at_host.recvfrom(2000)
            if name == box.slot.link and direction != socket.PACKET_OUTGOING:
                frames.append(packet)
    return frames


async def test_a_box_reaches_the_world_and_the_node_reaches_the_box(lab: Lab) -> None:
    async with lab.box() as box, guest_of(box) as guest:
        assert await guest.reaches(INTERNET, 80)
        with listener(guest.netns, 8000):
            stream = await box.connect(8000)
            assert stream.socket.getpeername() == (GUEST, 8000)
            await stream.aclose()
        with pytest.raises(GuestError, match="cannot be reached"):
            await box.connect(8001)


async def test_bytes_to_and_from_the_world_are_counted_and_no_others(lab: Lab) -> None:
    async with lab.box() as box, guest_of(box) as guest:
        with listener(guest.netns, 8000):
            await (await box.connect(8000)).aclose()
        before = box.counters()
        assert await guest.reaches(INTERNET, 80)
        after = box.counters()
        assert before.sent_bytes < 200  # ARP at most
        assert after.sent_bytes - before.sent_bytes >= 100
        assert after.received_bytes - before.received_bytes >= 50


@pytest.mark.parametrize("protected", [False, True])
async def test_the_deny_floor_the_host_and_other_boxes_are_open_only_without_the_rules(lab: Lab, protected: bool) -> None:  # report 45
    async with lab.box() as other, lab.box() as box, guest_of(box) as guest:
        if not protected:
            for netns in (box.netns, other.netns, lab.host):
                switch_rules_off(netns)
        with listener(box.netns, 23), listener(other.netns, 23):
            targets = {
                (METADATA, 80): "metadata",
                (INTRANET, 80): "RFC 1918",
                (CARRIER, 80): "100.64/10",
                (UPLINK, 22): "the host's uplink",
                (box.slot.host, 22): "the host's end of the link",
                (other.slot.host, 22): "the host's end of another link",
                (box.slot.inner, 23): "the namespace's end",
                (GATEWAY, 23): "the gateway",
                (other.slot.inner, 23): "another box",
            }
            within = 0.5 if protected else 5.0
            open_ones = [name for target, name in targets.items() if await guest.reaches(*target, within)]
        assert open_ones == ([] if protected else list(targets.values()))
        assert await guest.reaches(INTERNET, 80)


async def test_what_the_operator_allows_opens_neither_the_host_nor_other_boxes(lab: Lab) -> None:
    async with lab.box() as other, lab.box(allow=("10.0.0.0/8", "198.51.100.0/24")) as box, guest_of(box) as guest:
        switch_rules_off(other.netns)  # so it would answer: only the host keeps the two apart
        with listener(other.netns, 23):
            assert await guest.reaches(INTRANET, 80)
            assert not await guest.reaches(METADATA, 80, within=0.5)
            assert not await guest.reaches(UPLINK, 22, within=0.5)
            assert not await guest.reaches(box.slot.host, 22, within=0.5)
            assert not await guest.reaches(other.slot.inner, 23, within=0.5)


@pytest.mark.parametrize("protected", [False, True])
async def test_a_forged_source_address_or_mac_leaves_the_box_only_without_the_rules(lab: Lab, protected: bool) -> None:
    async with lab.box() as box, guest_of(box) as guest:
        if not protected:
            switch_rules_off(box.netns)
        guest.send(datagram(ADDRESS_MARK, source="203.0.113.99"))
        guest.send(datagram(MAC_MARK, source_mac="02:00:00:00:0b:0b"))
        guest.send(datagram(TRUE_MARK))
        frames = await frames_at_host(lab, box, last=TRUE_MARK)
        seen = {mark for mark in (ADDRESS_MARK, MAC_MARK, TRUE_MARK) if any(mark in frame for frame in frames)}
        assert seen == ({TRUE_MARK} if protected else {ADDRESS_MARK, MAC_MARK, TRUE_MARK})


async def test_ipv6_finds_no_way(lab: Lab) -> None:
    async with lab.box() as box, guest_of(box) as guest:
        header = struct.pack("!IHBB", 0x60000000, len(IPV6_MARK), 17, 64) + bytes(15) + b"\1" + bytes.fromhex("ff02" + "00" * 13 + "01")
        guest.send(mac("33:33:00:00:00:01") + mac(GUEST_MAC) + b"\x86\xdd" + header + IPV6_MARK)
        guest.send(datagram(TRUE_MARK))
        frames = await frames_at_host(lab, box, last=TRUE_MARK)
        assert not [frame for frame in frames if frame[12:14] == b"\x86\xdd"]
        with inside(box.netns):
            assert Path("/proc/thread-self/net/if_inet6").read_text() == ""


async def test_a_false_arp_reply_does_not_move_the_guest(lab: Lab) -> None:
    async with lab.box() as box, guest_of(box) as guest:
        false = mac("02:00:00:00:0b:0b")
        reply = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 2) + false + socket.inet_aton(GUEST) + mac(TAP_MAC) + socket.inet_aton(GATEWAY)
        guest.send(mac(TAP_MAC) + false + b"\x08\x06" + reply)
        assert await guest.reaches(INTERNET, 80)


async def test_one_box_cannot_fill_the_hosts_connection_table(lab: Lab) -> None:
    async with lab.box() as box, guest_of(box) as guest:
        with inside(guest.netns):
            sock = trio.socket.socket(type=socket.SOCK_DGRAM)
        with sock:
            for port in range(firewall.CONNECTIONS + 500):
                with suppress(OSError):
                    await sock.sendto(TRUE_MARK, (INTERNET, 1024 + port))
        assert not await guest.reaches(INTERNET, 80)


async def test_a_guest_with_a_larger_mtu_is_told_the_fleets_segment_size(lab: Lab) -> None:  # report 41
    async with lab.box() as box, guest_of(box) as guest:
        with listener(lab.internet, 81) as server:
            assert await guest.reaches(INTERNET, 81)
            with trio.fail_after(2):
                accepted, _ = await trio.socket.from_stdlib_socket(server).accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) <= lab.config.mtu - 40


async def test_names_are_resolved_for_the_guest_but_not_to_private_addresses(lab: Lab) -> None:  # report 45
    upstream = f"127.{secrets.randbelow(254) + 1}.{secrets.randbelow(254) + 1}.53"
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o755)  # the resolver process reads as nobody's uid
        (folder / "resolv.conf").write_text(f"# the host's\nnameserver {upstream}\n")
        nursery = await stack.enter_async_context(trio.open_nursery())
        server = stack.enter_context(trio.socket.socket(type=socket.SOCK_DGRAM))
        await server.bind((upstream, 53))
        listening = stack.enter_context(trio.socket.socket())
        await listening.bind((upstream, 53))
        listening.listen()
        nursery.start_soon(serve_names, server)
        nursery.start_soon(serve_names_by_tcp, listening)
        resolver = await stack.enter_async_context(open_resolver(resolv_conf=folder / "resolv.conf"))
        box = await stack.enter_async_context(lab.box())
        guest = await stack.enter_async_context(guest_of(box))
        await resolver.add_box(box.box_id, box.dns_sockets())
        assert (await ask(guest, b"\4good\7example"))[-4:] == socket.inet_aton("203.0.113.7")
        assert (await ask_by_tcp(guest, b"\4good\7example"))[-4:] == socket.inet_aton("203.0.113.7")
        rebound = await ask(guest, b"\4evil\7example")
        assert rebound[6:8] == b"\0\0"  # no answer in it
        assert resolver.pid is not None
        status = Path(f"/proc/{resolver.pid}/status").read_text()
        assert "CapEff:\t0000000000000000" in status
        assert "Uid:\t0\t" not in status
        os.kill(resolver.pid, 9)
        assert (await ask(guest, b"\4good\7example"))[-4:] == socket.inet_aton("203.0.113.7")  # a new process has the same sockets
        await resolver.remove_box(box.box_id)
        nursery.cancel_scope.cancel()


async def serve_names(server: trio.socket.SocketType) -> None:
    while True:
        query, client = await server.recvfrom(2000)
        await server.sendto(answered(query), client)


async def serve_names_by_tcp(listening: trio.socket.SocketType) -> None:
    while True:
        connection, _ = await listening.accept()
        with connection:
            answer = answered((await connection.recv(2000))[2:])
            await connection.send(struct.pack("!H", len(answer)) + answer)


def answered(query: bytes) -> bytes:
    address = INTRANET if b"evil" in query else "203.0.113.7"
    question = query[12 : query.index(b"\0", 12) + 5]
    record = b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 60, 4) + socket.inet_aton(address)
    return query[:2] + struct.pack("!5H", 0x8180, 1, 1, 0, 0) + question + record


def question(name: bytes) -> bytes:
    return struct.pack("!6H", 77, 0x0100, 1, 0, 0, 0) + name + b"\0" + struct.pack("!HH", 1, 1)


async def ask(guest: Guest, name: bytes) -> bytes:
    with inside(guest.netns):
        sock = trio.socket.socket(type=socket.SOCK_DGRAM)
    with sock, trio.fail_after(5):
        await sock.connect((GATEWAY, 53))
        await sock.send(question(name))
        return await sock.recv(2000)


async def ask_by_tcp(guest: Guest, name: bytes) -> bytes:
    with inside(guest.netns):
        sock = trio.socket.socket()
    with sock, trio.fail_after(5):
        await sock.connect((GATEWAY, 53))
        await sock.send(struct.pack("!H", len(question(name))) + question(name))
        return await sock.recv(2000)


async def test_fifty_networks_made_at_once_are_all_distinct(lab: Lab) -> None:  # report 43
    ids = [f"t{number}{secrets.token_hex(4)}" for number in range(50)]
    made: dict[str, BoxNetwork] = {}

    async def create(box_id: str) -> None:
        made[box_id] = await BoxNetwork.create(box_id, lab.config, host=lab.host)

    async with trio.open_nursery() as nursery:
        for box_id in ids:
            nursery.start_soon(create, box_id)
    assert len({box.slot for box in made.values()}) == 50
    assert await network.list_networks(lab.config, host=lab.host) == {box_id: box.slot for box_id, box in made.items()}
    async with trio.open_nursery() as nursery:
        for box_id, box in made.items():
            box.close()
            nursery.start_soon(partial(network.remove, box_id, lab.config, host=lab.host))


async def test_instances_on_one_host_take_different_slots_and_see_their_own_boxes(lab: Lab, tmp_path: Path) -> None:
    elsewhere = replace(lab.config, places=Places(tmp_path, tmp_path / "another", tmp_path))
    async with lab.box() as box, lab.box(places=elsewhere.places) as theirs:
        assert box.slot != theirs.slot
        assert set(await network.list_networks(lab.config, host=lab.host)) == {box.box_id}
        assert set(await network.list_networks(elsewhere, host=lab.host)) == {theirs.box_id}


async def test_a_network_outlives_its_daemon_and_is_opened_again(lab: Lab) -> None:  # report 48
    async with lab.box() as box:
        tap = box.open_tap()
        with pytest.raises(NetworkError, match="tap"):
            box.open_tap()
        os.close(tap)
        box.close()
        again = await BoxNetwork.open(box.box_id, lab.config, host=lab.host)
        assert again is not None
        assert again.slot == box.slot
        async with guest_of(again) as guest:
            assert await guest.reaches(INTERNET, 80)
        again.close()
    assert await BoxNetwork.open(box.box_id, lab.config, host=lab.host) is None


async def test_a_network_goes_although_a_socket_inside_is_open(lab: Lab) -> None:
    async with lab.box() as box:
        udp, tcp = box.dns_sockets()
        await network.remove(box.box_id, lab.config, host=lab.host)
        await network.remove(box.box_id, lab.config, host=lab.host)
        with inside(lab.host):
            assert box.slot.link not in set(link.link_names())
        udp.close()
        tcp.close()


async def test_a_creation_that_fails_leaves_nothing(lab: Lab) -> None:
    config = replace(lab.config, network_pool="10.113.0.0/30")
    async with lab.box(network_pool=config.network_pool):
        with pytest.raises(NetworkError) as refused:
            await BoxNetwork.create("twoistoomany", config, host=lab.host)
        assert "is taken" in refused.value.problem.cause
        assert namespace.open_named("bf-twoistoomany") is None
        assert len(await network.list_networks(config, host=lab.host)) == 1


def test_both_kinds_of_tables_get_the_same_rules(nothing_is_left: None) -> None:
    rules = tuple(firewall.box_rules(slot(3, "10.112.0.0/16"), allow=("10.9.0.0/16",)))
    saved = []
    for install, save in ((firewall._install_legacy, "iptables-legacy-save"), (firewall._install_nft, "iptables-nft-save")):
        with temporary_namespace() as netns:
            install(netns, rules)
            with inside(netns):
                text = subprocess.run([save], text=True, capture_output=True, check=True).stdout
        saved.append(sorted(line for line in text.splitlines() if line.startswith("-A") or "DROP [" in line.split(" ", 1)[-1]))
    assert saved[0] == saved[1]
    assert len(saved[0]) == len(rules) + len(firewall.BOX_POLICIES)


async def test_the_hosts_rules_are_put_in_once_and_taken_out_whole(lab: Lab) -> None:
    def rules() -> list[str]:
        with inside(lab.host):
            text = subprocess.run(["iptables-save"], text=True, capture_output=True, check=True).stdout
        return [line for line in text.splitlines() if line.startswith("-A")]

    before = rules()
    await network.ensure_host_rules(lab.config, host=lab.host)
    assert rules() == before
    async with lab.box():
        await network.remove_host_rules(lab.config, host=lab.host)
        assert rules() == before  # a box still needs them
    await network.remove_host_rules(lab.config, host=lab.host)
    await network.remove_host_rules(lab.config, host=lab.host)
    assert rules() == []
