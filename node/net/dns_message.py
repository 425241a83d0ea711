"""DNS messages (RFC 1035, 6891), as much as a forwarder for hostile clients needs. Pure.

A guest's bytes never reach the host's resolver: the question is read and a query of our own made of it. An answer is walked from end to
end before a guest gets it, so what a guest sees is at least well-formed in its frame.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

A, AAAA, OPT, IXFR, AXFR, ANY = 1, 28, 41, 251, 252, 255
IN = 1
NOERROR, SERVFAIL, REFUSED = 0, 2, 5
RESPONSE, TRUNCATED, RECURSION_DESIRED, RECURSION_AVAILABLE, CHECKING_DISABLED = 0x8000, 0x0200, 0x0100, 0x0080, 0x0010
OPCODE = 0x7800
DNSSEC_OK = 0x8000  # in the extended flags of OPT

MAX_QUERY, MAX_ANSWER = 1232, 65535  # bytes; a query with one name needs some 300
PLAIN_UDP, EDNS_UDP = 512, 1232  # what an answer by UDP may measure without and with EDNS (no fragments: DNS flag day 2020)
MAX_NAME, MAX_LABEL, MAX_ADDITIONAL = 255, 63, 4

_HEADER = struct.Struct("!6H")
_RECORD = struct.Struct("!HHIH")  # after the name: type, class, TTL, length of the data


class MalformedError(ValueError):
    """Not a message we deal with; whoever sent it gets no answer."""


@dataclass(frozen=True)
class Query:
    id: int
    flags: int  # of the header: recursion desired, checking disabled
    name: bytes  # as on the wire, uncompressed, letters as the client wrote them
    type: int
    klass: int
    udp_size: int | None = None  # what the client says it takes by UDP; None: no EDNS
    dnssec_ok: bool = False

    @property
    def question(self) -> bytes:
        return self.name + struct.pack("!HH", self.type, self.klass)

    @property
    def room(self) -> int:
        """Bytes that an answer by UDP may measure."""
        return PLAIN_UDP if self.udp_size is None else max(PLAIN_UDP, min(self.udp_size, EDNS_UDP))


def read_query(message: bytes) -> Query:
    """A client's query with exactly one question. MalformedError otherwise."""
    if len(message) > MAX_QUERY:
        raise MalformedError("too long")
    number, flags, questions, answers, authorities, additional = _header(message)
    if flags & (RESPONSE | OPCODE) or (questions, answers, authorities) != (1, 0, 0) or additional > MAX_ADDITIONAL:
        raise MalformedError("not a plain query")
    name, kind, klass, at = _question(message)
    udp_size, dnssec_ok = None, False
    for _ in range(additional):
        record, record_class, ttl, _, at = _record(message, at)
        if record == OPT:
            udp_size, dnssec_ok = record_class, bool(ttl & DNSSEC_OK)
    return Query(number, flags & (RECURSION_DESIRED | CHECKING_DISABLED), name, kind, klass, udp_size, dnssec_ok)


def write_query(query: Query, number: int) -> bytes:
    """The same question in our own words and under the id `number`, to ask a server."""
    header = _HEADER.pack(number, query.flags | RECURSION_DESIRED, 1, 0, 0, query.udp_size is not None)
    return header + query.question + _opt(query)


def read_addresses(message: bytes, query: Query, number: int) -> list[str]:
    """The IPv4 addresses in the answer to write_query(query, number). MalformedError if it is another's answer or no proper message."""
    got, flags, questions, *records = _header(message)
    if got != number or not flags & RESPONSE or flags & OPCODE or questions != 1:
        raise MalformedError("not the answer to this query")
    name, kind, klass, at = _question(message)
    if (name.lower(), kind, klass) != (query.name.lower(), query.type, query.klass):
        raise MalformedError("the answer to another question")
    addresses = []
    for _ in range(sum(records)):
        record, _, _, data, at = _record(message, at)
        if record == A:
            if len(data) != 4:
                raise MalformedError("an address that is none")
            addresses.append(".".join(map(str, data)))
    return addresses


def with_id(message: bytes, number: int) -> bytes:
    return struct.pack("!H", number) + message[2:]


def empty_reply(query: Query, rcode: int = NOERROR, *, truncated: bool = False) -> bytes:
    """An answer of ours that holds no record."""
    flags = RESPONSE | RECURSION_AVAILABLE | query.flags | rcode | (TRUNCATED if truncated else 0)
    return _HEADER.pack(query.id, flags, 1, 0, 0, query.udp_size is not None) + query.question + _opt(query)


def _opt(query: Query) -> bytes:
    if query.udp_size is None:
        return b""
    return b"\0" + _RECORD.pack(OPT, EDNS_UDP, DNSSEC_OK if query.dnssec_ok else 0, 0)


def _header(message: bytes) -> tuple[int, ...]:
    if len(message) < _HEADER.size:
        raise MalformedError("shorter than a header")
    return _HEADER.unpack_from(message)


def _question(message: bytes) -> tuple[bytes, int, int, int]:
    end = _skip_name(message, _HEADER.size, compressed=False)
    if end + 4 > len(message):
        raise MalformedError("ends within the question")
    kind, klass = struct.unpack_from("!HH", message, end)
    return message[_HEADER.size : end], kind, klass, end + 4


def _record(message: bytes, at: int) -> tuple[int, int, int, bytes, int]:
    at = _skip_name(message, at, compressed=True)
    if at + _RECORD.size > len(message):
        raise MalformedError("ends within a record")
    kind, klass, ttl, length = _RECORD.unpack_from(message, at)
    at += _RECORD.size
    if at + length > len(message):
        raise MalformedError("ends within a record's data")
    return kind, klass, ttl, message[at : at + length], at + length


def _skip_name(message: bytes, start: int, *, compressed: bool) -> int:
    """Where the name that begins at `start` ends. A pointer ends it and is not followed: nobody here needs a record's name."""
    at = start
    while at - start < MAX_NAME:
        if at >= len(message):
            raise MalformedError("ends within a name")
        length = message[at]
        if length == 0:
            return at + 1
        if length >= 0xC0 and compressed and at + 2 <= len(message):
            return at + 2
        if length > MAX_LABEL:
            raise MalformedError("no label has this length")
        at += 1 + length
    raise MalformedError("a name longer than 255 bytes")
