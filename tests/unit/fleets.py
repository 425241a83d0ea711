"""A coordinator with nodes in memory, for tests: real SQLite in a temporary folder, and a wall clock that goes with trio's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from trio.testing import MockClock

from coordinator.boxes import CallerBoxes
from coordinator.certificates import Authority
from coordinator.config import CoordinatorConfig, Places
from coordinator.services import Services, open_services
from node.protocol import Enrol, Enrolled, Heartbeat
from tests.unit.fake_node import FakeNode
from tools.context import Caller

EPOCH = 1_800_000_000.0


def patient_clock() -> MockClock:
    """Jumps when nothing has happened for a moment: SQLite works on a thread, of which trio's clock knows nothing."""
    return MockClock(autojump_threshold=0.05)


class Wall:
    """The wall clock: goes with trio's, and can be set forward by days at once."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return EPOCH + self.ahead + trio.current_time()


def places(folder: Path) -> Places:
    return Places(folder / "config.toml", folder / "lib", folder / "run")


def csr() -> str:
    """A request as a node makes it, with a name that nobody should believe."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "coordinator")])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
    return request.public_bytes(Encoding.PEM).decode()


def caller(conversation: str = "agent-1", account: str = "main") -> Caller:
    return Caller(account, "laptop", conversation, "claude-code/2.1", 25.0)


@dataclass
class Fleet:
    """The coordinator's services, and the nodes behind them by id."""

    services: Services
    nodes: dict[str, FakeNode]
    tokens: dict[str, str]
    wall: Wall

    async def later(self, seconds: float, *, beating: bool = True) -> None:
        """Time goes by; with the nodes' heartbeats, or in silence."""
        self.wall.ahead += seconds
        if beating:
            await self.beat()

    def boxes(self, who: Caller | None = None) -> CallerBoxes:
        return self.services.boxes.for_caller(who or caller())

    async def enrol(self, name: str = "host", **traits: Any) -> FakeNode:
        """One more node, with its first heartbeat sent."""
        token, _ = await self.services.fleet.create_token(name)
        given: Enrolled = await self.services.fleet.enrol(Enrol(token=token, csr=csr(), address=f"{name}:7082"))
        node = self.nodes[given.node_id]
        self.tokens[node.id] = given.node_token
        for trait, value in traits.items():
            setattr(node, trait, value)
        await self.beat(node)
        return node

    async def beat(self, *nodes: FakeNode) -> None:
        """A heartbeat of these nodes, or of all."""
        for node in nodes or self.nodes.values():
            beat = Heartbeat(node=node.describe(), address="host:7082")
            await self.services.fleet.heartbeat(self.tokens[node.id], beat)

    async def keep_beating(self) -> None:
        while True:
            await trio.sleep(5)
            await self.beat()


@asynccontextmanager
async def open_fleet(folder: Path, *, known: Fleet | None = None, **settings: Any) -> AsyncIterator[Fleet]:
    """A coordinator on `folder`; with `known`, the same one after a restart, its nodes still there."""
    nodes, wall = (known.nodes, known.wall) if known else ({}, Wall())

    def connect(node: str, address: str) -> FakeNode:
        return nodes.setdefault(node, FakeNode(node, wall))

    config = CoordinatorConfig(places(folder), **settings)
    authority = Authority.load(config.places.certificates, ["127.0.0.1"])
    async with open_services(config, authority, public_url="http://127.0.0.1:7080", connect=connect, clock=wall) as services:
        yield Fleet(services, nodes, dict(known.tokens) if known else {}, wall)
