"""A node and a coordinator as boxctl sees them: real HTTP and WebSocket on unix sockets in a state folder of the test's own.

What the fake node runs "in a box" is a real command on this host, so streams, terminals, signals and tar are the real ones.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import pty
import signal
import socketserver
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, TextMessage

from image.boxd.protocol import FRAME_HEADER, Frame

WEBSOCKET_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
Answer = tuple[int, Any]  # status; an object, a list of events (NDJSON) or bytes


class FakeDaemon:
    """Answers what `routes` says: (method, path) -> an answer, or a function of the body that gives one. `asked` keeps the requests,
    `keys` what authorised them."""

    def __init__(self, socket: Path) -> None:
        self.routes: dict[tuple[str, str], Answer | Callable[[Any], Answer]] = {}
        self.asked: list[tuple[str, str, Any]] = []
        self.keys: list[str] = []
        self.attach: Callable[[BaseHTTPRequestHandler], None] = attach_to_host
        daemon = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def address_string(self) -> str:
                return "local"

            def log_message(self, *_: Any) -> None:
                pass

            def answer(self) -> None:
                path = self.path.partition("?")[0]
                if path.endswith("/attach"):
                    self.close_connection = True
                    daemon.attach(self)
                    return
                body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"null")
                daemon.asked.append((self.command, self.path, body))
                daemon.keys += self.headers.get_all("authorization", [])
                missing: Answer = (404, {"error": {"code": "route_not_found", "message": f"no {path}", "hop": "node"}})
                found = daemon.routes.get((self.command, path), missing)
                status, payload = found(body) if callable(found) else found
                lines = b"".join(json.dumps(event).encode() + b"\n" for event in payload) if isinstance(payload, list) else b""
                data = payload if isinstance(payload, bytes) else lines or json.dumps(payload).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_DELETE = answer

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True

        socket.parent.mkdir(parents=True, exist_ok=True)
        self._server = Server(str(socket), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def attach_to_host(handler: BaseHTTPRequestHandler) -> None:
    """The node's attach door over a process of this host."""
    accept = base64.b64encode(hashlib.sha1(handler.headers["sec-websocket-key"].encode() + WEBSOCKET_MAGIC).digest())
    handler.wfile.write(
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-accept: " + accept + b"\r\n\r\n"
    )
    socket, connection, lock = handler.request, Connection(ConnectionType.SERVER), threading.Lock()

    def send(event: Event) -> None:
        with lock, contextlib.suppress(OSError):
            socket.sendall(connection.send(event))

    def send_frame(kind: Frame, payload: bytes) -> None:
        send(BytesMessage(data=FRAME_HEADER.pack(kind, len(payload)) + payload))

    def events() -> Iterator[Event]:
        while data := socket.recv(65536):
            connection.receive_data(data)
            yield from connection.events()

    stream = events()
    spec = json.loads(next(event.data for event in stream if isinstance(event, TextMessage)))
    attached = AttachedProcess(spec, send_frame)
    pending = b""
    with contextlib.suppress(OSError):
        for event in stream:
            if isinstance(event, CloseConnection):
                break
            if isinstance(event, BytesMessage):
                pending += event.data
                while len(pending) >= FRAME_HEADER.size:
                    kind, length = FRAME_HEADER.unpack_from(pending)
                    if len(pending) < FRAME_HEADER.size + length:
                        break
                    attached.take(Frame(kind), pending[FRAME_HEADER.size : FRAME_HEADER.size + length])
                    pending = pending[FRAME_HEADER.size + length :]
    attached.hang_up()


class AttachedProcess:
    def __init__(self, spec: dict[str, Any], send: Callable[[Frame, bytes], None]) -> None:
        self._master: int | None = None
        slave = None
        if spec["tty"]:
            self._master, slave = pty.openpty()
            self._resize(spec["cols"], spec["rows"])
        end = slave or subprocess.PIPE
        argv = ["setsid", "--ctty", "--wait", "bash", "-c", spec["cmd"]] if slave else ["bash", "-c", spec["cmd"]]
        environment = {**os.environ, **spec["env"]}
        self._process: Any = subprocess.Popen(argv, cwd="/", env=environment, start_new_session=True, stdin=end, stdout=end, stderr=end)
        if slave:
            os.close(slave)
        self._thread = threading.Thread(target=self._pour, args=(send,), daemon=True)
        self._thread.start()

    def take(self, kind: Frame, payload: bytes) -> None:
        if kind is Frame.RESIZE:
            self._resize(*struct.unpack("!HH", payload))
        elif kind is Frame.SIGNAL:
            os.killpg(self._process.pid, payload[0])
        elif self._master is not None:
            os.write(self._master, payload)
        elif payload:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(payload)
                self._process.stdin.flush()
        else:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def hang_up(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._thread.join()

    def _pour(self, send: Callable[[Frame, bytes], None]) -> None:
        if self._master is not None:
            with contextlib.suppress(OSError):
                while data := os.read(self._master, 4096):
                    send(Frame.STDOUT, data)
            os.close(self._master)
        else:
            errors = threading.Thread(target=self._pour_one, args=(self._process.stderr, Frame.STDERR, send), daemon=True)
            errors.start()
            self._pour_one(self._process.stdout, Frame.STDOUT, send)
            errors.join()
        code = self._process.wait()
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        end = {"exitCode": code, "signal": None} if code >= 0 else {"exitCode": None, "signal": signal.Signals(-code).name}
        send(Frame.EXIT, json.dumps(end).encode())

    @staticmethod
    def _pour_one(stream: Any, kind: Frame, send: Callable[[Frame, bytes], None]) -> None:
        with stream:
            while data := stream.read1(65536):
                send(kind, data)

    def _resize(self, columns: int, rows: int) -> None:
        if self._master is not None:
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


BOX: dict[str, Any] = {
    "id": "abcdefghij12",
    "name": "trial",
    "state": "ready",
    "flavour": "core",
    "size": 1,
    "generation": 1,
    "createdAt": 1.0,
    "lastUsedAt": 1.0,
    "stateSince": 1.0,
    "image": "0123456789ab",
    "node": "n1",
    "freezesAt": None,
    "archivesAt": None,
    "deletesAt": None,
    "runningCommands": 0,
    "cold": False,
    "problem": None,
    "guest": None,
    "sentBytes": 0,
    "receivedBytes": 0,
    "pid": 7,
}


@dataclass
class Host:
    """One host with its state folder; daemons are there when a test asks for them."""

    state: Path
    daemons: list[FakeDaemon] = field(default_factory=list)

    @staticmethod
    def view(**differing: Any) -> dict[str, Any]:
        """One box as the node tells it."""
        return BOX | differing

    def node(self, *boxes: dict[str, Any]) -> FakeDaemon:
        daemon = self._daemon("node.sock")
        daemon.routes["GET", "/v1/boxes"] = (200, {"boxes": list(boxes)})
        for box in boxes:
            daemon.routes["GET", f"/v1/boxes/{box['id']}"] = (200, box)
        return daemon

    def coordinator(self) -> FakeDaemon:
        return self._daemon("coordinator.sock")

    def boxctl(self, *words: str, stdin: str | None = None) -> Result:
        """In this process: quick, for all that needs no terminal and no pipes."""
        from node.cli.main import app

        return CliRunner(env={"BOXFLEET_STATE": str(self.state)}).invoke(app, list(words), input=stdin)

    def spawn(self, *words: str, wrapped_in: Sequence[str] = (), **options: Any) -> subprocess.Popen[bytes]:
        """As a process of its own."""
        argv = [*wrapped_in, sys.executable, "-m", "node.cli.main", *words]
        return subprocess.Popen(argv, env={**os.environ, "BOXFLEET_STATE": str(self.state), "TERM": "xterm"}, **options)

    def run(self, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        with self.spawn(*words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            out, err = process.communicate(stdin, timeout=30)
            return subprocess.CompletedProcess(words, process.returncode, out, err)

    def _daemon(self, name: str) -> FakeDaemon:
        self.daemons.append(FakeDaemon(self.state / "run" / name))
        return self.daemons[-1]


@pytest.fixture
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    host = Host(tmp_path_factory.mktemp("s"))
    yield host
    for daemon in host.daemons:
        daemon.close()
