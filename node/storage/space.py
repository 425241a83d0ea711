"""How much room there is, and how much things take: real blocks, not lengths (disks and RAM files are sparse)."""

from __future__ import annotations

import os
from pathlib import Path

BLOCK = 512  # the unit of st_blocks, whatever the file system's own


def free_bytes(folder: Path) -> int:
    """What an unprivileged process could still write under `folder`."""
    figures = os.statvfs(folder)
    return figures.f_bavail * figures.f_frsize


def total_bytes(folder: Path) -> int:
    figures = os.statvfs(folder)
    return figures.f_blocks * figures.f_frsize


def allocated_bytes(path: Path) -> int:
    """Of a file, or of all that lies in a folder; 0 for what is not there (it may vanish meanwhile). Links are not followed."""
    try:
        with os.scandir(path) as entries:
            return sum(allocated_bytes(Path(entry)) for entry in entries)
    except NotADirectoryError:
        return os.lstat(path).st_blocks * BLOCK
    except FileNotFoundError:
        return 0
