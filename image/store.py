"""The images on this host: one folder each, `<flavour>-<digest>`, complete as soon as it is there (build.py renames it into place).

    disk.raw       the root file system, ext4, sparse, read-only for ever: boxes have overlays over it
    vmlinuz        kernel
    initrd         initramfs
    manifest.json  what it is
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ImageInUseError(Exception):
    """Boxes or templates still need the image; the message says which."""


class ImageNotFoundError(LookupError):
    """No image of that digest."""


@dataclass(frozen=True)
class StoredImage:
    flavour: str
    digest: str  # 12 hex digits
    folder: Path
    built_at: float  # Unix seconds
    bytes: int  # on disk, holes not counted
    manifest: dict[str, Any]  # {"flavour", "digest", "built_at", "suite", "kernel", "sizes", "packages", "powershell"}

    @property
    def disk(self) -> Path:
        return self.folder / "disk.raw"

    @property
    def kernel(self) -> Path:
        return self.folder / "vmlinuz"

    @property
    def initrd(self) -> Path:
        return self.folder / "initrd"


Images = list[StoredImage]  # `list` is a method below


@dataclass(frozen=True)
class ImageStore:
    """Reads the folder at each call: a build by another process is seen at once. Blocking, milliseconds."""

    folder: Path

    def list(self) -> Images:
        """All complete images, the newest first. A folder that cannot be read as an image is not one."""
        found = [image for path in self.folder.glob("*-*/manifest.json") if (image := _read(path))]
        return sorted(found, key=lambda image: image.built_at, reverse=True)

    def find(self, flavour: str, *, prefer: str | None = None) -> StoredImage | None:
        """The image of digest `prefer` (that of the current recipe, when the caller knows it), else the flavour's newest."""
        images = [image for image in self.list() if image.flavour == flavour]
        return next((image for image in images if image.digest == prefer), images[0] if images else None)

    def show(self, digest: str) -> StoredImage:
        """Raises ImageNotFoundError."""
        for image in self.list():
            if image.digest == digest:
                return image
        raise ImageNotFoundError(f"no image {digest} in {self.folder}")

    def remove(self, digest: str, users: Callable[[str], Sequence[str]]) -> StoredImage:
        """Deletes an image. `users(digest)` names what still needs it: then ImageInUseError. Raises ImageNotFoundError."""
        image = self.show(digest)
        if needed := users(digest):
            raise ImageInUseError(f"image {digest} is needed by {', '.join(needed)}")
        (image.folder / "manifest.json").unlink()  # from here on it is no image, even if the rest is interrupted
        shutil.rmtree(image.folder)
        return image


def describe_powershell(image: StoredImage) -> str:
    return "PowerShell: in this image" if image.manifest.get("powershell") else "PowerShell: not in this image"


def _read(manifest: Path) -> StoredImage | None:
    try:
        told = json.loads(manifest.read_bytes())
        on_disk = sum(path.stat().st_blocks * 512 for path in manifest.parent.iterdir())
        return StoredImage(str(told["flavour"]), str(told["digest"]), manifest.parent, float(told["built_at"]), on_disk, told)
    except (OSError, ValueError, KeyError, TypeError):
        return None
