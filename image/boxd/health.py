"""The box's own account of itself, read from /proc and /run without starting a process."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from .identity import WORK
from .protocol import Health

VERSION = "1"
DOCKER_SOCKET, DOCKER_PID = Path("/run/docker.sock"), Path("/run/docker.pid")


def docker_state(*, warming: bool) -> str:
    """Docker's socket is there before the daemon is: it starts with the first connection."""
    if not DOCKER_SOCKET.exists():
        return "absent"
    if DOCKER_PID.exists():
        return "up"
    return "starting" if warming else "down"


def read_health(*, ready: bool, generation: int, desktop: str, warming: bool) -> Health:
    memory = dict(re.findall(r"^(\w+): +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    work = os.statvfs(WORK if WORK.is_mount() else "/")
    return Health(
        ready=ready,
        version=VERSION,
        generation=generation,
        uptime=time.clock_gettime(time.CLOCK_BOOTTIME),
        realtime=time.time(),
        desktop=desktop,
        docker=docker_state(warming=warming),
        load=os.getloadavg()[0],
        memory_total=int(memory["MemTotal"]) * 1024,
        memory_available=int(memory["MemAvailable"]) * 1024,
        work_total=work.f_blocks * work.f_frsize,
        work_free=work.f_bavail * work.f_frsize,
    )
