"""The nodes: how they join, what they last said, and which of them are silent.

A node's journal is the truth about its VMs; the database is the truth about people. Each heartbeat brings the node's list of boxes, which
replaces what is believed here. Boxes of a node that the database does not know are reported as orphans, never destroyed: they may be
someone's work, and an empty database is no reason to delete it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import trio

from coordinator.certificates import Authority
from coordinator.clock import Clock
from coordinator.config import CoordinatorConfig
from coordinator.errors import BoxGone, NodeUnreachable, Unauthorised
from coordinator.keys import digest
from coordinator.node_client import Node
from coordinator.placement import Candidate
from coordinator.store import boxes as boxes_table
from coordinator.store import nodes as table
from coordinator.store.database import Database
from coordinator.store.nodes import NodeRecord
from node.protocol import BoxState, BoxView, Enrol, Enrolled, Heartbeat, HeartbeatAnswer, NodeView
from tools.context import ToolError

Connect = Callable[[str, str], Node]  # node id, address -> its client

log = logging.getLogger("boxfleet.fleet")

HEARTBEAT = 5.0  # s between a node's heartbeats
LOOK_AGAIN = 3.0  # s
TRANSIT = 2.0  # s that a heartbeat may have been on its way
TOKEN_VALID = 3600.0  # s
SETTLING = 15.0  # s in which a heartbeat may be older than what an operation has just told


@dataclass
class Member:
    """One node as known here; only Fleet changes it."""

    record: NodeRecord
    client: Node
    heard_at: float
    view: NodeView | None = None  # None until the first heartbeat after a restart
    viewed_at: float = 0.0  # when the view was asked for or came
    boxes: dict[str, BoxView] = field(default_factory=dict)
    told_silent: bool = False


@dataclass(frozen=True)
class Whereabouts:
    """What is known of the node of a box."""

    silent_for: float | None  # s; None while the node is heard
    heard: bool  # it has sent its list of boxes since the coordinator started
    view: BoxView | None


class Fleet:
    def __init__(self, database: Database, config: CoordinatorConfig, authority: Authority, connect: Connect, clock: Clock) -> None:
        self._database, self._config, self._authority, self._connect, self._clock = database, config, authority, connect, clock
        self._members: dict[str, Member] = {}
        self._by_token: dict[str, str] = {}
        self._placed: set[tuple[str, str]] = set()
        self._changed = trio.Event()

    async def load(self) -> None:
        """Every enrolled node, given the benefit of the doubt until its heartbeats have been missing for long enough."""
        for record in await self._database.run(table.every):
            self._admit(record)

    @property
    def ca(self) -> str:
        """PEM: by this a node knows the fleet door at its first visit."""
        return self._authority.coordinator.pem

    async def create_token(self, name: str) -> tuple[str, float]:
        """A one-time token with which one node may enrol, and when it ends."""
        token, now = f"bfn_{secrets.token_urlsafe(32)}", self._clock()
        expires_at = now + TOKEN_VALID
        await self._database.run(table.add_token, digest=digest(token), name=name, now=now, expires_at=expires_at)
        return token, expires_at

    async def enrol(self, request: Enrol) -> Enrolled:
        """A node's identity for a one-time token. Raises Unauthorised, or BadInput for a bad csr (which does not spend the token)."""
        now, spent = self._clock(), digest(request.token)
        name = await self._database.run(table.token_name, spent, now)
        if name is None:
            raise Unauthorised("The enrolment token is unknown, used or too old", remedy="Make another: `boxctl node token`.")
        node, token = f"node-{secrets.token_hex(4)}", secrets.token_urlsafe(32)
        certificate = await trio.to_thread.run_sync(self._authority.sign_node, node, request.csr)
        record = NodeRecord(node, name, digest(token), request.address, certificate, now, now)
        if not await self._database.run(table.enrol, spent, record):
            raise Unauthorised("The enrolment token was used by another node", remedy="Make another: `boxctl node token`.")
        self._admit(record)
        log.info("node %s enrolled as %s at %s", name, node, request.address)
        return Enrolled(node_id=node, node_token=token, certificate=certificate, coordinator_ca=self.ca, fleet_ca=self.ca)

    async def heartbeat(self, token: str, beat: Heartbeat) -> HeartbeatAnswer:
        """Takes a node's word about itself. Raises Unauthorised for the token of no node, or of another one."""
        node = self._by_token.get(digest(token))
        if node is None or beat.node.id != node:
            raise Unauthorised("This node is not of the fleet (any more)", remedy="Enrol it with a new token: `boxctl node token`.")
        member, now = self._members[node], self._clock()
        renewed = await trio.to_thread.run_sync(self._authority.renewed_node, node, member.record.certificate)
        if renewed or beat.address != member.record.address or now - member.record.seen_at > 60.0:
            certificate = renewed or member.record.certificate
            member.record = replace(member.record, address=beat.address, certificate=certificate, seen_at=now)
            member.client = self._connect(node, beat.address)
            await self._database.run(table.seen, node, address=beat.address, certificate=certificate, now=now)
        if member.told_silent:
            log.info("node %s is back", node)
        before = {box.id: box.state for box in member.view.boxes} if member.view else None
        member.heard_at, member.view, member.viewed_at, member.told_silent = now, beat.node, now - TRANSIT, False
        member.boxes = _merged(member.boxes, beat.node.boxes, now)
        if before != {box.id: box.state for box in beat.node.boxes}:
            await self._database.run(boxes_table.observe, node, beat.node.boxes, now)
        self._placed = await self._database.run(boxes_table.placed)
        self._tell_change()
        return HeartbeatAnswer(certificate=renewed)

    async def look_again(self) -> None:
        """Asks every node that is heard what it has now; one that is slow keeps the word of its last heartbeat."""

        async def ask(member: Member) -> None:
            with trio.move_on_after(LOOK_AGAIN), suppress(ToolError):
                asked_at = self._clock()
                member.view = await member.client.view()
                member.viewed_at = asked_at

        async with trio.open_nursery() as nursery:
            for member in self._members.values():
                if member.view and self.silent_for(member) is None:
                    nursery.start_soon(ask, member)

    async def watch(self) -> None:
        """Notices silent nodes and renews the coordinator's certificates, for as long as it runs."""
        renewed_at = self._clock()
        while True:
            await trio.sleep(HEARTBEAT)
            for member in self._members.values():
                if not member.told_silent and self.silent_for(member) is not None:
                    member.told_silent = True
                    log.warning("node %s is silent: its boxes are unreachable", member.record.id)
            if self._clock() - renewed_at > 86_400.0:
                renewed_at = self._clock()
                await trio.to_thread.run_sync(self._authority.renew)

    async def remove(self, node: str) -> bool:
        """Forgets a node; its token and its boxes' way are gone, its VMs are not touched."""
        member = self._members.pop(node, None)
        if member:
            self._by_token.pop(member.record.digest, None)
        return await self._database.run(table.remove, node)

    def silent_for(self, member: Member) -> float | None:
        """How long nothing was heard of a node that has missed too many heartbeats, else None."""
        silence = self._clock() - member.heard_at
        return silence if silence > HEARTBEAT * self._config.heartbeat_misses + 1.0 else None

    def members(self) -> list[Member]:
        return list(self._members.values())

    def state(self, member: Member) -> str:
        if self.silent_for(member) is not None:
            return "unreachable"
        return "ready" if member.view and member.view.ready else "not_ready"

    async def settled(self) -> None:
        """Waits, after a restart, until every node was heard or has missed a heartbeat: before, nobody knows what room there is."""
        with trio.move_on_after(HEARTBEAT + 2.0):
            while any(m.view is None and self.silent_for(m) is None for m in self._members.values()):
                await self.change()

    def candidates(self) -> list[Candidate]:
        """The nodes that are heard, for placement."""
        return [Candidate(m.view) for m in self._members.values() if m.view and self.silent_for(m) is None]

    def viewed_at(self) -> float:
        """All candidates' views are at least as young as this: what began later may not be counted in them."""
        return min((m.viewed_at for m in self._members.values() if m.view and self.silent_for(m) is None), default=0.0)

    def client(self, node: str | None) -> Node:
        """The node's client. Raises NodeUnreachable at once when it is silent (report 63), BoxGone when it was removed (report 68)."""
        member = self._members.get(node or "")
        if member is None:
            raise BoxGone("The node of this box was removed from the fleet")
        silence = self.silent_for(member)
        if silence is not None:
            raise NodeUnreachable(f"Node {node} has not been heard of for {silence:.0f} s", cause=self._grace(silence))
        return member.client

    def whereabouts(self, node: str | None, box: str) -> Whereabouts | None:
        """None: the node is not of this fleet (any more)."""
        member = self._members.get(node or "")
        if member is None:
            return None
        return Whereabouts(self.silent_for(member), member.view is not None, member.boxes.get(box))

    def noticed(self, node: str, view: BoxView) -> None:
        """An operation has told how a box is now."""
        if member := self._members.get(node):
            member.boxes[view.id] = view

    def forget(self, node: str | None, box: str) -> None:
        if member := self._members.get(node or ""):
            member.boxes.pop(box, None)

    def awake(self, node: str, box: str) -> None:
        """The box has just answered, so it runs."""
        view = self._members[node].boxes.get(box) if node in self._members else None
        if view and view.state == BoxState.FROZEN:
            self.noticed(node, view.model_copy(update={"state": BoxState.READY, "state_since": self._clock()}))

    def orphans(self) -> list[tuple[str, BoxView]]:
        """(node, box) of VMs that no record of the database stands for."""
        pairs = ((m.record.id, box) for m in self._members.values() for box in (m.view.boxes if m.view else ()))
        return [(node, box) for node, box in pairs if (node, box.id) not in self._placed]

    async def change(self) -> None:
        """Waits for the next heartbeat: the moment at which capacity may have come."""
        await self._changed.wait()

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _admit(self, record: NodeRecord) -> None:
        self._members[record.id] = Member(record, self._connect(record.id, record.address), heard_at=self._clock())
        self._by_token[record.digest] = record.id

    def _grace(self, silence: float) -> str:
        if silence < self._config.node_grace:
            return "It may be restarting; its boxes live on."
        return "It counts as lost; what it ran may not come back."


def _merged(believed: dict[str, BoxView], told: Iterable[BoxView], now: float) -> dict[str, BoxView]:
    """The node's list, but for boxes of which an operation has told something newer than the list."""
    merged = {view.id: view for view in told}
    for box, view in believed.items():
        newer = box not in merged or view.state_since > merged[box].state_since
        if newer and now - view.state_since < SETTLING:
            merged[box] = view
    return merged
