"""Names for boxes: the messages, and what a guest is answered."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from node.net import dns
from node.net import dns_message as message
from node.net.dns import Box, Bucket, Servers, parse_servers
from node.net.dns_message import MalformedError, Query

LABELS = st.lists(st.binary(min_size=1, max_size=63), max_size=3)
QUERIES = st.builds(
    Query,
    id=st.integers(0, 0xFFFF),
    flags=st.sampled_from([0, message.RECURSION_DESIRED, message.RECURSION_DESIRED | message.CHECKING_DISABLED]),
    name=LABELS.map(lambda labels: b"".join(bytes([len(label)]) + label for label in labels) + b"\0"),
    type=st.integers(0, 0xFFFF),
    klass=st.integers(0, 0xFFFF),
    udp_size=st.none() | st.integers(0, 0xFFFF),
)
EXAMPLE = Query(7, message.RECURSION_DESIRED, b"\7example\0", message.A, message.IN)


def answer(query: Query, number: int, *addresses: bytes) -> bytes:
    records = b"".join(b"\xc0\x0c" + struct.pack("!HHIH", message.A, message.IN, 60, len(address)) + address for address in addresses)
    return struct.pack("!6H", number, 0x8180, 1, len(addresses), 0, 0) + query.question + records


@given(st.binary(max_size=1500))
def test_any_bytes_are_a_query_or_refused_as_malformed(data: bytes) -> None:
    try:
        query = message.read_query(data)
    except MalformedError:
        return
    assert len(message.write_query(query, 1)) <= message.MAX_QUERY


@given(QUERIES, st.binary(max_size=1500))
def test_any_bytes_are_an_answer_or_refused_as_malformed(query: Query, data: bytes) -> None:
    try:
        addresses = message.read_addresses(message.with_id(answer(query, 0)[:12] + query.question, 1) + data, query, 1)
    except MalformedError:
        return
    assert addresses == []  # the header announces no record


@given(QUERIES, st.data())
def test_an_answer_cut_or_bent_anywhere_raises_nothing_but_malformed(query: Query, data: st.DataObject) -> None:
    whole = bytearray(answer(query, 9, b"\xcb\0\x71\7", b"\x0a\0\0\1"))
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with suppress(MalformedError):
        message.read_addresses(cut, query, 9)


@given(QUERIES, st.integers(0, 0xFFFF))
def test_a_question_survives_being_asked_in_our_own_words(query: Query, number: int) -> None:
    again = message.read_query(message.write_query(query, number))
    assert (again.id, again.question, again.udp_size is None) == (number, query.question, query.udp_size is None)
    assert message.read_addresses(answer(query, number, b"\1\2\3\4"), query, number) == ["1.2.3.4"]
    assert message.read_addresses(message.empty_reply(query), query, query.id) == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        answer(EXAMPLE, 7),  # an answer is no query
        struct.pack("!6H", 7, 0x0100, 2, 0, 0, 0) + EXAMPLE.question * 2,  # two questions
        struct.pack("!6H", 7, 0x2800, 1, 0, 0, 0) + EXAMPLE.question,  # an update
        struct.pack("!6H", 7, 0x0100, 1, 0, 0, 0) + b"\xc0\x0c\0\1\0\1",  # a name that points at itself
        struct.pack("!6H", 7, 0x0100, 1, 0, 0, 0) + b"\x01a" * 200 + b"\0\0\1\0\1",  # a name too long
        struct.pack("!6H", 7, 0x0100, 1, 0, 0, 9) + EXAMPLE.question,
    ],
)
def test_what_is_no_plain_query_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedError):
        message.read_query(data)


def test_an_answer_to_another_question_is_not_taken() -> None:
    other = Query(7, 0, b"\5other\0", message.A, message.IN)
    for bad in (answer(other, 7), answer(EXAMPLE, 8)):
        with pytest.raises(MalformedError):
            message.read_addresses(bad, EXAMPLE, 7)


def test_only_addresses_are_read_from_resolv_conf() -> None:
    text = "# nameserver 1.1.1.1\nnameserver 10.0.0.2\nnameserver\nnameserver fe80::1%eth0\nnameserver not-an-address\noptions edns0\n"
    assert parse_servers(text) == ["10.0.0.2", "fe80::1%eth0"]


Answerer = Callable[[str, Query, int], Awaitable[bytes]]


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\nnameserver 127.0.0.2\n")
    with trio.socket.socket() as udp, trio.socket.socket() as tcp:
        yield Box(udp, tcp, Servers(tmp_path / "resolv.conf"), allow=("10.7.0.0/16",))


def says(*addresses: bytes) -> Answerer:
    async def ask(server: str, query: Query, number: int) -> bytes:
        return answer(query, number, *addresses)

    return ask


async def asked(box: Box, query: Query, ask: Answerer) -> bytes:
    reply = await box.answer(message.write_query(query, query.id), ask, datagram=False)
    assert reply is not None
    return reply


async def test_an_answer_comes_back_under_the_guests_own_id(box: Box) -> None:
    reply = await asked(box, EXAMPLE, says(b"\xcb\0\x71\7"))
    assert message.read_addresses(reply, EXAMPLE, EXAMPLE.id) == ["203.0.113.7"]
    assert box.counts.questions == 1


@pytest.mark.parametrize(("address", "told"), [(b"\x0a\0\0\1", False), (b"\x0a\7\0\1", True), (b"\xa9\xfe\xa9\xfe", False)])
async def test_an_address_behind_the_floor_is_told_only_if_allowed(box: Box, address: bytes, told: bool) -> None:  # report 45
    reply = await asked(box, EXAMPLE, says(b"\xcb\0\x71\7", address))
    assert len(message.read_addresses(reply, EXAMPLE, EXAMPLE.id)) == (2 if told else 0)
    assert box.counts.emptied == (0 if told else 1)


async def test_a_silent_server_is_passed_over_then_the_guest_is_told(box: Box, autojump_clock: trio.testing.MockClock) -> None:
    tried = []

    async def ask(server: str, query: Query, number: int) -> bytes:
        tried.append(server)
        await trio.sleep_forever()
        raise AssertionError

    began = trio.current_time()
    reply = await asked(box, EXAMPLE, ask)
    assert reply[3] & 0xF == message.SERVFAIL
    assert tried == ["127.0.0.1", "127.0.0.2"]
    assert trio.current_time() - began == pytest.approx(dns.DEADLINE)


async def test_ipv6_addresses_are_answered_empty_and_odd_questions_refused(box: Box) -> None:
    async def nobody(server: str, query: Query, number: int) -> bytes:
        raise AssertionError("no server is to be asked")

    for kind, rcode in ((message.AAAA, message.NOERROR), (message.AXFR, message.REFUSED), (message.ANY, message.REFUSED)):
        reply = await asked(box, Query(7, 0, b"\7example\0", kind, message.IN), nobody)
        assert reply[3] & 0xF == rcode
        assert reply[6:8] == b"\0\0"


async def test_an_answer_too_long_for_a_datagram_is_cut_and_marked_truncated(box: Box) -> None:
    question, ask = message.write_query(EXAMPLE, 7), says(*[b"\xcb\0\x71\7"] * 100)
    cut = await box.answer(question, ask, datagram=True)
    assert cut is not None
    assert len(cut) <= message.PLAIN_UDP
    assert cut[2] & 0x02
    whole = await box.answer(question, ask, datagram=False)
    assert whole is not None
    assert len(message.read_addresses(whole, EXAMPLE, 7)) == 100


async def test_a_box_that_floods_is_met_with_silence_until_its_bucket_fills(box: Box, autojump_clock: trio.testing.MockClock) -> None:
    question = message.write_query(EXAMPLE, 7)
    box.bucket = Bucket(at=trio.current_time())
    answers = [await box.answer(question, says(), datagram=True) for _ in range(int(dns.BURST) + 10)]
    assert answers.count(None) == 10
    await trio.sleep(1)
    assert await box.answer(question, says(), datagram=True) is not None
    assert box.counts.dropped == 10
