"""What is on disk about each box: one JSON file a box, written atomically; the truth about VMs (DESIGN journey 5).

A record names everything that a restarted daemon needs to find the box again. It holds the box's current bearer token, so the folder is
0700 and the files 0600. `durable=True` reaches the disk before it returns; without it a crash of the host may bring back the record before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from node.errors import StorageError
from node.protocol import BoxState


@dataclass(frozen=True)
class BoxRecord:
    id: str
    name: str
    state: BoxState
    flavour: str
    size: int
    image: str  # digest
    template: str  # name of the template it started from
    machine_id: str
    hostname: str
    created_at: float
    state_since: float
    last_call_at: float
    last_url_at: float = 0.0
    generation: int = 0
    token: str = field(default="", repr=False)
    x_cookie: str = field(default="", repr=False)  # of the box's display, 32 hex digits
    cold: bool = False
    pid: int | None = None
    pid_started: int = 0  # clock ticks since boot, from /proc/<pid>/stat: tells a recycled pid
    sent_bytes: int = 0  # of networks that are gone
    received_bytes: int = 0
    problem: dict[str, Any] | None = None


class Journal:
    """The folder of records. Methods block for one small write; `durable` ones for an fsync."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, record: BoxRecord, *, durable: bool = False) -> None:
        path = self.folder / f"{record.id}.json"
        new = path.with_suffix(".new")
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump(asdict(record), file)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            new.replace(path)
            if durable:
                self._sync_folder()
        except OSError as error:
            raise StorageError(f"the journal of box {record.id} could not be written", cause=str(error)) from error

    def remove(self, box: str) -> None:
        (self.folder / f"{box}.json").unlink(missing_ok=True)
        self._sync_folder()

    def load(self) -> Iterator[BoxRecord]:
        """Every readable record. One that is not is set aside as `<id>.unreadable`, never deleted: a person may still want to see it."""
        for path in sorted(self.folder.glob("*.json")):
            try:
                yield read_record(json.loads(path.read_text()))
            except (ValueError, TypeError, KeyError):
                path.replace(path.with_suffix(".unreadable"))

    def _sync_folder(self) -> None:
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_record(data: dict[str, Any]) -> BoxRecord:
    """A record of this or an older version: fields that this version does not know are left out, missing ones take their default."""
    known = {f.name for f in fields(BoxRecord)}
    values = {name: value for name, value in data.items() if name in known}
    values["state"] = BoxState(values["state"])
    return BoxRecord(**values)
