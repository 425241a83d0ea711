"""The coordinator's process: three doors on one trio loop, until SIGTERM.

    <listen>                 agents and people: MCP and REST
    <fleet_listen>           nodes, TLS
    <run>/coordinator.sock   the operator (boxctl), 0600
"""

from __future__ import annotations

import fcntl
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio
from hypercorn.config import Config
from hypercorn.trio import serve

from coordinator.app import make_operator, make_public
from coordinator.certificates import Authority
from coordinator.config import CoordinatorConfig, load_config
from coordinator.errors import BadInput, CoordinatorError
from coordinator.listeners import door_names, fleet_name, listen_again, listen_local, url_of
from coordinator.rest.fleet_door import make_fleet_door
from coordinator.services import open_services
from tools.context import ToolError

log = logging.getLogger("boxfleet.coordinator")


class AlreadyRunning(CoordinatorError):
    default_code = "already_running"
    default_remedy = "Use that one, or stop it: `boxctl down`."


class Door(Config):
    """hypercorn for one listening socket that is bound already, with the defaults that fit us (STACK.md)."""

    def __init__(self, listener: socket.socket, *, graceful: float, tls: ssl.SSLContext | None = None) -> None:
        super().__init__()
        self.tls = tls
        self.bind = [f"fd://{listener.detach()}"]  # hypercorn owns it from here on
        self.accesslog = None
        self.errorlog = logging.getLogger("boxfleet.http")
        self.graceful_timeout = graceful
        self.keep_alive_timeout = 60
        self.keep_alive_max_requests = 1_000_000
        self.include_server_header = False
        self.websocket_max_message_size = 1 << 20
        self.websocket_ping_interval = 20.0

    @property
    def ssl_enabled(self) -> bool:
        return self.tls is not None

    def create_ssl_context(self) -> ssl.SSLContext | None:
        return self.tls


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """The state folder is this process's alone. Raises AlreadyRunning."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise AlreadyRunning("Another coordinator runs on this state folder") from error
        yield


def public_tls(config: CoordinatorConfig) -> ssl.SSLContext | None:
    if not config.tls_certificate:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_certificate, config.tls_key or None)
    except (OSError, ssl.SSLError) as error:
        raise BadInput("tls_certificate or tls_key cannot be used", cause=str(error), remedy="Name readable PEM files.") from error
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


async def run(config: CoordinatorConfig, *, started: trio.Event | None = None, stopping: trio.Event | None = None) -> None:
    """Serves until SIGTERM or SIGINT (or `stopping`); then open requests get `graceful_stop` seconds."""
    stopping = trio.Event() if stopping is None else stopping
    config.places.run.mkdir(mode=0o755, parents=True, exist_ok=True)
    with only_one(config.places.lib):
        tls, places = public_tls(config), config.places
        public, fleet = listen_again(config.listen, places.port("listen")), listen_again(config.fleet_listen, places.port("fleet_listen"))
        public_url = config.public_url.rstrip("/") or url_of(public, "https" if tls else "http")
        fleet_url, elsewhere = url_of(fleet, "https"), url_of(fleet, "https", everywhere=fleet_name(config))
        authority = await trio.to_thread.run_sync(Authority.load, places.certificates, door_names(config))
        async with open_services(config, authority, public_url=public_url, fleet_url=fleet_url, fleet_url_elsewhere=elsewhere) as services:
            doors: tuple[tuple[Any, Door], ...] = (
                (make_public(services), Door(public, graceful=config.graceful_stop, tls=tls)),
                (make_fleet_door(services.fleet), Door(fleet, graceful=1.0, tls=authority.door_context)),
                (make_operator(services), Door(listen_local(places.socket), graceful=1.0)),
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_stop_on_signal, stopping)
                async with trio.open_nursery() as serving:
                    for app, door in doors:
                        await serving.start(partial(serve, app, door, shutdown_trigger=stopping.wait, mode="asgi"))
                    log.info("agents at %s, nodes at %s, the operator at %s", public_url, fleet_url, places.socket)
                    if started is not None:
                        started.set()
                nursery.cancel_scope.cancel()
        places.socket.unlink(missing_ok=True)
    log.info("stopped")


async def _stop_on_signal(stopping: trio.Event) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            log.info("stopping on %s", signal.Signals(number).name)
            stopping.set()


def main() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx2", "boxfleet.http"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        trio.run(run, load_config())
    except ToolError as error:
        sys.exit("boxfleet-coordinator: " + " ".join(filter(None, (f"{error.message}.", error.cause, error.remedy))))


if __name__ == "__main__":
    main()
