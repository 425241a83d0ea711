"""What makes a started or thawed guest one of its own: randomness, clock, names, /work, token (reports 14-17).

All guests of a template begin as the same memory. Until a restore request has gone through wholly, the guest serves no one:
Identity decides who may ask what, and Guest is the one place that changes the kernel's and the system's idea of who it is.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import ctypes
import fcntl
import grp
import hmac
import json
import os
import re
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from .http1 import Refused, Request
from .protocol import Restore, Restored

RNDADDENTROPY, RNDRESEEDCRNG = 0x40085203, 0x5207  # include/uapi/linux/random.h
MS_NOATIME = 1024
WORK = Path("/work")
BEFORE_RESTORE = frozenset({"/v1/health", "/v1/settle"})  # what a guest that is no one's yet does all the same
CLOCK_EVERY = 60.0  # seconds between two looks at the RTC
CLOCK_TOLERANCE = 1.5  # seconds; the RTC itself tells whole seconds only


class System(Protocol):
    """What a restore changes outside boxd. Every step raises OSError or ValueError when it did not happen."""

    def add_entropy(self, entropy: bytes) -> None: ...
    def set_clock(self, realtime: float) -> None: ...
    def rtc(self) -> float | None: ...
    def set_machine_id(self, machine_id: str) -> None: ...
    def set_hostname(self, hostname: str) -> None: ...
    def mount_work(self) -> None: ...
    def settle(self, *, drop_caches: bool) -> None: ...
    def work_mounted(self) -> bool: ...
    def network_up(self) -> bool: ...


class Guest:
    """The System of a real box. Never used on a host: it would take the host's name and clock."""

    def add_entropy(self, entropy: bytes) -> None:
        with Path("/dev/urandom").open("wb") as device:
            fcntl.ioctl(device, RNDADDENTROPY, struct.pack("ii", len(entropy) * 8, len(entropy)) + entropy)
            fcntl.ioctl(device, RNDRESEEDCRNG)

    def set_clock(self, realtime: float) -> None:
        time.clock_settime(time.CLOCK_REALTIME, realtime)

    def rtc(self) -> float | None:
        """The RTC follows the host's clock; None where the guest has none."""
        try:
            return int(Path("/sys/class/rtc/rtc0/since_epoch").read_text()) + 0.5
        except (OSError, ValueError):
            return None

    def set_machine_id(self, machine_id: str) -> None:
        Path("/etc/machine-id").write_text(machine_id + "\n")  # in place: systemd may have bind-mounted it

    def set_hostname(self, hostname: str) -> None:
        socket.sethostname(hostname)
        Path("/etc/hostname").write_text(hostname + "\n")
        Path("/etc/hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {hostname}\n")

    def mount_work(self) -> None:
        if WORK.is_mount():
            return
        WORK.mkdir(exist_ok=True)
        device = labelled_ext4("work")
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(device.encode(), bytes(WORK), b"ext4", MS_NOATIME, b"discard"):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), device)
        with contextlib.suppress(KeyError):  # both users of the box work there
            os.chown(WORK, 0, grp.getgrnam("tester").gr_gid)
            WORK.chmod(0o2775)

    def settle(self, *, drop_caches: bool) -> None:
        os.sync()
        if drop_caches:
            Path("/proc/sys/vm/drop_caches").write_text("3")

    def work_mounted(self) -> bool:
        return WORK.is_mount()

    def network_up(self) -> bool:
        try:
            return "OPER_STATE=routable" in Path("/run/systemd/netif/state").read_text()
        except OSError:
            return False


def labelled_ext4(label: str) -> str:
    """The block device with that ext4 label, read from the superblocks: udev's links may not be there yet."""
    for entry in sorted(Path("/sys/block").iterdir()):
        with contextlib.suppress(OSError), Path("/dev", entry.name).open("rb") as device:
            superblock = os.pread(device.fileno(), 136, 1024)
            if superblock[56:58] == b"\x53\xef" and superblock[120:136].rstrip(b"\0") == label.encode():
                return f"/dev/{entry.name}"
    raise FileNotFoundError(f"no disk carries the label {label!r}")


class Identity:
    """Who may ask what. Tokens are kept in the guest's memory only: here, and in a file of a tmpfs by which a boxd that was killed
    (`pkill python3` is an agent's everyday word) knows its box again."""

    def __init__(
        self, first_token: str, system: System, apply_cookie: Callable[[bytes], None], started: Callable[[], None], *, memory: Path
    ) -> None:
        """`apply_cookie` gives the display its cookie; `started` is called when a start (not a thaw) has been confirmed."""
        self._token, self._system = first_token, system
        self._apply_cookie, self._started, self._memory = apply_cookie, started, memory
        self.generation = 0
        self.open = False
        with contextlib.suppress(OSError, ValueError, KeyError):  # a boot has none; a torn one is none
            known = json.loads(memory.read_text())
            self.generation, self._token, self.open = known["generation"], known["token"], True

    def check(self, request: Request) -> None:
        """Raises Refused unless the request may go on: the right token, and an open box."""
        if not self._carries(request, self._token):
            raise Refused(401, "unauthorised", "The bearer token is not this generation's.")
        if not self.open and request.path not in BEFORE_RESTORE:
            raise Refused(409, "not_restored", "The box waits for its restore request.")

    def restore(self, request: Request, wanted: Restore) -> Restored:
        """All or nothing as seen from outside: after a failure the box is open to no one until another restore goes through."""
        repeated = wanted.generation == self.generation and hmac.compare_digest(wanted.token.encode(), self._token.encode())
        if not repeated and not self._carries(request, self._token):
            raise Refused(401, "unauthorised", "The bearer token is not this generation's.")
        if not repeated and wanted.generation <= self.generation:
            raise Refused(409, "stale_generation", f"The box is at generation {self.generation} already.")
        entropy, cookie = _checked(wanted)
        self.open = False
        self._memory.unlink(missing_ok=True)
        step = "entropy"
        try:
            self._system.add_entropy(entropy)
            step = "clock"
            self._system.set_clock(wanted.realtime + time.monotonic() - request.arrived)
            step = "machine-id"
            if wanted.machine_id:
                self._system.set_machine_id(wanted.machine_id)
            step = "hostname"
            if wanted.hostname:
                self._system.set_hostname(wanted.hostname)
            step = "work"
            if wanted.mount_work:
                self._system.mount_work()
            step = "display"
            if cookie:
                self._apply_cookie(cookie)
            step = "memory"
            self._remember(wanted)
        except (OSError, ValueError) as error:
            raise Refused(500, "restore_failed", f"The step {step!r} of the restore failed.", str(error)) from error
        self.generation, self._token, self.open = wanted.generation, wanted.token, True
        if wanted.machine_id and not repeated:
            self._started()
        ready = self._system.network_up() and (self._system.work_mounted() or not wanted.mount_work)
        return Restored(self.generation, time.time(), ready)

    def _remember(self, wanted: Restore) -> None:
        self._memory.parent.mkdir(parents=True, exist_ok=True)
        draft = self._memory.with_suffix(".new")
        draft.touch(mode=0o600)
        draft.write_text(json.dumps({"generation": wanted.generation, "token": wanted.token}))
        draft.replace(self._memory)

    async def keep_clock(self) -> None:
        """Steps the clock to the RTC when they have drifted apart (report 16). Runs until cancelled."""
        while True:
            await asyncio.sleep(CLOCK_EVERY)
            rtc = self._system.rtc()
            if rtc is not None and abs(rtc - time.time()) > CLOCK_TOLERANCE:
                with contextlib.suppress(OSError):  # the next minute tries again
                    self._system.set_clock(rtc)

    @staticmethod
    def _carries(request: Request, token: str) -> bool:
        return hmac.compare_digest(request.headers.get("authorization", "").encode(), f"Bearer {token}".encode())


def _checked(wanted: Restore) -> tuple[bytes, bytes]:
    """(entropy, cookie) of a restore whose every field makes sense; raises Refused."""
    try:
        entropy, cookie = base64.b64decode(wanted.entropy, validate=True), bytes.fromhex(wanted.x_cookie or "")
    except (binascii.Error, ValueError) as error:
        raise Refused(400, "bad_request", "entropy must be base64, xCookie hex.", str(error)) from error
    rules = {
        "entropy": 64 <= len(entropy) <= 512,
        "token": re.fullmatch(r"[!-~]{16,256}", wanted.token),
        "realtime": 1e9 < wanted.realtime < 1e11,
        "machineId": wanted.machine_id is None or re.fullmatch(r"[0-9a-f]{32}", wanted.machine_id),
        "hostname": wanted.hostname is None or re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", wanted.hostname),
        "xCookie": len(cookie) in {0, 16},
    }
    for name, holds in rules.items():
        if not holds:
            raise Refused(400, "bad_request", f"The field {name!r} is out of its bounds.")
    return entropy, cookie
