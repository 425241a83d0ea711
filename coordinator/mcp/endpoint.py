"""/mcp: Streamable HTTP for both protocol eras, as one ASGI application.

The SDK's session manager is not used. It answers 404 to a session that it does not know, ties a call to the connection or to a task of
the session, forgets everything at a restart, and runs each call through four tasks and streams. What remains once those are replaced
(one message to validate, a few fixed answers) is shorter than the layer around it would be. The SDK's types and its ladder for 2026-07-28
are used.

    POST    a message: a fixed answer, or a tool call (calls.py) whose events are streamed (events.py)
    GET     with Last-Event-ID: the rest of a broken stream; without: 405, the server starts no conversation
    DELETE  the end of a session, of which there is nothing to end
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final, Protocol

import trio

from coordinator.errors import Unauthorised, as_json
from coordinator.keys import bearer
from coordinator.mcp import surface
from coordinator.mcp.callers import caller, may_come_from, new_session
from coordinator.mcp.calls import Calls, Origin
from coordinator.mcp.events import RETRY_MS, Accepts, Receive, Send, answer, follow
from coordinator.mcp.messages import Notification, Reply, Request, RequestId, RpcError, client_name, encode, parse
from coordinator.store.keys import Key

log = logging.getLogger(__name__)

MAX_BODY: Final = 4 << 20  # bytes
BODY_LIMIT: Final = 60.0  # s that a body may take to arrive
PRIMED: Final = frozenset({"2025-11-25"})  # versions whose clients know an empty first event
FIXED: Final = {
    (False, "ping"): {},
    (False, "logging/setLevel"): {},
    (True, "server/discover"): surface.modern(surface.discovered(), cacheable=True),
}


class Verify(Protocol):
    async def verify(self, secret: str) -> Key | None: ...


class HttpError(Exception):
    """Answered without a JSON-RPC message of its own: `body` as JSON with this status."""

    def __init__(self, status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status)
        self.status, self.body, self.headers = status, body, dict(headers or {})


class Endpoint:
    """The ASGI application for /mcp. Cancelling a request, like closing its connection, ends a wait and never work."""

    def __init__(self, calls: Calls, keys: Verify, *, public_url: str) -> None:
        self._calls, self._keys, self._public_url = calls, keys, public_url
        tools = surface.tool_list(calls.tools.values())
        fixed = FIXED | {(False, "tools/list"): tools, (True, "tools/list"): surface.modern(tools, cacheable=True)}
        self._fixed = {key: encode(value) for key, value in fixed.items()}
        self._methods = {"POST": self._post, "GET": self._get, "DELETE": self._delete}

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            await self._serve(scope["method"], headers, receive, send)
        except HttpError as refused:
            await _respond(send, refused.status, encode(refused.body), refused.headers)
        except RpcError as error:
            await _respond(send, error.status, encode(error.body()))

    async def _serve(self, method: str, headers: Mapping[str, str], receive: Receive, send: Send) -> None:
        serve = self._methods.get(method)
        if serve is None:
            raise _not_allowed()
        if not may_come_from(headers.get("origin"), self._public_url):
            raise HttpError(403, {"error": "Pages of this origin may not call /mcp", "code": "origin_refused"})
        await serve(headers, await self._key(headers), receive, send)

    async def _key(self, headers: Mapping[str, str]) -> Key:
        try:
            key = await self._keys.verify(bearer(headers.get("authorization")))
        except Exception:
            log.exception("a key could not be verified")
            # a 503 of /mcp promises that nothing ran, and is asked again (CONTRACT 2.1, report 17)
            body = {"error": "Keys cannot be verified right now", "reason": "upstream_auth", "retryAfterSec": 5}
            raise HttpError(503, body, {"retry-after": "5"}) from None
        if key is None:
            # No resource_metadata: it would send clients to look for an OAuth server that is not there.
            raise HttpError(401, as_json(Unauthorised("No valid API key came with the request")), {"www-authenticate": "Bearer"})
        return key

    async def _post(self, headers: Mapping[str, str], key: Key, receive: Receive, send: Send) -> None:
        accepts = Accepts.read(headers.get("accept"))
        if not (accepts.json or accepts.stream):
            raise HttpError(406, {"error": "Accept must allow application/json or text/event-stream", "code": "not_acceptable"})
        message = parse(await _body(headers, receive), headers)
        origin = Origin(key.account, headers.get("mcp-session-id", ""))
        match message:
            case Reply():
                await _respond(send, 202, b"")
            case Notification():
                self._notified(message, origin)
                await _respond(send, 202, b"")
            case Request(method="initialize"):
                info = client_name(message.params.get("clientInfo"))
                result = encode(surface.initialized(message.params))
                await _respond(send, 200, _result(message.id, result), {"mcp-session-id": new_session(info)})
            case Request(method="tools/call"):
                tool, arguments = _tool_call(message)
                call = self._calls.start(message, origin, caller(headers, key, message.client), tool, arguments)
                await answer(call, self._calls, accepts, primed=message.version in PRIMED, receive=receive, send=send)
            case Request():
                result = self._fixed.get((message.modern, message.method), b"")
                if not result:
                    raise message.unknown()
                await _respond(send, 200, _result(message.id, result))

    def _notified(self, message: Notification, origin: Origin) -> None:
        # From 2026-07-28 a client cancels by closing its stream; a request's id is no name there (no session).
        request = message.params.get("requestId")
        if message.method == "notifications/cancelled" and not message.modern and isinstance(request, int | str):
            self._calls.cancel(origin, request)

    async def _get(self, headers: Mapping[str, str], key: Key, receive: Receive, send: Send) -> None:
        last = headers.get("last-event-id")
        if last is None:
            raise _not_allowed()
        if not Accepts.read(headers.get("accept", "text/event-stream")).stream:
            raise HttpError(406, {"error": "Accept must allow text/event-stream", "code": "not_acceptable"})
        name, _, number = last.partition(".")
        seq = int(number) if number.isascii() and number.isdigit() and len(number) < 10 else -1
        origin = Origin(key.account, headers.get("mcp-session-id", ""))
        call = await self._calls.resume(origin, name, seq) if seq >= 0 and len(name) == 32 else None
        if call is None:
            # never 404, which a client takes for the end of its session
            raise HttpError(410, {"error": "No such event in this session, or it is too old", "code": "event_unknown"})
        await follow(call, seq, f"retry: {RETRY_MS}\n\n", resumable=True, receive=receive, send=send)

    async def _delete(self, headers: Mapping[str, str], key: Key, receive: Receive, send: Send) -> None:
        await _respond(send, 204, b"")


def _tool_call(message: Request) -> tuple[str, Mapping[str, Any]]:
    name, arguments = message.params.get("name"), message.params.get("arguments")
    if not isinstance(name, str):
        raise message.invalid("params.name must be a string")
    if not isinstance(arguments, dict | None):
        raise message.invalid("params.arguments must be an object")
    return name, arguments or {}


def _result(request: RequestId, result: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (encode(request), result)


def _not_allowed() -> HttpError:
    return HttpError(405, {"error": "Use POST; GET only with Last-Event-ID", "code": "method_not_allowed"}, {"allow": "POST, GET, DELETE"})


async def _body(headers: Mapping[str, str], receive: Receive) -> bytes:
    length = headers.get("content-length", "0")
    if length.isdigit() and int(length) > MAX_BODY:
        raise _too_large()
    body = bytearray()
    with trio.move_on_after(BODY_LIMIT):
        while (event := await receive())["type"] != "http.disconnect":
            body += event.get("body", b"")
            if len(body) > MAX_BODY:
                raise _too_large()
            if not event.get("more_body"):
                return bytes(body)
    raise HttpError(408, {"error": "The body did not arrive", "code": "body_incomplete"}, {"connection": "close"})


def _too_large() -> HttpError:
    return HttpError(413, {"error": f"The body exceeds {MAX_BODY >> 20} MiB", "code": "body_too_large"}, {"connection": "close"})


async def _respond(send: Send, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
    fields = {"content-type": "application/json", "content-length": str(len(body)), "cache-control": "no-store", **(headers or {})}
    if status in (202, 204):
        del fields["content-type"]
    if status == 204:
        del fields["content-length"]
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(k.encode(), v.encode("latin-1", "replace")) for k, v in fields.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})
