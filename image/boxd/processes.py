"""Processes of the box as boxd sees them: starting them as a user, reaping them all, and what /proc tells of a session.

boxd is the subreaper of everything it starts, so orphans come back to it. Only Processes ever waits, for whichever child ended
first; so no exit code is lost and no zombie stays (report 8). Every process started here leads a session of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import pwd
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .http1 import Refused

PR_SET_CHILD_SUBREAPER = 36
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TAG = "BOXD_EXEC_ID"  # in every command's environment: tells a command's own session from a later one with the same number
ARGUMENT_LIMIT = 128 * 1024  # MAX_ARG_STRLEN, its closing NUL included
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Account:
    name: str
    uid: int
    gid: int
    home: str
    shell: str

    @classmethod
    def named(cls, name: str) -> Account:
        try:
            entry = pwd.getpwnam(name)
        except (KeyError, ValueError) as error:
            raise Refused(400, "user_not_found", f"The box has no user {name!r}.", remedy="Use root or a user of /etc/passwd.") from error
        return cls(entry.pw_name, entry.pw_uid, entry.pw_gid, entry.pw_dir, entry.pw_shell or "/bin/bash")


def environment(account: Account, display: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """A child's whole environment, built from nothing: boxd's own never reaches a workload (report 57)."""
    base = {"HOME": account.home, "USER": account.name, "LOGNAME": account.name, "SHELL": account.shell, "PATH": PATH}
    return {**base, "LANG": "C.UTF-8", "TZ": "UTC", **display, **extra}


@dataclass(frozen=True)
class Exit:
    code: int | None
    signal: int | None
    cpu_seconds: float  # of the process and the children it waited for


def signal_name(number: int | None) -> str | None:
    """"SIGKILL" for 9; a real-time signal has no name of its own."""
    if number is None:
        return None
    return signal.Signals(number).name if number in set(signal.Signals) else f"SIG{number}"


@dataclass(frozen=True)
class Process:
    pid: int
    exited: asyncio.Future[Exit]

    async def wait(self) -> Exit:
        """Its end; any number of tasks may wait, and each may be cancelled (which would cancel a future that is awaited bare)."""
        return await asyncio.shield(self.exited)


class Processes:
    """All children of boxd. Made once, inside the running loop and its main thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._children: dict[int, tuple[subprocess.Popen[bytes], asyncio.Future[Exit]]] = {}
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)

    def spawn(
        self,
        argv: Sequence[str],
        *,
        account: Account,
        env: Mapping[str, str],
        cwd: str = "/",
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.DEVNULL,
        stderr: int = subprocess.DEVNULL,
        tty: bool = False,
        keep: Sequence[int] = (),
    ) -> Process:
        """Starts `argv` as the leader of a new session, with the descriptors `keep` under their own numbers; with `tty`, stdin becomes
        its controlling terminal. Raises OSError."""
        switch = {}
        if account.uid != os.geteuid():  # unswitched, Python can vfork: much the cheaper way
            switch = {"user": account.uid, "group": account.gid, "extra_groups": os.getgrouplist(account.name, account.gid)}
        child = subprocess.Popen(  # type: ignore[call-overload]
            ["/usr/bin/setsid", "--ctty", *argv] if tty else argv,  # setsid(1) becomes the leader and the command in turn: the pid stays
            env=dict(env),
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=not tty,
            pass_fds=keep,
            **switch,
        )
        with contextlib.suppress(OSError):  # boxd is protected from the OOM killer; what it starts is not (report 12)
            Path(f"/proc/{child.pid}/oom_score_adj").write_text("0")
        exited: asyncio.Future[Exit] = self._loop.create_future()
        self._children[child.pid] = (child, exited)
        return Process(child.pid, exited)

    def shell(self, cmd: str, **how: Any) -> Process:
        """Like spawn, for a bash command line of any length: what execve takes as no argument comes as a file in memory."""
        if len(script := cmd.encode(errors="surrogateescape")) < ARGUMENT_LIMIT:
            return self.spawn(["/bin/bash", "-c", cmd], **how)
        with os.fdopen(os.memfd_create("cmd"), "wb", buffering=0) as file:
            file.write(script)
            return self.spawn(["/bin/bash", f"/proc/self/fd/{file.fileno()}"], keep=[file.fileno()], **how)

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if known := self._children.pop(pid, None):
                child, exited = known
                child.returncode = code = os.waitstatus_to_exitcode(status)  # or Popen would wait for it again
                cpu = usage.ru_utime + usage.ru_stime
                exited.set_result(Exit(None, -code, cpu) if code < 0 else Exit(code, None, cpu))


@dataclass(frozen=True)
class Stat:
    pid: int
    group: int
    session: int
    cpu_seconds: float


def stats() -> Iterator[Stat]:
    """Every living process of the box."""
    for pid in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - a Path for each would cost more than the rest
        with contextlib.suppress(OSError):  # it ended meanwhile
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            if fields[0] != b"Z":
                yield Stat(int(pid), int(fields[2]), int(fields[3]), sum(map(int, fields[11:15])) / TICKS)


def cpu_by_session() -> dict[int, float]:
    seconds: dict[int, float] = {}
    for stat in stats():
        seconds[stat.session] = seconds.get(stat.session, 0.0) + stat.cpu_seconds
    return seconds


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def signal_session(session: int, number: int) -> None:
    """To the leader's group at once, then to the further groups that a shell with job control made in the session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, number)
    for stat in stats():
        if stat.session == session and stat.group != session:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stat.pid, number)


def session_carries(session: int, tag: str) -> bool:
    """Whether a living process of the session has `tag` in its environment: numbers of ended sessions are used again."""
    wanted = f"{TAG}={tag}".encode()
    for stat in stats():
        if stat.session == session:
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{stat.pid}/environ").read_bytes().split(b"\0"):
                    return True
    return False


async def end_session(session: int, grace: float) -> None:
    """SIGTERM, and after `grace` seconds SIGKILL to what is left; returns when the leader's group is gone, or 2 s after the kill."""
    loop = asyncio.get_running_loop()
    for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 2.0)):
        signal_session(session, number)
        signal_session(session, signal.SIGCONT)  # a stopped process takes no SIGTERM
        deadline = loop.time() + patience
        while group_lives(session):
            if loop.time() >= deadline:
                break
            await asyncio.sleep(0.02)
        else:
            return
