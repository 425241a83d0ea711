"""How a call's events reach a client: one JSON body when the answer is quick, else a stream that is never silent for 10 s
(CONTRACT 0.7, 0.8).

The first byte decides which, and cannot be taken back; so the answer is awaited for a moment before anything is sent. A client that takes
only JSON is kept awake by blanks in front of the body, which JSON allows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import trio

from coordinator.mcp.calls import Call, Calls, Event
from coordinator.mcp.messages import REQUEST_CANCELLED, RpcError, encode

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

QUICK: Final = 0.05  # s to wait for an answer before a stream is opened
KEEP_ALIVE: Final = 8.0  # s of silence; clients, proxies and hosts give up from 10 s on
SEND_LIMIT: Final = 60.0  # s that a client may take to read one event
RETRY_MS: Final = 500  # a client that lost the stream has 5 s to be back (CONTRACT 0.8)

JSON_TYPE, SSE_TYPE = "application/json", "text/event-stream"


@dataclass(frozen=True)
class Accepts:
    json: bool
    stream: bool

    @classmethod
    def read(cls, header: str | None) -> Accepts:
        """A missing header or `*/*` means JSON: who speaks of no event streams most likely reads none."""
        kinds = {part.partition(";")[0].strip().lower() for part in (header or "*/*").split(",")}
        return cls(json=bool(kinds & {JSON_TYPE, "application/*", "*/*"}), stream=bool(kinds & {SSE_TYPE, "text/*"}))


async def answer(call: Call, calls: Calls, accepts: Accepts, *, primed: bool, receive: Receive, send: Send) -> None:
    """The response of a POST. `primed`: the client's version knows an empty first event (2025-11-25), by which even a stream that was
    silent so far can be resumed."""
    with trio.move_on_after(QUICK):
        await call.end()
    quick = call.done and len(call.events) == 1
    if accepts.json and (quick or not accepts.stream):
        await _body(call, receive, send)
        return
    resumable = not (call.done or call.modern)
    if resumable:
        await calls.keep(call)
    opening = f"retry: {RETRY_MS}\n" + (f"id: {call.id}.0\ndata:\n" if primed and resumable else "") + "\n"
    await follow(call, 0, opening, resumable=resumable, receive=receive, send=send)


async def follow(call: Call, seq: int, opening: str, *, resumable: bool, receive: Receive, send: Send) -> None:
    """Streams the call's events after `seq` until its answer is out. A client that leaves, or stops reading, ends the stream only."""
    await _start(send, SSE_TYPE)
    await _send(send, opening.encode())

    async def pump() -> None:
        nonlocal seq
        while True:
            events, done = call.after(seq), call.done
            if events or done:
                await _send(send, _frames(call, events, resumable=resumable), more=not done)
                seq = events[-1].seq if events else seq
            if done:
                return
            if call.given_up:
                await _send(send, _frame(_cancelled(call), ""), more=False)
                return
            if call.seq > seq:  # it went on while the client read
                continue
            with trio.move_on_after(KEEP_ALIVE) as silence:
                await call.change()
            if silence.cancelled_caught and call.token is not None:
                call.tell(f"{call.tool} still running ({trio.current_time() - call.began:.0f} s)")
            elif silence.cancelled_caught:
                await _send(send, b": still running\n\n")

    await _while_connected(pump, receive)


async def _body(call: Call, receive: Receive, send: Send) -> None:
    async def pump() -> None:
        if not call.done:
            await _start(send, JSON_TYPE)
        while not (call.done or call.given_up):
            with trio.move_on_after(KEEP_ALIVE) as silence:
                await call.end()
            if silence.cancelled_caught:
                await _send(send, b" ")
        await _send(send, call.events[-1].data if call.done else _cancelled(call), more=False)

    if call.done:
        await send({"type": "http.response.start", "status": 200, "headers": _headers(JSON_TYPE)})
        await _send(send, call.events[-1].data, more=False)
    else:
        await _while_connected(pump, receive)


async def _while_connected(pump: Callable[[], Awaitable[None]], receive: Receive) -> None:
    # hypercorn does not cancel an application whose client has left; only receive() tells
    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        nursery.cancel_scope.cancel()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await pump()
            nursery.cancel_scope.cancel()
    except* trio.TooSlowError:  # the client reads no more; hypercorn closes what is left unfinished
        pass


def _cancelled(call: Call) -> bytes:
    return encode(RpcError(REQUEST_CANCELLED, "Request cancelled; the work goes on", request=call.request).body())


def _frames(call: Call, events: Sequence[Event], *, resumable: bool) -> bytes:
    return b"".join(_frame(event.data, f"id: {call.id}.{event.seq}\n" if resumable else "") for event in events)


def _frame(data: bytes, name: str) -> bytes:
    return b"event: message\n" + name.encode() + b"data: " + data + b"\n\n"


def _headers(content_type: str) -> list[tuple[bytes, bytes]]:
    # a proxy that buffers would break the promise of rule 7 (report 39)
    return [(b"content-type", content_type.encode()), (b"cache-control", b"no-store, no-transform"), (b"x-accel-buffering", b"no")]


async def _start(send: Send, content_type: str) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _headers(content_type)})


async def _send(send: Send, data: bytes, *, more: bool = True) -> None:
    with trio.fail_after(SEND_LIMIT):
        await send({"type": "http.response.body", "body": data, "more_body": more})
