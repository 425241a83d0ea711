"""The coordinator and the node as processes of this host: found, started detached by their names, ended in peace.

Who listens at a daemon's socket is the daemon. While it starts there is no socket yet: then the pid file in <run> says which process
`up` made. A pid may be used again by another program, so that process counts only while its command line names the daemon.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from node.cli.failure import Failure
from node.config import Places

POLL = 0.1  # seconds
LAST_LINES = 8
LONGEST_LOG = 8 << 20  # bytes; looked at when a daemon starts
LONGEST_SOCKET_PATH = 100  # the kernel takes 107 bytes


@dataclass(frozen=True)
class Daemon:
    name: str  # "coordinator" | "node"
    places: Places

    @property
    def module(self) -> str:
        return f"{self.name}.daemon"

    @property
    def log(self) -> Path:
        return self.places.lib / "log" / f"{self.name}.log"

    @property
    def pid_file(self) -> Path:
        return self.places.run / f"{self.name}.pid"

    @property
    def socket(self) -> Path:
        return self.places.run / f"{self.name}.sock"

    def pid(self) -> int | None:
        """The process that runs, however it was started."""
        if listener := listener_of(self.socket):
            return listener
        try:
            pid = int(self.pid_file.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return pid if is_alive(pid) and self.module in (command_line(pid) or [self.module]) else None

    def start(self) -> int:
        """Starts it as a session of its own, its output appended to the log, which begins anew when it has grown long. It stays when boxctl
        ends."""
        if len(os.fsencode(self.socket)) > LONGEST_SOCKET_PATH:
            raise Failure(f"{self.socket} is too long for a socket", remedy="Choose a shorter folder in BOXFLEET_STATE.")
        for folder in (self.log.parent, self.places.run):
            folder.mkdir(parents=True, exist_ok=True)
        if self.log.exists() and self.log.stat().st_size > LONGEST_LOG:
            self.log.replace(self.log.with_name(f"{self.log.name}.1"))
        # -P: a folder called `node` where the operator happens to stand must not be taken for ours.
        arguments = [sys.executable, "-P", "-m", self.module]
        with self.log.open("ab") as log, Path(os.devnull).open("rb") as nothing:
            streams = [(os.POSIX_SPAWN_DUP2, nothing.fileno(), 0), *((os.POSIX_SPAWN_DUP2, log.fileno(), stream) for stream in (1, 2))]
            pid = os.posix_spawn(sys.executable, arguments, os.environ, file_actions=streams, setsid=True)
        self.pid_file.write_text(f"{pid}\n")
        return pid

    def wait_until(self, healthy: Callable[[], bool], *, deadline: float) -> None:
        """Waits until it is healthy. Raises Failure with its last words when it ends before, or is not healthy after `deadline` seconds."""
        end = time.monotonic() + deadline
        while not healthy():
            if self.pid() is None:
                raise Failure(f"the {self.name} ended", cause=self.last_words(), remedy=f"Its log: {self.log}")
            if time.monotonic() > end:
                raise Failure(
                    f"the {self.name} is not healthy after {deadline:.0f} s", cause=self.last_words(), remedy=f"Its log: {self.log}"
                )
            time.sleep(POLL)

    def stop(self, pid: int, *, deadline: float) -> bool:
        """Ends the process and waits for it; False when it had to be killed."""
        peaceful = _end(pid, signal.SIGTERM, deadline)
        if not peaceful:
            _end(pid, signal.SIGKILL, deadline)
        self.pid_file.unlink(missing_ok=True)
        return peaceful

    def last_words(self) -> str:
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
                lines = log.read().decode(errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        return "\n".join(lines[-LAST_LINES:])


def listener_of(path: Path) -> int | None:
    """The process that listens at a unix socket; none when nobody does."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1)
        try:
            client.connect(str(path))
        except OSError:
            return None
        pid, _, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(pid) or None


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def command_line(pid: int) -> list[str]:
    """The arguments of a process; none while it is just being made."""
    try:
        return [word for word in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0") if word]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _end(pid: int, number: signal.Signals, deadline: float) -> bool:
    """Sends the signal; True once the process is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        signal.pidfd_send_signal(descriptor, number)
        end = time.monotonic() + deadline
        while is_alive(pid):
            if time.monotonic() > end:
                return False
            time.sleep(POLL)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)
    return True
