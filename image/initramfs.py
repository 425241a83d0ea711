"""The first user space of a box: load the disk's driver, find the root by its label, hand over to systemd.

microvm numbers its virtio-mmio disks as it likes, so no device name is relied upon. The archive is written here and not by cpio(1), so
that the same input gives the same bytes; it is not compressed, since unpacking costs more than reading under emulation.
"""

from __future__ import annotations

import lzma
import stat
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

WAIT = 30  # seconds of uptime until the disk must be there; beyond it the guest says so and resets, which ends QEMU (-no-reboot)

SCRIPT = """#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox mount -t devtmpfs devtmpfs /dev
exec > /dev/console 2>&1
for module in {modules}; do /bin/busybox insmod /modules/$module; done
give_up() {{
    echo "initramfs: $1; block devices:"
    /bin/busybox cat /proc/partitions
    /bin/busybox reboot -f
}}
until root=$(/bin/busybox findfs LABEL={label} 2>/dev/null); do
    read -r uptime rest < /proc/uptime
    [ "${{uptime%.*}}" -lt {wait} ] || give_up "no file system labelled {label} after {wait} s"
    /bin/busybox sleep 0.05
done
/bin/busybox mount -t ext4 -o noatime "$root" /root || give_up "$root cannot be mounted"
exec /bin/busybox switch_root /root /lib/systemd/systemd
"""


def script(modules: Iterable[str], label: str) -> bytes:
    return SCRIPT.format(modules=" ".join(modules), label=label, wait=WAIT).encode()


def build(root: Path, kernel: str, modules: Iterable[str], label: str) -> bytes:
    """A newc archive from the unpacked file system `root`: its busybox-static, and `modules` with all they need of kernel `kernel`.

    Raises LookupError when a module is neither there nor built in.
    """
    tree = root / "usr/lib/modules" / kernel
    files = load_order(tree.joinpath("modules.dep").read_text(), tree.joinpath("modules.builtin").read_text(), modules)
    names = {path: Path(path).name.split(".ko")[0] + ".ko" for path in files}
    entries = [Entry(folder, stat.S_IFDIR | 0o755) for folder in ("bin", "dev", "modules", "proc", "root", "sys")]
    entries += [
        Entry("bin/busybox", stat.S_IFREG | 0o755, (root / "usr/bin/busybox").read_bytes()),
        Entry("init", stat.S_IFREG | 0o755, script(names.values(), label)),
        *(Entry(f"modules/{name}", stat.S_IFREG | 0o644, _unpacked(tree / path)) for path, name in names.items()),
    ]
    return archive(entries)


def load_order(dependencies: str, built_in: str, wanted: Iterable[str]) -> list[str]:
    """The files to load, each after those it needs; `dependencies` and `built_in` are a kernel's modules.dep and modules.builtin."""
    needs = {file: rest.split() for file, _, rest in (line.partition(":") for line in dependencies.splitlines())}
    by_name = {_name(file): file for file in needs}
    builtin = {_name(file) for file in built_in.split()}
    order: list[str] = []
    for module in wanted:
        if module in builtin:
            continue
        if module not in by_name:
            raise LookupError(f"the kernel has no module {module}")
        # modules.dep lists all that a module needs, the deepest last
        order += [file for file in (*reversed(needs[by_name[module]]), by_name[module]) if file not in order]
    return order


def _name(file: str) -> str:
    return Path(file).name.split(".ko")[0].replace("-", "_")


def _unpacked(path: Path) -> bytes:
    if path.suffix == ".xz":
        return lzma.decompress(path.read_bytes())
    if path.suffix == ".zst":
        return subprocess.run(["zstd", "-dcq", path], check=True, capture_output=True).stdout
    return path.read_bytes()


@dataclass(frozen=True)
class Entry:
    name: str
    mode: int
    data: bytes = b""


def archive(entries: Iterable[Entry]) -> bytes:
    """The kernel's initramfs format (cpio newc): a header of hex fields, the name, the data, each padded to four bytes."""
    out = bytearray()
    for number, entry in enumerate((*entries, Entry("TRAILER!!!", 0)), start=1):
        name = entry.name.encode() + b"\0"
        # inode, mode, uid, gid, links, time, size, four of devices, the name's length, checksum
        fields = (number, entry.mode, 0, 0, 1, 0, len(entry.data), 0, 0, 0, 0, len(name), 0)
        out += b"070701" + b"".join(b"%08X" % field for field in fields)
        for part in (name, entry.data):
            out += part
            out += bytes(-len(out) % 4)
    return bytes(out)
