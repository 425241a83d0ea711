"""API keys: `psbx_` and 43 random characters. The database holds their SHA-256 only: there is nothing to guess in 256 random bits,
so a slow hash would cost every call and protect nothing."""

from __future__ import annotations

import hashlib
import secrets

from coordinator.clock import Clock
from coordinator.store import keys as table
from coordinator.store.database import Database
from coordinator.store.keys import Key

PREFIX = "psbx_"
MAIN_ACCOUNT = "main"
CACHED_FOR = 30.0  # s that a good key is believed without the database, but for revocations made here, which count at once
CACHED_KEYS = 1024


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


class Keys:
    """Makes, verifies and revokes keys. A lookup by hash tells nothing through its timing about a key that it does not find."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._cache: dict[str, tuple[Key, float]] = {}

    async def create(self, name: str, account: str = MAIN_ACCOUNT) -> tuple[str, Key]:
        """A new key in the clear, never to be had again, and its record."""
        secret = PREFIX + secrets.token_urlsafe(32)
        return secret, await self._database.run(table.add, digest=digest(secret), name=name, account=account, now=self._clock())

    async def verify(self, secret: str) -> Key | None:
        """The key's record, or None for one that is unknown or revoked."""
        if not secret.startswith(PREFIX) or len(secret) > 128:
            return None
        hashed, now = digest(secret), self._clock()
        cached = self._cache.get(hashed)
        if cached and now - cached[1] < CACHED_FOR:
            return cached[0]
        key = await self._database.run(table.find, hashed, now)
        self._cache.pop(hashed, None)
        if key:
            if len(self._cache) >= CACHED_KEYS:
                self._cache.pop(next(iter(self._cache)))
            self._cache[hashed] = key, now
        return key

    async def every(self) -> list[Key]:
        return await self._database.run(table.every)

    async def revoke(self, name: str) -> int:
        """Revokes all keys of that name, from this moment on; how many there were."""
        count = await self._database.run(table.revoke, name, self._clock())
        self._cache.clear()
        return count


def bearer(authorization: str | None) -> str:
    """The token of an Authorization header, or an empty text."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
