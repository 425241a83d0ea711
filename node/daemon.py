"""The node's process: what it owns, in the order in which it is opened and closed."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path

import trio
from hypercorn.config import Config
from hypercorn.trio import serve

from node.api import make_api
from node.boxes import Boxes
from node.config import NodeConfig, load_node_config
from node.errors import NodeError
from node.fleet import Identity, enrol, keep_heartbeats
from node.host import Host
from node.microvm import RunningVm
from node.protocol import ImageView, NodeView
from node.wiring import open_host

ENROL_AGAIN_EVERY = 2.0
GRACEFUL = 3.0  # seconds that requests under way get at the end


log = logging.getLogger("boxfleet.node").info


class CoordinatorDoor(Config):
    """mTLS: only who holds a certificate of the coordinator's issuer comes in. `reload` takes up a renewed certificate."""

    def __init__(self, identity: Identity, listener: socket.socket) -> None:
        super().__init__()
        self.bind = [f"fd://{listener.detach()}"]  # hypercorn owns it from here on
        self.certfile, self.keyfile, self.ca_certs = str(identity.certificate), str(identity.key), str(identity.coordinator_ca)
        self.verify_mode = ssl.CERT_REQUIRED
        self.context: ssl.SSLContext | None = None
        harden(self)

    def create_ssl_context(self) -> ssl.SSLContext | None:
        self.context = super().create_ssl_context()
        return self.context

    def reload(self) -> None:
        if self.context and self.certfile:
            self.context.load_cert_chain(self.certfile, self.keyfile)


def harden(config: Config) -> None:
    """hypercorn's defaults that do not fit us (STACK.md)."""
    config.accesslog, config.errorlog = None, logging.getLogger("boxfleet.http")
    config.graceful_timeout = GRACEFUL
    config.keep_alive_timeout = 60
    config.keep_alive_max_requests = 1_000_000
    config.websocket_max_message_size = 1 << 20
    config.include_server_header = False
    config.alpn_protocols = ["http/1.1"]


def open_listener(address: str) -> socket.socket:
    """A TCP listener whose stuck clients cannot hold a shutdown (TCP_USER_TIMEOUT, STACK.md)."""
    host, _, port = address.rpartition(":")
    listener = socket.create_server((host.strip("[]"), int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
    return listener


def open_local_socket(path: Path) -> socket.socket:
    """The operator's door: only root can open it. A socket file that nobody listens at is a leftover and is replaced."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    local = socket.socket(socket.AF_UNIX)
    old = os.umask(0o177)
    try:
        local.bind(str(path))
    finally:
        os.umask(old)
    local.listen(100)
    return local


@asynccontextmanager
async def only_one(folder: Path) -> AsyncIterator[None]:
    """The state folder is this process's alone; a second daemon on it ends with a typed error."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise NodeError(
                "another node daemon runs on this state folder", code="already_running", remedy="Use that one, or `boxctl down`."
            ) from error
        yield


def describe(host: Host, boxes: Boxes[RunningVm]) -> NodeView:
    images = [ImageView(flavour=i.flavour, digest=i.digest, built_at=i.built_at, bytes=i.bytes) for i in host.images.list()]
    problem = host.problem
    return NodeView(
        id=host.node_id,
        version=version("boxfleet"),
        pid=os.getpid(),
        ready=problem is None,
        problem=problem.problem if problem else None,
        accel=host.accel,
        development=host.config.development,
        capacity=boxes.capacity(),
        images=images,
        boxes=boxes.views(),
    )


async def serve_coordinator(config: NodeConfig, boxes: Boxes[RunningVm], host: Host, stopping: trio.Event) -> None:
    """Enrols if need be, then opens the coordinator's door and keeps the heartbeats. The local door does not wait for it."""
    identity = Identity(config.places.node / "identity")
    listener = open_listener(config.listen)
    address = config.address or ":".join(map(str, listener.getsockname()[:2]))
    said = ""
    while not identity.enrolled:
        try:
            await enrol(identity, config.places.enrol_token, address)
        except NodeError as error:
            if str(error) != said:
                said = str(error)
                log(f"{error} {error.problem.cause}")
            await trio.sleep(ENROL_AGAIN_EVERY)
    host.node_id = identity.read()[0]
    look = partial(describe, host, boxes)
    door = CoordinatorDoor(identity, listener)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_heartbeats, identity, config.coordinator, address, look, door.reload, log)
        await serve(make_api(boxes, look), door, shutdown_trigger=stopping.wait, mode="asgi")
        nursery.cancel_scope.cancel()


async def stop_on_signal(stopping: trio.Event) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            stopping.set()
            return


async def run(config: NodeConfig) -> None:
    """Runs until SIGTERM or SIGINT; then running boxes are frozen, so that nothing in them is lost."""
    places = config.places
    for folder in (places.lib, places.run):
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    identity, stopping = Identity(places.node / "identity"), trio.Event()
    async with AsyncExitStack() as owned:
        await owned.enter_async_context(only_one(places.node))
        host, vms = await owned.enter_async_context(open_host(config, log))
        host.node_id = identity.read()[0] if identity.enrolled else ""
        work = await owned.enter_async_context(trio.open_nursery())
        boxes = Boxes(host, vms, work, log)
        await boxes.recover()
        owned.callback(places.node_socket.unlink, missing_ok=True)
        door = Config()
        door.bind = [f"fd://{open_local_socket(places.node_socket).detach()}"]
        harden(door)
        log(f"serving {len(boxes.views())} boxes with {host.accel} at {places.node_socket}")
        work.start_soon(boxes.keep_clocks)
        async with trio.open_nursery() as doors:
            doors.start_soon(stop_on_signal, stopping)
            doors.start_soon(serve_coordinator, config, boxes, host, stopping)
            await serve(make_api(boxes, partial(describe, host, boxes)), door, shutdown_trigger=stopping.wait, mode="asgi")
            doors.cancel_scope.cancel()
        log("stopping: freezing what runs")
        await boxes.rest()
        work.cancel_scope.cancel()


def log_plain_lines() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx2", "boxfleet.http"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def main() -> None:
    log_plain_lines()
    try:
        trio.run(run, load_node_config())
    except* NodeError as errors:
        problem = first(errors).problem
        sys.exit(f"node: {problem.message}\n  cause: {problem.cause or '-'}\n  what to do: {problem.remedy}")
    except* KeyboardInterrupt:
        sys.exit(130)


def first(errors: BaseExceptionGroup[NodeError]) -> NodeError:
    error = errors.exceptions[0]
    return first(error) if isinstance(error, BaseExceptionGroup) else error


if __name__ == "__main__":
    main()
