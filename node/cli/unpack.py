"""Unpacks what a box packed. The archive is the guest's, so hostile, and we are root: it may make folders, files and links under the one
name asked for, and nothing else.

A link is made as it is, wherever it points (projects hold absolute ones), but nothing is ever written *through* a link, be it of this
archive or one that lay there before. No devices, no set-uid bits, no owners.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO

from node.cli.failure import Failure

PERMISSIONS = 0o777


def unpack(archive: IO[bytes], folder: Path, name: str, counted: Callable[[int], None] = lambda _: None) -> int:
    """Unpacks the archive, whose members lie under one top name, as `folder/name`; the number of files. `counted` hears of their bytes.

    Raises Failure for an archive that is damaged or reaches elsewhere; what was unpacked before stays.
    """
    files = 0
    try:
        with tarfile.open(fileobj=archive, mode="r|") as members:
            members.extraction_filter = staticmethod(lambda member, _: member)
            for member in members:
                if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
                    continue
                _rename(member, name)
                _make_way(member, folder)
                members.extract(member, folder)
                files += not member.isdir()
                counted(member.size)
    except tarfile.TarError as error:
        raise Failure("the box sent an archive that cannot be read", cause=str(error)) from error
    return files


def _rename(member: tarfile.TarInfo, name: str) -> None:
    """Puts `name` where the archive's top name was, and takes away what only root could give."""
    member.name = _under(member.name, name)
    if member.islnk():
        member.linkname = _under(member.linkname, name)
    member.mode = (member.mode & PERMISSIONS) | (0o700 if member.isdir() else 0)
    member.uid = member.gid = 0
    member.uname = member.gname = ""


def _under(path: str, name: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts:
        raise Failure("the box sent an archive that reaches outside of its folder", cause=path)
    return str(PurePosixPath(name, *parts[1:]))


def _make_way(member: tarfile.TarInfo, folder: Path) -> None:
    """Refuses a path that leads through a link, and removes what a file or link would be written into."""
    paths = [member.name, member.linkname] if member.islnk() else [member.name]
    for path in paths:
        parents = list(PurePosixPath(path).parents)[:-1]
        if crossed := next((parent for parent in parents if (folder / parent).is_symlink()), None):
            raise Failure("the box sent a file that lies behind a link", cause=f"{path} lies behind {crossed}")
    target = folder / member.name
    if target.is_symlink() or (target.exists() and not member.isdir() and not target.is_dir()):
        target.unlink()
