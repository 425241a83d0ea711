"""Conversations: who is calling, and whether they are still there.

A conversation is X-Psbx-Agent; without that header the MCP session; without either the key and the client's name (plain HTTP).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from coordinator.clock import Clock
from coordinator.config import Presence as Periods
from coordinator.errors import BadInput
from coordinator.store import conversations as table
from coordinator.store.conversations import Presence
from coordinator.store.database import Database

AgentState = Literal["working", "away", "left", "idle"]
AGENT = re.compile(r"[A-Za-z0-9_-]{1,64}")
REMEMBERED = 7 * 86_400.0  # s
SAVED_EVERY = 20.0  # s: presence is written at most so often, so that a call need not wait for the disk
MOST = 10_000  # conversations in memory; the one longest silent goes first


def identify(*, agent: str | None, session: str | None, key_name: str, client: str | None) -> str:
    """The conversation's name. Raises BadInput for an X-Psbx-Agent that is not [A-Za-z0-9_-]{1,64}."""
    if agent:
        if not AGENT.fullmatch(agent):
            raise BadInput("X-Psbx-Agent must be 1 to 64 of A-Z a-z 0-9 _ -")
        return agent
    if session:
        return f"session:{session[:128]}"
    return f"key:{key_name}/{(client or '').partition('/')[0][:64]}"


def client_label(spoken: str | None) -> str | None:
    """A client's name as it may be kept and shown. It is the client's word: what cannot be printed or stored falls out of it."""
    return "".join(filter(str.isprintable, spoken or ""))[:100] or None


def agent_state(presence: Presence | None, *, calls: int, now: float, periods: Periods) -> AgentState:
    """working: a call runs or one ended just now. away: still there, but silent. left: said so, or its heartbeat stopped.
    idle: no call for an hour. A client that never sent a heartbeat cannot be told from one that thinks, so it never counts as gone."""
    if calls:
        return "working"
    if presence is None:
        return "left"
    called, beat = presence.last_call_at or 0.0, presence.heartbeat_at or 0.0
    if presence.left_at and presence.left_at >= max(called, beat):
        return "left"
    if now - called < periods.silent:
        return "working"
    if presence.heartbeat_at and now - beat >= periods.silent:
        return "left"
    return "idle" if now - max(called, 0.0) >= periods.idle else "away"


class Conversations:
    """Signs of life, in memory and, a little behind, in the database."""

    def __init__(self, database: Database, periods: Periods, clock: Clock) -> None:
        self._database, self._periods, self._clock = database, periods, clock
        self._known: dict[tuple[str, str], Presence] = {}
        self._saved_at: dict[tuple[str, str], float] = {}
        self._calls: Counter[tuple[str, str]] = Counter()

    async def load(self) -> None:
        for presence in await self._database.run(table.heard_since, self._clock() - REMEMBERED):
            self._known[presence.account, presence.id] = presence

    async def heartbeat(self, account: str, conversation: str, client: str | None) -> None:
        await self._heard(account, conversation, client, heartbeat_at=self._clock())

    async def leave(self, account: str, conversation: str) -> None:
        await self._heard(account, conversation, None, at_once=True, left_at=self._clock())

    async def called(self, account: str, conversation: str, client: str | None) -> None:
        """A call came."""
        await self._heard(account, conversation, client, last_call_at=self._clock())

    @contextmanager
    def calling(self, account: str, conversation: str) -> Iterator[None]:
        """While the body runs, the conversation is working."""
        name = account, conversation
        self._calls[name] += 1
        try:
            yield
        finally:
            self._calls[name] -= 1
            if not self._calls[name]:
                del self._calls[name]
            if name in self._known:
                self._known[name] = replace(self._known[name], last_call_at=self._clock())

    def state(self, account: str, conversation: str) -> AgentState:
        name = account, conversation
        return agent_state(self._known.get(name), calls=self._calls[name], now=self._clock(), periods=self._periods)

    async def _heard(
        self, account: str, conversation: str, client: str | None, *, at_once: bool = False, **signs: Any
    ) -> None:
        name, now = (account, conversation), self._clock()
        presence = self._known.pop(name, None) or Presence(account, conversation)
        self._known[name] = presence = replace(presence, client=client or presence.client, **signs)
        while len(self._known) > MOST:  # the dict is in order of the last sign of life
            gone = next(iter(self._known))
            del self._known[gone]
            self._saved_at.pop(gone, None)
        if at_once or now - self._saved_at.get(name, 0.0) >= SAVED_EVERY:
            self._saved_at[name] = now
            await self._database.run(table.save, presence)
