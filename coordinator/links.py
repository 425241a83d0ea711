"""Signed links to a command's whole output: `outputUrl` is fetched without an Authorization header (CONTRACT 2.5).

The key is kept for good, so that a restart breaks no link; a link names one stream of one command and ends by itself.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlencode

from coordinator.clock import Clock

Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True)
class OutputLinks:
    key: bytes
    public_url: str
    valid: float  # s
    clock: Clock

    @classmethod
    def load(cls, path: Path, *, public_url: str, valid: float, clock: Clock) -> OutputLinks:
        """With the key of that file, made at its first use (0600)."""
        if not path.exists():
            fresh = path.with_name(f".{path.name}.{os.getpid()}")
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
                os.fsync(file.fileno())
            fresh.replace(path)
        return cls(path.read_bytes(), public_url, valid, clock)

    def url(self, box: str, exec_id: str, stream: Stream) -> str:
        expires = int(self.clock() + self.valid)
        query = urlencode({"expires": expires, "sig": self._sign(box, exec_id, stream, expires)})
        return f"{self.public_url}/v1/boxes/{box}/outputs/{exec_id}/{stream}?{query}"

    def opens(self, box: str, exec_id: str, stream: str, expires: str, sig: str) -> bool:
        """Whether this link was made here and has not ended."""
        if not expires.isascii() or not expires.isdigit() or len(expires) > 12 or not sig.isascii():
            return False
        right = self._sign(box, exec_id, stream, int(expires))
        return hmac.compare_digest(right, sig) and self.clock() < int(expires)

    def _sign(self, box: str, exec_id: str, stream: str, expires: int) -> str:
        return hmac.new(self.key, f"{box}/{exec_id}/{stream}/{expires}".encode(), hashlib.sha256).hexdigest()
