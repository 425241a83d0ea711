"""What is in a box's image: all of it is said here and in the plain files under image/files/<flavour>/.

A root file system is Debian's packages, then the files, then SETUP; its digest names it. An image's digest adds boxd and the
initramfs. Neither the mirror nor a date is part of a digest: the same recipe is the same image.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FORMAT = 1  # of the built folder; a change makes every image a new one
SUITE = "trixie"
KERNEL = "linux-image-cloud-amd64"
ROOT_LABEL = "boxroot"  # the initramfs finds the disk by it
MODULES = ("virtio_mmio", "virtio_blk")  # to reach the disk; ext4 is built in, the guest loads the rest (etc/modules-load.d)

HERE = Path(__file__).parent
FILES = HERE / "files"
BOXD = HERE / "boxd"

CORE = f"""
    {KERNEL} systemd systemd-sysv udev kmod busybox-static libnss-myhostname
    bash coreutils findutils grep sed gawk tar gzip xz-utils zstd unzip zip less file procps psmisc lsof
    iproute2 iptables iputils-ping ca-certificates curl wget openssl sudo git openssh-client rsync jq
    python3 nodejs
    xvfb xauth openbox xterm x11-utils fonts-dejavu-core
""".split()

FULL = f"""
    {" ".join(CORE)}
    docker.io docker-cli docker-compose docker-buildx nftables
    build-essential pkg-config golang npm php-cli php-curl php-mbstring php-xml php-sqlite3 python3-pip python3-venv python3-dev
    chromium ffmpeg fonts-noto-cjk fonts-noto-color-emoji xdotool xclip imagemagick dbus
    ripgrep sqlite3 strace vim-tiny
""".split()

# Left out of every package: nobody reads manuals in a box, and a smaller image is a quicker build.
WITHOUT = ("/usr/share/man/*", "/usr/share/info/*", "/usr/share/doc/*", "/usr/share/lintian/*", "/usr/share/locale/*")
WITHIN = ("/usr/share/doc/*/copyright",)

# Units that a preset cannot turn off.
MASKED = (
    "tmp.mount",  # /tmp would be RAM
    "systemd-tmpfiles-clean.timer",  # files in /tmp are the agent's to delete
    "getty-static.service",  # nobody logs in
    "serial-getty@ttyS0.service",
    "systemd-random-seed.service",  # every box of a template would have that seed
    "systemd-journal-flush.service",  # the journal is volatile
)

# Run in the new root, in order, when all files are in place.
SETUP = (
    ("useradd", "--create-home", "--shell", "/bin/bash", "--groups", "sudo", "tester"),
    ("ln", "-sf", "/usr/share/zoneinfo/UTC", "/etc/localtime"),
    ("chmod", "0440", "/etc/sudoers.d/tester"),
    ("mkdir", "-p", "/work"),
    ("systemctl", "preset-all"),  # etc/systemd/system-preset says what runs at boot
    ("systemctl", "mask", *MASKED),
    ("find", "/var/lib/apt/lists", "/var/cache/apt", "/var/log", "-type", "f", "-delete"),
    # Empty: systemd makes one at boot without taking that for the first boot ever; the node gives each box its own.
    ("truncate", "--size=0", "/etc/machine-id"),
    # Else the first boot takes /usr for just upgraded: ldconfig, the journal's catalogue and sysusers cost seconds under emulation.
    ("touch", "/etc/.updated", "/var/.updated"),
)


@dataclass(frozen=True)
class Flavour:
    name: str
    packages: tuple[str, ...]
    files: tuple[str, ...]  # folders under FILES, laid over each other
    disk: int  # bytes of the root file system, most of them a hole
    installed: int  # about how many packages that becomes: for the progress bar only
    minutes: int  # about, on two cores and a quick mirror
    gigabytes: float  # on the host's disk when done, the cached root included


FLAVOURS = {
    flavour.name: flavour
    for flavour in (
        Flavour("core", tuple(CORE), ("core",), disk=4 << 30, installed=340, minutes=2, gigabytes=2.0),
        Flavour("full", tuple(FULL), ("core", "full"), disk=16 << 30, installed=950, minutes=4, gigabytes=7.0),
    )
}


@dataclass(frozen=True)
class Settings:
    """The `[image]` table of the configuration."""

    powershell_source: str = ""  # path of a .deb or .tar.gz on this host; empty: no PowerShell in the image


def root_digest(flavour: Flavour, settings: Settings) -> str:
    """64 hex digits that name the root file system of this recipe. OSError when the PowerShell source cannot be read."""
    powershell = _of_file(Path(settings.powershell_source)) if settings.powershell_source else ""
    recipe = [FORMAT, SUITE, flavour.packages, flavour.disk, WITHOUT, WITHIN, SETUP, powershell]
    return _of([json.dumps(recipe, sort_keys=True).encode(), *_tree(files_of(flavour))])


def image_digest(flavour: Flavour, settings: Settings, initramfs: bytes) -> str:
    """12 hex digits that name the image: its root, boxd, and `initramfs` (the text of its script)."""
    boxd = [(str(path.relative_to(BOXD)), path) for path in sorted(BOXD.rglob("*.py"))]
    return _of([root_digest(flavour, settings).encode(), json.dumps(MODULES).encode(), initramfs, *_tree(boxd)])[:12]


def files_of(flavour: Flavour) -> list[tuple[str, Path]]:
    """The flavour's plain files: path inside the image (relative), path here. A later folder replaces an earlier one's file."""
    found = {
        str(path.relative_to(FILES / folder)): path
        for folder in flavour.files
        for path in sorted((FILES / folder).rglob("*"))
        if path.is_file()
    }
    return sorted(found.items())


def _tree(files: list[tuple[str, Path]]) -> Iterator[bytes]:
    for name, path in files:
        yield name.encode()
        yield path.read_bytes()


def _of(parts: list[bytes]) -> str:
    """One digest of several parts, each with its length, so that no two lists of parts look alike."""
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "big"))
        state.update(part)
    return state.hexdigest()


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
