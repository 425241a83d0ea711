"""The network of one box: a namespace with its links and rules, made whole or not at all.

    namespace bf-<box id>        named, so it outlives the daemon: a restarted one opens it again
    link bf<number> at the host  alias boxfleet:<instance>:<box id>, so several instances on a host know their own

It is kept while a box is frozen (a thaw finds it ready) and removed when the box is archived or destroyed. Making, opening and removing
block in the kernel, so they run in threads.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import trio

from node.config import NodeConfig
from node.errors import GuestError, GuestTimeout, NetworkError
from node.net import firewall, link, namespace
from node.net.addresses import GATEWAY, GUEST, Slot
from node.net.link import Counters
from node.net.namespace import HOME

_making = trio.CapacityLimiter(1)  # python-iptables is one thread at a time, and more threads gain nothing (measured)
_removing = trio.CapacityLimiter(4)  # the kernel waits, hardly any CPU: four threads are three times as fast as one

DNS_BACKLOG = 16


def _name(box_id: str) -> str:
    return f"bf-{box_id}"


def _alias_prefix(config: NodeConfig) -> str:
    return f"boxfleet:{hashlib.sha256(bytes(config.places.lib)).hexdigest()[:8]}:"


@dataclass(eq=False)
class BoxNetwork:
    """An open network. Owns the descriptor `netns` alone: the namespace and its links stay until remove()."""

    box_id: str
    netns: int
    slot: Slot

    @classmethod
    async def create(cls, box_id: str, config: NodeConfig, *, host: int = HOME) -> BoxNetwork:
        """Makes it in 15-30 ms, one at a time. NetworkError, with nothing left behind, if the kernel refuses or the pool is used up.

        `host` is the namespace where the box's link ends, the node's own but for tests. A cancel waits until it is made."""
        return await trio.to_thread.run_sync(partial(_create, box_id, config, host), limiter=_making)

    @classmethod
    async def open(cls, box_id: str, config: NodeConfig, *, host: int = HOME) -> BoxNetwork | None:
        """The network that an earlier daemon made; None if there is none, or not all of it (then remove() and create())."""
        return await trio.to_thread.run_sync(partial(_open, box_id, config, host), limiter=_removing)

    def open_tap(self) -> int:
        """A new descriptor of the box's tap, for QEMU. NetworkError while another is open: a tap has one user."""
        try:
            return link.open_tap(self.netns)
        except OSError as error:
            raise NetworkError(f"cannot open the tap of box {self.box_id}", cause=str(error)) from error

    async def connect(self, port: int, deadline: float = 10.0) -> trio.SocketStream:
        """A TCP connection to the guest's `port` by a socket born in the namespace, within `deadline` seconds.

        GuestTimeout when the guest is silent, GuestError when it refuses or is away."""
        with namespace.inside(self.netns):
            sock = trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with trio.fail_after(deadline):
                await sock.connect((GUEST, port))
            return trio.SocketStream(sock)
        except BaseException as error:
            sock.close()
            if isinstance(error, (trio.TooSlowError, TimeoutError)):
                raise GuestTimeout(f"port {port} of box {self.box_id} did not answer in {deadline:g} s") from error
            if isinstance(error, OSError):
                raise GuestError(f"port {port} of box {self.box_id} cannot be reached", cause=str(error)) from error
            raise

    def dns_sockets(self) -> tuple[socket.socket, socket.socket]:
        """Where the guest asks for names: UDP and TCP port 53 of its gateway. The caller owns both; Resolver.add_box() takes them over."""
        with namespace.inside(self.netns):
            udp, tcp = socket.socket(type=socket.SOCK_DGRAM), socket.socket(type=socket.SOCK_STREAM)
        try:
            for sock in (udp, tcp):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # an earlier resolver process may not have let go yet
                sock.bind((GATEWAY, 53))
            tcp.listen(DNS_BACKLOG)
        except OSError as error:
            udp.close()
            tcp.close()
            raise NetworkError(f"cannot open the DNS ports of box {self.box_id}", cause=str(error)) from error
        return udp, tcp

    def counters(self) -> Counters:
        return link.read_counters(self.netns)

    def close(self) -> None:
        """Lets go of the descriptor; the network stays. Safe to repeat."""
        if self.netns >= 0:
            os.close(self.netns)
            self.netns = -1


async def remove(box_id: str, config: NodeConfig, *, host: int = HOME) -> None:
    """Takes the box's network away, whole or half made, whoever made it. Safe to repeat. NetworkError names what would not go."""
    await trio.to_thread.run_sync(partial(_remove, box_id, config, host), limiter=_removing)


async def list_networks(config: NodeConfig, *, host: int = HOME) -> dict[str, Slot]:
    """This instance's networks by box id, as the kernel knows them."""
    return await trio.to_thread.run_sync(partial(_list, config, host), limiter=_removing)


async def ensure_host_rules(config: NodeConfig, *, host: int = HOME) -> None:
    """Once at the node's start: forwarding, masquerade, boxes shut off from the host and from each other. Idempotent."""
    await _host_rules(firewall.ensure_host_rules, config, host)


async def remove_host_rules(config: NodeConfig, *, host: int = HOME) -> None:
    """When boxfleet leaves the host; nothing happens while a box, also of another instance, has a link there. Safe to repeat."""
    await _host_rules(firewall.remove_host_rules, config, host)


async def _host_rules(change: Callable[[str, int], None], config: NodeConfig, host: int) -> None:
    try:
        await trio.to_thread.run_sync(change, config.network_pool, host, limiter=_making)
    except (OSError, subprocess.SubprocessError) as error:
        raise NetworkError("the host's rules for boxes cannot be set", cause=str(error)) from error


def _create(box_id: str, config: NodeConfig, host: int) -> BoxNetwork:
    try:
        netns = namespace.create(_name(box_id))
    except OSError as error:
        raise NetworkError(f"cannot make a namespace for box {box_id}", cause=str(error)) from error
    try:
        alias = _alias_prefix(config) + box_id
        slot = link.create_links(netns, host, pool=config.network_pool, mtu=config.mtu, alias=alias)
        firewall.install(netns, firewall.box_rules(slot, config.allow))
    except Exception as error:
        os.close(netns)
        _remove(box_id, config, host)
        raise NetworkError(f"cannot make the network of box {box_id}", cause=str(error)) from error
    return BoxNetwork(box_id, netns, slot)


def _open(box_id: str, config: NodeConfig, host: int) -> BoxNetwork | None:
    slot = _list(config, host).get(box_id)
    netns = namespace.open_named(_name(box_id)) if slot else None
    return BoxNetwork(box_id, netns, slot) if slot and netns is not None else None


def _list(config: NodeConfig, host: int) -> dict[str, Slot]:
    prefix = _alias_prefix(config)
    return {alias.removeprefix(prefix): slot for alias, slot in link.aliases(host, config.network_pool).items() if alias.startswith(prefix)}


def _remove(box_id: str, config: NodeConfig, host: int) -> None:
    failed: list[Exception] = []
    for step in (_remove_links, _remove_name, _remove_host_link):  # independent: one that fails does not keep the next from its work
        try:
            step(box_id, config, host)
        except Exception as error:
            failed.append(error)
    if failed:
        raise NetworkError(f"parts of the network of box {box_id} remain", cause="; ".join(map(str, failed))) from failed[0]


def _remove_links(box_id: str, _config: NodeConfig, _host: int) -> None:
    if (netns := namespace.open_named(_name(box_id))) is not None:
        try:
            link.delete_links(netns)
        finally:
            os.close(netns)


def _remove_name(box_id: str, _config: NodeConfig, _host: int) -> None:
    namespace.delete(_name(box_id))


def _remove_host_link(box_id: str, config: NodeConfig, host: int) -> None:
    if slot := _list(config, host).get(box_id):  # only if its namespace's name was lost
        link.delete_host_link(host, slot.link)
