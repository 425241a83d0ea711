"""Where the guest's packages come from: the Debian mirror that this host itself uses, as apt reports it.

Asking apt (`apt-get indextargets`) covers both formats of its configuration, and tells a Debian archive by its signed origin, so that
other people's repositories on the host are left out.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

INDEXTARGETS = ("apt-get", "indextargets", "--format", "$(ORIGIN)|$(LABEL)|$(CODENAME)|$(REPO_URI)", "Created-By: Packages")


class NoMirrorError(Exception):
    """apt's configuration names no Debian archive that has been read."""


@dataclass(frozen=True)
class Mirror:
    main: str  # archive root, without a final slash
    security: str | None = None

    def sources(self, suite: str) -> str:
        """The one-line-style sources of the guest: what mmdebstrap reads, and what is left in the image for `apt-get update`."""
        lines = [f"deb {self.main} {suite} main", f"deb {self.main} {suite}-updates main"]
        lines += [f"deb {self.security} {suite}-security main"] if self.security else []
        return "".join(line + "\n" for line in lines)


def of_host() -> Mirror:
    """Raises NoMirrorError."""
    said = subprocess.run(INDEXTARGETS, check=False, capture_output=True, text=True)
    return derive(said.stdout)


def derive(targets: str, read: Callable[[str], str] = lambda path: Path(path).read_text()) -> Mirror:
    """The mirror in the output of INDEXTARGETS. `read` opens a list of mirrors, as Debian's cloud images have one. Raises NoMirrorError."""
    main = security = None
    for line in targets.splitlines():
        origin, label, codename, uri = (*line.split("|"), "", "", "")[:4]
        if origin != "Debian":
            continue
        if label == "Debian-Security":
            security = security or _plain(uri, read)
        elif label == "Debian" and "-" not in codename:  # not -updates, not -proposed-updates: they may lie elsewhere
            main = main or _plain(uri, read)
    if main is None:
        raise NoMirrorError("apt knows no Debian archive: run `apt-get update` and see that its sources name a Debian mirror")
    return Mirror(main, security)


def _plain(uri: str, read: Callable[[str], str]) -> str:
    """`mirror+file:/path` names a file on this host, which the guest does not have: the first mirror of its list."""
    scheme, _, path = uri.partition(":")
    if scheme == "mirror+file":
        uri = read(path.rstrip("/")).split()[0]
    return uri.rstrip("/")
