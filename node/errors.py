"""The node's errors, one tree:

    NodeError                 what any caller of the node may see; carries a Problem
     ├── BadRequest           the caller's input; names the field and the fix
     ├── BoxNotFound          no such box on this node
     ├── BoxConflict          the box is in a state in which that cannot be done
     ├── NoCapacity           memory, CPUs, disk or a limit; with figures
     ├── ImageMissing         the flavour has not been built here
     ├── NetworkError         namespace, links, rules
     ├── StorageError         disks, RAM files, space
     ├── VmError              QEMU and its monitor
     │    └── SnapshotIncompatible   saved by another bundle, machine or CPU: a cold start is the way on
     └── GuestError           boxd: silent, slow, or not making sense
          └── GuestTimeout

A lower layer's errors are translated at its border (`raise VmError(...) from error`), so nothing above needs to know them.
"""

from __future__ import annotations

from node.protocol import Hop, Problem


class NodeError(Exception):
    """`code` is stable and documented in docs/errors.md; `status` is the HTTP status that carries it."""

    code = "node_error"
    status = 500
    hop = Hop.NODE
    remedy = "Run `boxctl doctor` on the host and read the node's log."

    def __init__(self, message: str, *, cause: str = "", remedy: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code or self.code
        self.problem = Problem(code=self.code, message=message, cause=cause, remedy=self.remedy if remedy is None else remedy, hop=self.hop)


class BadRequest(NodeError):
    code = "bad_request"
    status = 400
    hop = Hop.AGENT
    remedy = "Correct the named field and call again."


class BoxNotFound(NodeError):
    code = "box_not_found"
    status = 404
    remedy = "List the boxes to see which exist."


class BoxConflict(NodeError):
    code = "box_conflict"
    status = 409
    remedy = "Look at the box's state and choose what fits it."


class NoCapacity(NodeError):
    code = "no_capacity"
    status = 429
    remedy = "Stop or freeze a box, or come back in about 5 minutes."


class ImageMissing(NodeError):
    code = "image_missing"
    status = 409
    remedy = "Build it on the host: `boxctl image build <flavour>`."


class NetworkError(NodeError):
    code = "network_failed"


class StorageError(NodeError):
    code = "storage_failed"
    remedy = "See that the state folder is writable and has space: `boxctl doctor`."


class VmError(NodeError):
    code = "vm_failed"
    hop = Hop.VM
    remedy = "Read the box's console (`boxctl box console ID`) and start it again."


class SnapshotIncompatible(VmError):
    code = "snapshot_incompatible"
    remedy = "The box comes back by a cold boot from its disk; processes of before are gone."


class GuestError(NodeError):
    code = "guest_failed"
    status = 502
    hop = Hop.GUEST
    remedy = "Call again in a few seconds. If it stays, stop the box: its disk is kept, and the next call boots it anew."


class GuestTimeout(GuestError):
    code = "guest_timeout"
    status = 504
