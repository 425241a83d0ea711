"""What the coordinator's doors (mcp, rest, admin) share: one frozen wiring, made once at start-up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from coordinator.boxes import BoxService
from coordinator.certificates import Authority
from coordinator.clock import Clock, wall_clock
from coordinator.config import CoordinatorConfig
from coordinator.conversations import Conversations
from coordinator.fleet import Connect, Fleet
from coordinator.keys import Keys
from coordinator.links import OutputLinks
from coordinator.metrics import Metrics
from coordinator.node_client import http_nodes
from coordinator.store.database import Database, open_database
from coordinator.words import WordService


@dataclass(frozen=True)
class Services:
    config: CoordinatorConfig
    database: Database
    keys: Keys
    conversations: Conversations
    fleet: Fleet
    boxes: BoxService
    words: WordService
    links: OutputLinks
    metrics: Metrics
    nursery: trio.Nursery  # work that outlives the request that asked for it
    clock: Clock
    public_url: str  # without a slash at the end
    fleet_url: str  # as seen from this host
    fleet_url_elsewhere: str  # as seen from others
    started_at: float


@asynccontextmanager
async def open_services(
    config: CoordinatorConfig,
    authority: Authority,
    *,
    public_url: str,
    fleet_url: str = "",
    fleet_url_elsewhere: str = "",
    connect: Connect | None = None,
    clock: Clock = wall_clock,
) -> AsyncIterator[Services]:
    """Opens the database, wires the services and starts their background work; leaving cancels that work and closes the database.
    `connect` makes the client of a node (tests and the bench give in-memory nodes); by default mTLS with the authority's certificate."""
    places = config.places
    places.lib.mkdir(mode=0o700, parents=True, exist_ok=True)
    metrics = Metrics()
    async with open_database(places.database) as database, trio.open_nursery() as nursery:
        links = OutputLinks.load(places.url_key, public_url=public_url, valid=config.url_valid, clock=clock)
        conversations = Conversations(database, config.presence, clock)
        async with http_nodes(authority) as over_mtls:
            fleet = Fleet(database, config, authority, connect or over_mtls, clock)
            await fleet.load()
            await conversations.load()
            boxes = BoxService(config, database, fleet, conversations, links, metrics, nursery, clock)
            nursery.start_soon(fleet.watch)
            await boxes.recover()
            try:
                yield Services(
                    config=config,
                    database=database,
                    keys=Keys(database, clock),
                    conversations=conversations,
                    fleet=fleet,
                    boxes=boxes,
                    words=WordService(database, boxes, clock),
                    links=links,
                    metrics=metrics,
                    nursery=nursery,
                    clock=clock,
                    public_url=public_url,
                    fleet_url=fleet_url,
                    fleet_url_elsewhere=fleet_url_elsewhere,
                    started_at=clock(),
                )
            finally:
                nursery.cancel_scope.cancel()
