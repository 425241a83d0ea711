"""The coordinator's side of node/protocol.py: what a node can be asked for, and how it is asked over mTLS.

An operation answers with lines while it works. A lost link does not lose it: the same request joins it again. A node that says nothing
for SILENCE seconds, though it owes an `alive` every 5, counts as unreachable.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Literal, Protocol, TypeVar

import httpx2
import trio
from pydantic import ValidationError

from coordinator.certificates import Authority, node_name
from coordinator.errors import NodeProblem, NodeUnreachable
from node.protocol import (
    BoxView,
    CommandView,
    CommandWait,
    Event,
    NodeView,
    Problem,
    RunCommand,
    StartBox,
    UnsavedWork,
    WaitCommand,
    Wire,
)

SILENCE = 15.0  # s
CONNECT = 5.0  # s
REJOIN = (0.1, 0.5, 2.0)  # s before each further try of a request whose link broke; every request of a node may be repeated
IDLE_CONNECTION = 30.0  # s: below the nodes' 60, so that no request meets a connection that is just being closed

Progress = Callable[[str, float | None], None]  # what is being done, and how much of it is
Action = Literal["freeze", "thaw", "archive", "restore"]
T = TypeVar("T")
W = TypeVar("W", bound=Wire)


def unheard(message: str, fraction: float | None = None) -> None:
    """Progress that nobody listens to."""


class Node(Protocol):
    """One node. Every method raises NodeProblem (what the node answered) or NodeUnreachable; a cancel stops the wait, not the work."""

    async def view(self) -> NodeView: ...
    async def box(self, box: str) -> BoxView: ...
    async def start(self, box: str, spec: StartBox, progress: Progress = unheard) -> BoxView: ...
    async def act(self, box: str, action: Action, progress: Progress = unheard) -> BoxView: ...
    async def destroy(self, box: str, progress: Progress = unheard) -> BoxView: ...
    async def unsaved(self, box: str) -> UnsavedWork: ...
    async def exec(self, box: str, command: RunCommand, progress: Progress = unheard) -> CommandView: ...
    async def commands(self, box: str) -> list[CommandView]: ...
    async def wait(self, box: str, exec_id: str, wait: WaitCommand, progress: Progress = unheard) -> CommandWait: ...
    async def stop_command(self, box: str, exec_id: str) -> CommandView: ...
    def output(self, box: str, exec_id: str, stream: str, offset: int) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The kept bytes of a command's stream, from `offset` on, as they come."""
        ...


class HttpNode:
    """A node behind its API. `client` is shared by all nodes and pools their connections."""

    def __init__(self, client: httpx2.AsyncClient, node: str, address: str) -> None:
        self._client, self._node, self._base = client, node, f"https://{address}"
        self._extensions = {"sni_hostname": node_name(node)}  # the certificate is for the id, whatever the address

    async def view(self) -> NodeView:
        return _parse(NodeView, await self._ask("GET", "/v1/node"))

    async def box(self, box: str) -> BoxView:
        return _parse(BoxView, await self._ask("GET", f"/v1/boxes/{box}"))

    async def start(self, box: str, spec: StartBox, progress: Progress = unheard) -> BoxView:
        return await self._operate(BoxView, "PUT", f"/v1/boxes/{box}", spec, progress)

    async def act(self, box: str, action: Action, progress: Progress = unheard) -> BoxView:
        return await self._operate(BoxView, "POST", f"/v1/boxes/{box}/{action}", None, progress)

    async def destroy(self, box: str, progress: Progress = unheard) -> BoxView:
        return await self._operate(BoxView, "DELETE", f"/v1/boxes/{box}", None, progress)

    async def unsaved(self, box: str) -> UnsavedWork:
        return _parse(UnsavedWork, await self._ask("GET", f"/v1/boxes/{box}/unsaved", silence=60.0))

    async def exec(self, box: str, command: RunCommand, progress: Progress = unheard) -> CommandView:
        return await self._operate(CommandView, "POST", f"/v1/boxes/{box}/exec", command, progress)

    async def commands(self, box: str) -> list[CommandView]:
        answer = await self._ask("GET", f"/v1/boxes/{box}/commands", silence=60.0)
        return [_parse(CommandView, command) for command in answer["commands"]]

    async def wait(self, box: str, exec_id: str, wait: WaitCommand, progress: Progress = unheard) -> CommandWait:
        return await self._operate(CommandWait, "POST", f"/v1/boxes/{box}/commands/{exec_id}/wait", wait, progress)

    async def stop_command(self, box: str, exec_id: str) -> CommandView:
        return _parse(CommandView, await self._ask("POST", f"/v1/boxes/{box}/commands/{exec_id}/stop", silence=60.0))

    @asynccontextmanager
    async def output(self, box: str, exec_id: str, stream: str, offset: int) -> AsyncIterator[AsyncIterator[bytes]]:
        request = self._request("GET", f"/v1/boxes/{box}/commands/{exec_id}/output/{stream}?offset={offset}", None, 60.0)
        try:
            async with _closing(await self._client.send(request, stream=True)) as response:
                await _refuse(response)
                yield response.aiter_bytes()
        except httpx2.TransportError as error:
            raise self._unreachable(error) from error

    async def _ask(self, method: str, path: str, *, silence: float = SILENCE) -> Any:
        """A request that is answered once."""

        async def once() -> Any:
            response = await self._client.send(self._request(method, path, None, silence))
            await _refuse(response)
            return response.json()

        return await self._repeating(once)

    async def _operate(self, model: type[W], method: str, path: str, body: Wire | None, progress: Progress) -> W:
        """A request that is answered line by line until `result` or `error`."""

        async def once() -> W:
            async with _closing(await self._client.send(self._request(method, path, body, SILENCE), stream=True)) as response:
                await _refuse(response)
                end: Event | None = None
                async for line in response.aiter_lines():  # to its end, so that the connection can be used again
                    event = _parse_line(line)
                    if event.type == "progress":
                        progress(event.message, event.fraction)
                    elif event.type != "alive":
                        end = event
            if end is None:
                raise httpx2.RemoteProtocolError("the answer ended without its result")
            if end.type == "error":
                raise NodeProblem(end.error or Problem(code="node_error", message="The node failed without a word"))
            return _parse(model, end.result)

        return await self._repeating(once)

    async def _repeating(self, once: Callable[[], Awaitable[T]]) -> T:
        for pause in REJOIN:
            try:
                return await once()
            except httpx2.ConnectTimeout as error:
                raise self._unreachable(error) from error
            except httpx2.TransportError:
                await trio.sleep(pause)
        try:
            return await once()
        except httpx2.TransportError as error:
            raise self._unreachable(error) from error

    def _request(self, method: str, path: str, body: Wire | None, silence: float) -> httpx2.Request:
        headers = {"content-type": "application/json"} if body else {}
        content = body.model_dump_json(by_alias=True) if body else None
        timeout = httpx2.Timeout(silence, connect=CONNECT)
        return self._client.build_request(
            method, self._base + path, content=content, headers=headers, timeout=timeout, extensions=dict(self._extensions)
        )

    def _unreachable(self, error: Exception) -> NodeUnreachable:
        return NodeUnreachable(f"Node {self._node} does not answer", cause=f"{type(error).__name__}: {error}".rstrip(": "))


@asynccontextmanager
async def http_nodes(authority: Authority) -> AsyncIterator[Callable[[str, str], Node]]:
    """Gives the function (node id, address) -> Node; all of its nodes share one pool of connections, closed at the end."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE_CONNECTION)
    # trust_env=False: a proxy meant for the world must not see the fleet
    async with httpx2.AsyncClient(verify=authority.client_context, limits=limits, trust_env=False) as client:
        yield lambda node, address: HttpNode(client, node, address)


@asynccontextmanager
async def _closing(response: httpx2.Response) -> AsyncIterator[httpx2.Response]:
    try:
        yield response
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
            await response.aclose()


async def _refuse(response: httpx2.Response) -> None:
    """Raises what a failed answer says."""
    if response.status_code < 400:
        return
    await response.aread()
    try:
        problem = Problem.model_validate(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        problem = Problem(code="node_error", message=f"The node answered HTTP {response.status_code} without a reason")
    raise NodeProblem(problem, response.status_code)


def _parse_line(line: str) -> Event:
    try:
        return Event.model_validate_json(line)
    except ValidationError as error:
        raise _nonsense(error) from error


def _parse(model: type[W], value: Any) -> W:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _nonsense(error) from error


def _nonsense(error: ValidationError) -> NodeProblem:
    remedy = "Run the same version of boxfleet on the coordinator and on its nodes."
    return NodeProblem(Problem(code="node_protocol", message="The node's answer makes no sense", cause=str(error), remedy=remedy))
