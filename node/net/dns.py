"""The resolver process: answers the boxes' DNS questions by asking the host's own servers.

    python -m node.net.dns CONTROL RESOLV_CONF [ALLOWED NETWORK...]

It works on hostile bytes, so it is a process of its own, with a uid that owns nothing, no capability and no way to start another process.
It is handed its sockets (born in the boxes' namespaces) over the socket CONTROL, as packets of JSON: {"add": box id} with two descriptors,
UDP and TCP, and {"remove": box id}; it reports {box id: [a Counts' fields]} when they changed. It ends when CONTROL is closed.

- Answers with an address that boxes may not reach are emptied (DNS rebinding, report 45). AAAA is answered empty: boxes have no IPv6.
- Every box has a rate, a number of questions under way and of TCP connections; what is beyond is dropped. SERVFAIL after DEADLINE seconds.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import dataclasses
import json
import os
import resource
import secrets
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

import trio

from node.net import dns_message as dns
from node.net.addresses import reachable
from node.net.dns_message import MalformedError, Query

UID = 65533  # owns nothing; not `nobody`, whose processes could be somebody else's
DEADLINE = 5.0  # seconds for an answer, all servers together
RATE, BURST = 100.0, 500.0  # questions a second of one box
UNDER_WAY, CONNECTIONS = 64, 16  # of one box
TCP_IDLE, TCP_QUESTIONS = 10.0, 100  # seconds, and questions of one connection
STRAY_ANSWERS = 16  # wrong ones that are read before the question is given up
MAX_SERVERS = 3
PAUSE = 0.1  # after a socket's error, so that one which persists does not spin
REPORT_PERIOD = 2.0
PR_SET_NO_NEW_PRIVS = 38


@dataclass
class Counts:
    """Of one box since it was added."""

    questions: int = 0
    dropped: int = 0  # over a limit, or malformed
    emptied: int = 0  # answers that named an address no box may reach
    received_bytes: int = 0  # from the guest
    sent_bytes: int = 0


@dataclass
class Bucket:
    """Lets RATE questions a second through, BURST at once."""

    tokens: float = BURST
    at: float = 0.0

    def take(self, now: float) -> bool:
        self.tokens, self.at = min(BURST, self.tokens + (now - self.at) * RATE), now
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


@dataclass
class Servers:
    """The name servers of resolv.conf, read anew when the file changes."""

    path: Path
    addresses: list[str] = field(default_factory=list)
    _seen: tuple[int, int] | None = None

    def now(self) -> list[str]:
        with contextlib.suppress(OSError):  # being replaced: the last ones hold
            stat = self.path.stat()
            if self._seen != (stat.st_mtime_ns, stat.st_ino):
                self._seen = (stat.st_mtime_ns, stat.st_ino)
                self.addresses = list(parse_servers(self.path.read_text(errors="replace")))[:MAX_SERVERS]
        return self.addresses


def parse_servers(text: str) -> list[str]:
    """The name servers in the text of a resolv.conf; what is no address is left out."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "nameserver":
            with contextlib.suppress(ValueError):
                ip_address(words[1].partition("%")[0])
                found.append(words[1])
    return found


FAILURES = (OSError, EOFError, MalformedError, trio.BrokenResourceError, trio.TooSlowError)  # of a peer; never ours
Ask = Callable[[str, Query, int], Awaitable[bytes]]


async def ask_udp(server: str, query: Query, number: int) -> bytes:
    """One question to one server, by a socket (so a port) of its own. OSError, MalformedError."""
    with _socket(server, socket.SOCK_DGRAM) as sock:
        await sock.connect((server, 53))
        await sock.send(dns.write_query(query, number))
        for _ in range(STRAY_ANSWERS):
            answer = await sock.recv(dns.MAX_ANSWER)
            with contextlib.suppress(MalformedError):
                dns.read_addresses(answer, query, number)
                return answer
        raise MalformedError("none of the answers was one to the question")


async def ask_tcp(server: str, query: Query, number: int) -> bytes:
    with _socket(server, socket.SOCK_STREAM) as sock:
        await sock.connect((server, 53))
        stream = trio.SocketStream(sock)
        await stream.send_all(_framed(dns.write_query(query, number)))
        return await _read_framed(stream, dns.MAX_ANSWER)


def _socket(server: str, kind: socket.SocketKind) -> trio.socket.SocketType:
    return trio.socket.socket(socket.AF_INET6 if ":" in server else socket.AF_INET, kind)


def _framed(message: bytes) -> bytes:
    return struct.pack("!H", len(message)) + message


async def _read_framed(stream: trio.SocketStream, limit: int) -> bytes:
    """A message with its length before it. MalformedError if it is longer than `limit`, EOFError at the end of the stream."""
    (length,) = struct.unpack("!H", await _read_exactly(stream, 2))
    if length > limit:
        raise MalformedError("too long")
    return await _read_exactly(stream, length)


async def _read_exactly(stream: trio.SocketStream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := await stream.receive_some(size - len(data))):
            raise EOFError
        data += more
    return data


@dataclass
class Box:
    """One box's ports, and what it used of its limits."""

    udp: trio.socket.SocketType
    tcp: trio.socket.SocketType
    servers: Servers
    allow: tuple[str, ...]
    counts: Counts = field(default_factory=Counts)
    bucket: Bucket = field(default_factory=Bucket)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    under_way: int = 0
    connections: int = 0

    async def serve(self) -> None:
        """Until `scope` is cancelled; closes both sockets."""
        with self.udp, self.tcp, self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._serve_udp, nursery)
                nursery.start_soon(self._serve_tcp, nursery)

    async def _serve_udp(self, nursery: trio.Nursery) -> None:
        while True:
            try:
                message, client = await self.udp.recvfrom(dns.MAX_QUERY + 1)
            except OSError:
                await trio.sleep(PAUSE)
                continue
            if self.under_way < UNDER_WAY:
                self.under_way += 1
                nursery.start_soon(self._answer_udp, message, client)
            else:
                self.counts.dropped += 1

    async def _answer_udp(self, message: bytes, client: tuple[str, int]) -> None:
        try:
            answer = await self.answer(message, ask_udp, datagram=True)
            if answer is not None:
                with contextlib.suppress(OSError):  # the guest is gone
                    await self.udp.sendto(answer, client)
        finally:
            self.under_way -= 1

    async def _serve_tcp(self, nursery: trio.Nursery) -> None:
        while True:
            try:
                sock, _ = await self.tcp.accept()
            except OSError:  # the connection is gone already, or no descriptor is left
                await trio.sleep(PAUSE)
                continue
            if self.connections < CONNECTIONS:
                self.connections += 1
                nursery.start_soon(self._answer_tcp, trio.SocketStream(sock))
            else:
                self.counts.dropped += 1
                sock.close()

    async def _answer_tcp(self, stream: trio.SocketStream) -> None:
        try:
            async with stream:
                with contextlib.suppress(*FAILURES):
                    for _ in range(TCP_QUESTIONS):
                        with trio.fail_after(TCP_IDLE):
                            message = await _read_framed(stream, dns.MAX_QUERY)
                        answer = await self.answer(message, ask_tcp, datagram=False)
                        if answer is None:
                            break
                        with trio.fail_after(TCP_IDLE):
                            await stream.send_all(_framed(answer))
        finally:
            self.connections -= 1

    async def answer(self, message: bytes, ask: Ask, *, datagram: bool) -> bytes | None:
        """What to send for a guest's message, after at most DEADLINE seconds; None: nothing. A datagram keeps to the guest's size."""
        self.counts.received_bytes += len(message)
        try:
            query = dns.read_query(message)
        except MalformedError:
            self.counts.dropped += 1
            return None
        if not self.bucket.take(trio.current_time()):
            self.counts.dropped += 1
            return None
        self.counts.questions += 1
        reply = await self._reply(query, ask)
        if datagram and len(reply) > query.room:
            reply = dns.empty_reply(query, truncated=True)
        self.counts.sent_bytes += len(reply)
        return reply

    async def _reply(self, query: Query, ask: Ask) -> bytes:
        if query.klass != dns.IN or query.type in (dns.AXFR, dns.IXFR, dns.ANY):
            return dns.empty_reply(query, dns.REFUSED)
        if query.type == dns.AAAA:
            return dns.empty_reply(query)
        servers = self.servers.now()
        for server in servers:
            number = secrets.randbelow(1 << 16)
            with contextlib.suppress(*FAILURES), trio.move_on_after(DEADLINE / len(servers)):
                answer = await ask(server, query, number)
                if all(reachable(address, self.allow) for address in dns.read_addresses(answer, query, number)):
                    return dns.with_id(answer, query.id)
                self.counts.emptied += 1
                return dns.empty_reply(query)
        return dns.empty_reply(query, dns.SERVFAIL)


async def serve(control: trio.socket.SocketType, servers: Servers, allow: tuple[str, ...]) -> None:
    """Does what `control` says until it is closed."""
    boxes: dict[str, Box] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_report, control, boxes)
        while True:
            packet, ancillary, _, _ = await control.recvmsg(1 << 16, socket.CMSG_SPACE(8), socket.MSG_CMSG_CLOEXEC)
            if not packet:
                break
            order = json.loads(packet)
            if old := boxes.pop(order.get("add") or order["remove"], None):
                old.scope.cancel()
            if "add" in order:
                udp, tcp = (trio.socket.from_stdlib_socket(socket.socket(fileno=fd)) for fd in _descriptors(ancillary))
                boxes[order["add"]] = box = Box(udp, tcp, servers, allow, bucket=Bucket(at=trio.current_time()))
                nursery.start_soon(box.serve)
        nursery.cancel_scope.cancel()


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    rights = (data for level, kind, data in ancillary if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS))
    return [fd for data in rights for fd in array.array("i", data)]


async def _report(control: trio.socket.SocketType, boxes: dict[str, Box]) -> None:
    reported = b""
    while True:
        await trio.sleep(REPORT_PERIOD)
        report = json.dumps({box_id: dataclasses.astuple(box.counts) for box_id, box in boxes.items()}).encode()
        if report != reported:
            with contextlib.suppress(OSError):  # the other end is closing
                await control.send(report)
            reported = report


def drop_privileges() -> None:
    """For good: no capability, no new privileges, no file, no further process or thread."""
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.setgroups([])
    os.setresgid(UID, UID, UID)
    os.setresuid(UID, UID, UID)  # from root to another uid: the kernel clears every capability set
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")


def main() -> None:
    control, resolv_conf, *allow = sys.argv[1:]
    sock = socket.socket(fileno=int(control))
    drop_privileges()
    trio.run(lambda: serve(trio.socket.from_stdlib_socket(sock), Servers(Path(resolv_conf)), tuple(allow)))


if __name__ == "__main__":
    main()
