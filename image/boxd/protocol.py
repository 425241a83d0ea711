"""What the node and boxd say to each other: HTTP/1.1 over TCP to the guest's address, JSON bodies, a bearer token per generation.

    GET  /v1/health                              -> Health
    POST /v1/restore                 Restore     -> Restored   the one request that opens a started or thawed box
    POST /v1/settle                  {"dropCaches": bool} -> {}  sync(2), and for a template drop the page cache; allowed before a restore
    POST /v1/commands?waitSec=N      CommandSpec -> Command    starts it; answers when it has ended or after N seconds (0: at once)
    GET  /v1/commands                            -> {"commands": [Command, ...]}   without output, `cmd` cut to 500 characters
    GET  /v1/commands/{execId}?waitSec=N         -> Command    with the last OUTPUT_TAIL bytes of each stream
    GET  /v1/commands/{execId}/ready?waitSec=N&port=P&log=TEXT -> Readiness   waits until a port listens or the log holds TEXT
    POST /v1/commands/{execId}/stop  {"graceSec"} -> Command   SIGTERM to the process group, SIGKILL after graceSec
    GET  /v1/commands/{execId}/output/{stdout|stderr}?offset=N&follow=0|1 -> the bytes themselves, streamed
    POST /v1/attach                  AttachSpec  -> 101 Upgrade: boxd-attach, then frames both ways (below)

An error is {"error": {"code", "message", "cause", "remedy"}} with a 4xx or 5xx status. Starting an execId that is already known
answers with the command as it is: the request may be repeated after a lost link. Times are Unix seconds (float), sizes are bytes.
The daemon inside is the guest's and so hostile: whoever reads these answers bounds their size, their time and their shape.

This module needs the standard library only; it is imported in the guest as `boxd.protocol`, on the host as `image.boxd.protocol`.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, field

REVISION = 1  # raised when a node and a boxd of before no longer understand each other; an image says its own
PORT = 7070
FIRST_TOKEN_FW_CFG = "opt/boxfleet/token"  # noqa: S105 - a name; read once from /sys/firmware/qemu_fw_cfg/by_name/<this>/raw, by root
OUTPUT_TAIL = 16 * 1024  # bytes of each stream inside a Command (CONTRACT 3, sandbox_exec)
OUTPUT_QUOTA = 64 << 20  # bytes of each stream kept in full; beyond it the head and the tail are kept (report 1)
MAX_BODY = 1 << 20  # bytes of a JSON request
EXEC_ID = r"[A-Za-z0-9_-]{1,64}"
FOREGROUND_LIMIT = 3600.0  # seconds: no foreground command runs longer


@dataclass(frozen=True)
class Restore:
    """Everything that a started or thawed guest must be given before it may serve. Fails closed: any part that fails fails the request."""

    generation: int  # grows with every start and thaw
    token: str  # the only bearer token accepted from now on
    entropy: str  # base64 of >= 64 bytes: RNDADDENTROPY, then RNDRESEEDCRNG
    realtime: float  # the host's clock at the moment of sending; CLOCK_REALTIME is stepped to it
    machine_id: str | None = None  # 32 hex digits, with hostname: only after a start
    hostname: str | None = None
    mount_work: bool = False  # only after a start: mount the /work disk
    x_cookie: str | None = None  # hex: this box's MIT-MAGIC-COOKIE-1


@dataclass(frozen=True)
class Restored:
    generation: int
    realtime: float  # the guest's clock when it answered
    ready: bool  # exec and DNS work, /work is mounted


@dataclass(frozen=True)
class Health:
    ready: bool
    version: str
    generation: int
    uptime: float
    realtime: float
    desktop: str  # "up" | "down" | "starting"
    docker: str  # "up" | "down" | "starting" | "absent"
    load: float
    memory_total: int
    memory_available: int
    work_total: int
    work_free: int


@dataclass(frozen=True)
class CommandSpec:
    exec_id: str  # chosen by the client, matches EXEC_ID
    cmd: str  # a bash command line
    cwd: str = "/work"
    user: str = "root"
    env: dict[str, str] = field(default_factory=dict)
    timeout_sec: float | None = None  # None: FOREGROUND_LIMIT for a foreground command, none for a background one
    background: bool = False


@dataclass(frozen=True)
class Output:
    """One stream's end. `text_b64` holds its last OUTPUT_TAIL bytes; `total` counts all that was written, `dropped` what was not kept."""

    text_b64: str
    total: int
    truncated: bool
    dropped: int
    path: str  # where the kept output lies inside the box, from the first byte on; "" when none was kept


@dataclass(frozen=True)
class Command:
    exec_id: str
    cmd: str
    cwd: str
    user: str
    background: bool
    pid: int | None
    running: bool
    started_at: float
    ended_at: float | None
    exit_code: int | None  # None while running, and when ended by a signal
    signal: str | None  # "SIGKILL", ...
    timed_out: bool
    end_reason: str | None  # None | "exited" | "signal" | "timed_out" | "stopped" | "start_failed" | "guest_oom" | "boxd_restarted"
    cpu_seconds: float
    stdout: Output | None = None  # None in lists
    stderr: Output | None = None


@dataclass(frozen=True)
class Readiness:
    ready: bool
    why: str  # "port 3000 listens" | "log has 'Listening'" | "exited with 1" | "waited 30 s"
    command: Command | None


@dataclass(frozen=True)
class AttachSpec:
    """A command whose streams go both ways as they are: `boxctl box shell` (tty) and `box exec`, `box cp` (no tty)."""

    cmd: str
    cwd: str = "/work"
    user: str = "root"
    env: dict[str, str] = field(default_factory=dict)
    tty: bool = False
    cols: int = 80
    rows: int = 24


class Frame(enum.IntEnum):
    """Kinds of frames on an attached connection. A frame is HEADER (kind, length), then `length` bytes, at most FRAME_MAX."""

    STDIN = 0  # client -> box; an empty one is the end of input
    STDOUT = 1  # box -> client
    STDERR = 2
    RESIZE = 3  # client -> box: two uint16, columns and rows
    SIGNAL = 4  # client -> box: one uint8, the signal's number, to the process group
    EXIT = 5  # box -> client, the last frame: JSON {"exitCode", "signal"}


FRAME_HEADER = struct.Struct("!BI")
FRAME_MAX = 64 * 1024
