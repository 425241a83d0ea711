"""One child process as a thing with an owner: started outside the event loop, awaited and killed through its pidfd (a pid may be reused).

It has a session of its own and so outlives the daemon; it is ended by `kill` only.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import trio

from node.errors import VmError

KILL_DEADLINE = 30.0  # seconds; a process of many GiB in uninterruptible I/O takes its time


class Process:
    """`pid`, and `exit_code` once `wait` has returned (negative: the signal that ended it)."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.pid = child.pid
        self.exit_code: int | None = None
        self._pidfd = os.pidfd_open(child.pid)
        child.returncode = 0  # the pidfd's from here: Popen would wait for it when it is collected

    @classmethod
    async def spawn(cls, argv: Sequence[str], *, pass_fds: Sequence[int], errors: int) -> Process:
        """Starts `argv` with no environment and no input, its output going to `errors`. The caller closes its descriptors."""

        def start() -> Process:  # in a thread: vfork holds its caller until the exec, 1-3 ms
            child = subprocess.Popen(
                argv,
                cwd="/",
                env={"PATH": "/usr/bin:/bin"},
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=pass_fds,
                start_new_session=True,
            )
            return cls(child)

        try:
            return await trio.to_thread.run_sync(start)
        except OSError as error:
            raise VmError(f"{argv[0]} does not start", cause=str(error), remedy="Install QEMU >= 9: `boxctl doctor` says how.") from error

    async def wait(self) -> int:
        """The exit code, once it has ended. One task waits: the owner's."""
        if self.exit_code is None:
            await trio.lowlevel.wait_readable(self._pidfd)
            self.exit_code = self._reap()
            os.close(self._pidfd)
        return self.exit_code

    def _reap(self) -> int:
        _, status = os.waitpid(self.pid, 0)  # it has ended: does not block
        return os.waitstatus_to_exitcode(status)

    def send_kill(self) -> None:
        """SIGKILL; nothing happens if it has ended."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


def tail(path: Path, limit: int = 1000) -> str:
    """The last `limit` bytes of a log, as text; empty if there is none."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
        return file.read(limit).decode(errors="replace").strip()
    return ""
