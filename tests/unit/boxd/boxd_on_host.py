"""boxd itself as tests run it on a host: the real daemon, but with a System that only writes down what it was asked to change.

Never give boxd its own System on a host: a restore would take the host's clock, name and machine-id.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from image.boxd.__main__ import main


class Notebook:
    """Every call becomes a line of JSON; the step named in `<notes>.fails` fails."""

    def __init__(self, notes: Path) -> None:
        self._notes, self._failing = notes, notes.with_suffix(".fails")

    def _note(self, step: str, value: object) -> None:
        if self._failing.exists() and self._failing.read_text() == step:
            raise OSError(5, f"{step} was told to fail")
        with self._notes.open("a") as file:
            file.write(json.dumps([step, value]) + "\n")

    def add_entropy(self, entropy: bytes) -> None:
        self._note("entropy", entropy.hex())

    def set_clock(self, realtime: float) -> None:
        self._note("clock", realtime)

    def rtc(self) -> float | None:
        return None

    def set_machine_id(self, machine_id: str) -> None:
        self._note("machine-id", machine_id)

    def set_hostname(self, hostname: str) -> None:
        self._note("hostname", hostname)

    def settle(self, *, drop_caches: bool) -> None:
        self._note("settle", drop_caches)

    def mount_work(self) -> None:
        self._note("work", None)

    def work_mounted(self) -> bool:
        return True

    def network_up(self) -> bool:
        return True


if __name__ == "__main__":
    main(sys.argv[2:], Notebook(Path(sys.argv[1])))
