"""What a node says to its clients: the coordinator over mTLS, boxctl over the node's local socket (0600). One API, two doors.

    GET    /v1/node                                    -> NodeView      also the body of a heartbeat
    GET    /v1/boxes                                   -> {"boxes": [BoxView]}
    GET    /v1/boxes/{id}                              -> BoxView       never wakes
    PUT    /v1/boxes/{id}                   StartBox   => BoxView       idempotent: a known id answers with the box as it is
    POST   /v1/boxes/{id}/freeze|thaw|archive|restore  => BoxView
    DELETE /v1/boxes/{id}                              => BoxView       destroys; a box that is gone answers `box_not_found`
    GET    /v1/boxes/{id}/unsaved                      -> UnsavedWork   wakes
    POST   /v1/boxes/{id}/exec              RunCommand => CommandView   wakes; the answer comes when the command ended or waitSec passed
    GET    /v1/boxes/{id}/commands                     -> {"commands": [CommandView]}   wakes
    POST   /v1/boxes/{id}/commands/{execId}/wait       WaitCommand => CommandWait       wakes
    POST   /v1/boxes/{id}/commands/{execId}/stop       -> CommandView   wakes
    GET    /v1/boxes/{id}/commands/{execId}/output/{stdout|stderr}?offset=N             bytes, streamed; wakes
    GET    /v1/boxes/{id}/console                      -> text/plain    the serial log; never wakes
    WS     /v1/boxes/{id}/attach                       first message AttachBox (text), then binary boxd frames both ways; wakes

`=>` is an operation: the answer is `application/x-ndjson`, one Event a line: progress as it comes, `alive` at least every 5 s, and as
its last line `result` or `error`. The work belongs to the node: a client that goes away stops waiting, not the work; the same request
again joins it. `->` answers once; its errors are {"error": Problem} with a 4xx or 5xx status.

Wire names are camelCase; times are Unix seconds, sizes bytes. This module needs the standard library and pydantic only.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

BOX_ID = r"^[a-z0-9]{12}$"
BoxId = Annotated[str, StringConstraints(pattern=BOX_ID)]
ExecId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Seconds = Annotated[float, Field(ge=0, le=86_400)]


class Wire(BaseModel):
    """A value on the wire: camelCase names, unknown fields refused in requests and so told to the sender."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)

    def wire(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)


class BoxState(StrEnum):
    CLAIMED = "claimed"  # the coordinator has a record, the node does not know it yet
    STARTING = "starting"
    READY = "ready"
    FROZEN = "frozen"
    ARCHIVED = "archived"
    STOPPED = "stopped"  # deleted
    FAILED = "failed"
    UNREACHABLE = "unreachable"  # said by the coordinator: its node is lost


class Hop(StrEnum):
    """The part of the way that failed; every error names it."""

    AGENT = "agent"  # the caller's input
    COORDINATOR = "coordinator"
    NODE = "node"
    VM = "vm"
    GUEST = "guest"


class Problem(Wire):
    """An error as told to anyone: `code` is stable and documented, `remedy` says what to do next."""

    code: str
    message: str
    cause: str = ""
    remedy: str = ""
    hop: Hop = Hop.NODE


class StartBox(Wire):
    flavour: str = "core"
    size: Literal[1, 2, 4] = 1
    name: str = ""  # for people reading the node's list; the coordinator owns it


class GuestHealth(Wire):
    healthy: bool
    checked_at: float
    desktop: str = "down"
    docker: str = "absent"
    load: float = 0.0
    memory_total: int = 0
    memory_available: int = 0
    work_total: int = 0
    work_free: int = 0


class BoxView(Wire):
    id: BoxId
    name: str = ""
    state: BoxState
    flavour: str
    size: int
    generation: int
    created_at: float
    last_used_at: float
    state_since: float
    image: str  # digest
    node: str = ""  # node id
    freezes_at: float | None = None  # the next clock that will act, as things are
    archives_at: float | None = None
    deletes_at: float | None = None
    running_commands: int = 0
    cold: bool = False  # came back by a cold boot: processes of before are gone
    problem: Problem | None = None
    guest: GuestHealth | None = None
    sent_bytes: int = 0  # from the box to the world
    received_bytes: int = 0
    pid: int | None = None  # QEMU's


class Capacity(Wire):
    memory_total: int  # bytes that boxes may use
    memory_used: int  # of running boxes, overhead included
    disk_total: int
    disk_free: int
    vcpus: int  # after overcommit
    vcpus_used: int
    unit_memory: int  # bytes of one size unit
    unit_vcpus: int
    unit_work: int


class ImageView(Wire):
    flavour: str
    digest: str
    built_at: float
    bytes: int


class NodeView(Wire):
    id: str
    version: str
    pid: int
    ready: bool
    problem: Problem | None = None
    accel: Literal["kvm", "tcg", "unknown"]
    development: bool  # may boxes run on TCG here
    capacity: Capacity
    images: list[ImageView]
    boxes: list[BoxView]


class RunCommand(Wire):
    exec_id: ExecId
    cmd: Annotated[str, StringConstraints(min_length=1, max_length=256 * 1024)]
    cwd: str = "/work"
    user: str = "root"
    env: dict[str, str] = {}
    timeout_sec: Seconds | None = None
    background: bool = False
    wait_sec: Seconds = 3600.0


class OutputView(Wire):
    text_b64: str = ""  # the last 16 KB as they are; who shows them decides how to decode (report 10)
    total: int = 0
    truncated: bool = False
    dropped: int = 0
    path: str = ""


class CommandView(Wire):
    exec_id: str
    cmd: str
    cwd: str
    user: str
    background: bool
    pid: int | None
    running: bool
    started_at: float
    ended_at: float | None
    exit_code: int | None
    signal: str | None
    timed_out: bool
    end_reason: str | None
    cpu_seconds: float
    stdout: OutputView | None = None
    stderr: OutputView | None = None


class WaitCommand(Wire):
    wait_sec: Seconds = 25.0
    until: Literal["exited", "ready"] = "exited"
    ready_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    ready_log: str | None = None


class CommandWait(Wire):
    ready: bool  # what was waited for has come
    why: str
    command: CommandView | None


class UnsavedWork(Wire):
    """What a delete would lose: git work trees under /work with uncommitted or unpushed work (bounded look, `more` says it was cut)."""

    repositories: list[dict[str, Any]]  # {path, branch, uncommitted, unpushed}
    more: bool = False


class AttachBox(Wire):
    cmd: str
    cwd: str = "/work"
    user: str = "root"
    env: dict[str, str] = {}
    tty: bool = False
    cols: Annotated[int, Field(ge=1, le=1000)] = 80
    rows: Annotated[int, Field(ge=1, le=1000)] = 24


class Event(Wire):
    """A line of an operation's answer. `result` is the wire form of the model that the table above names."""

    type: Literal["progress", "alive", "result", "error"]
    message: str = ""
    fraction: float | None = None  # of the work done, when it can be told
    result: dict[str, Any] | None = None
    error: Problem | None = None


class Enrol(Wire):
    """POST /v1/fleet/enrol on the coordinator's fleet door (TLS): a node with a one-time token asks for its identity."""

    token: str
    csr: str  # PEM; the coordinator signs the public key only and chooses every name itself
    address: str  # host:port of the node's API as the coordinator reaches it


class Enrolled(Wire):
    node_id: str
    node_token: str  # bearer token of every heartbeat
    certificate: str  # PEM, for the node's API
    coordinator_ca: str  # PEM: who may call the node's API
    fleet_ca: str  # PEM: who answers at the fleet door


class Heartbeat(Wire):
    """POST /v1/fleet/heartbeat every 5 s."""

    node: NodeView
    address: str


class HeartbeatAnswer(Wire):
    certificate: str | None = None  # a renewed one, when `csr` was sent or the old one nears its end
    known: bool = True
