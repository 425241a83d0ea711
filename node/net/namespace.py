"""Named network namespaces, by syscalls (no child process: `ip netns` and pyroute2's netns.create cost 5-8 ms each).

A namespace lives as long as something holds it: its mount under /run/netns, a descriptor, a socket born inside. So deleting the name
alone does not free its links while a socket is open: link.delete_links() comes first.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path("/run/netns")
CLONE_NEWNET, MS_BIND, MNT_DETACH, NS_GET_NSTYPE = 0x40000000, 0x1000, 2, 0xB703

_libc = ctypes.CDLL(None, use_errno=True)
HOME = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
"""The host's namespace: the one that this process was started in."""


def _check(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextmanager
def _coming_back() -> Iterator[None]:
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        _check(_libc.setns(home, CLONE_NEWNET))  # never suppressed: the thread would go on in a box's namespace
        os.close(home)


@contextmanager
def inside(netns: int) -> Iterator[None]:
    """The calling thread works in the namespace `netns` (a descriptor): sockets and links made within are born there.

    Costs 2 us each way. No await within: another task of the thread would run in the namespace."""
    with _coming_back():
        _check(_libc.setns(netns, CLONE_NEWNET))
        yield


def create(name: str) -> int:
    """A new namespace with nothing in it but a `lo` that is down. Returns its descriptor. FileExistsError when the name is taken."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / name
    path.touch(exist_ok=False)
    try:
        with _coming_back():
            _check(_libc.unshare(CLONE_NEWNET))
            netns = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                _check(_libc.mount(b"/proc/thread-self/ns/net", bytes(path), b"none", MS_BIND, None))
            except OSError:
                os.close(netns)
                raise
    except OSError:
        path.unlink()
        raise
    return netns


def open_named(name: str) -> int | None:
    """A descriptor of the namespace, None if there is no such (a name left without its mount counts as none)."""
    try:
        netns = os.open(FOLDER / name, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if fcntl.ioctl(netns, NS_GET_NSTYPE) == CLONE_NEWNET:
            return netns
    except OSError:
        pass
    os.close(netns)
    return None


def delete(name: str) -> None:
    """Takes the name away, also while sockets inside are open. Safe to repeat."""
    path = FOLDER / name
    try:
        _check(_libc.umount2(bytes(path), MNT_DETACH))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOENT):  # not mounted, not there
            raise
    path.unlink(missing_ok=True)
