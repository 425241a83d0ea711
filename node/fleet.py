"""The node's side of the fleet: it enrols once with a one-time token, then says every 5 s what it has.

The key never leaves the node; the coordinator signs its public half. What the node was given lies in <lib>/node/identity (0700). With the
coordinator away the node goes on alone: its clocks and its local socket need nobody (report 64).
"""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx2
import trio
from pydantic import ValidationError

from node.errors import NodeError
from node.protocol import Enrol, Enrolled, Heartbeat, HeartbeatAnswer, NodeView

HEARTBEAT_EVERY = 5.0
REPLY_WITHIN = 10.0
RETRY_EVERY = 1.0  # while it is away: a coordinator that comes back soon knows its nodes


class NotEnrolled(NodeError):
    code = "node_not_enrolled"
    remedy = "Make a token on the coordinator's host (`boxctl node token`) and put it where the message says."


class FleetError(NodeError):
    code = "fleet_unreachable"
    remedy = "See that the coordinator runs (`boxctl status`) and that its fleet door can be reached from here."


@dataclass(frozen=True)
class Identity:
    """What makes this node itself to the coordinator; a folder of files."""

    folder: Path

    @property
    def key(self) -> Path:
        return self.folder / "key.pem"

    @property
    def certificate(self) -> Path:
        return self.folder / "certificate.pem"

    @property
    def coordinator_ca(self) -> Path:
        return self.folder / "coordinator-ca.pem"

    @property
    def fleet_ca(self) -> Path:
        return self.folder / "fleet-ca.pem"

    @property
    def enrolled(self) -> bool:
        return (self.folder / "node.json").exists()

    def read(self) -> tuple[str, str, str]:
        """(node id, node token, the coordinator's fleet door)"""
        data = json.loads((self.folder / "node.json").read_text())
        return data["id"], data["token"], data["coordinator"]

    def keep(self, given: Enrolled, coordinator: str) -> None:
        """Writes what enrolment gave; node.json last, so that a half-written identity is none."""
        self.coordinator_ca.write_text(given.coordinator_ca)
        self.fleet_ca.write_text(given.fleet_ca)
        self.renew(given.certificate)
        write_secret(self.folder / "node.json", json.dumps({"id": given.node_id, "token": given.node_token, "coordinator": coordinator}))

    def renew(self, certificate: str) -> None:
        write_secret(self.certificate, certificate)

    async def make_request(self) -> str:
        """A new key, kept, and the signing request for it (PEM)."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        argv = [sys.executable, "-P", "-m", "node.signing_request", str(self.folder)]
        try:
            return (await trio.run_process(argv, capture_stdout=True)).stdout.decode()
        except (OSError, subprocess.CalledProcessError) as error:
            raise NotEnrolled("no key could be made for this node", cause=str(error)) from error


def write_secret(path: Path, text: str) -> None:
    """Replaces a 0600 file in one step."""
    new = path.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_text(text)
    new.replace(path)


async def enrol(identity: Identity, order: Path, address: str) -> None:
    """Trades the one-time token in `order` ({token, fleetCa, coordinator}) for an identity, and removes the order.

    Errors: NotEnrolled when there is no order or it makes no sense, FleetError when the coordinator is silent or refuses.
    """
    try:
        given = json.loads(order.read_text())
        token, fleet_ca, coordinator = given["token"], given["fleetCa"], given["coordinator"]
    except FileNotFoundError as error:
        raise NotEnrolled(f"this node has no identity, and there is no token in {order}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise NotEnrolled(f"{order} must hold JSON with token, fleetCa and coordinator", cause=str(error)) from error
    request = Enrol(token=token, csr=await identity.make_request(), address=address)
    async with fleet_client(coordinator, fleet_ca) as client:
        answer = await post(client, "/v1/fleet/enrol", request.model_dump_json(by_alias=True))
    try:
        identity.keep(Enrolled.model_validate_json(answer), coordinator)
    except ValidationError as error:
        raise FleetError("the coordinator's answer to the enrolment makes no sense", cause=str(error)) from error
    order.unlink(missing_ok=True)


def fleet_client(coordinator: str, fleet_ca: str) -> httpx2.AsyncClient:
    trust = ssl.create_default_context(cadata=fleet_ca)
    return httpx2.AsyncClient(base_url=coordinator, verify=trust, timeout=REPLY_WITHIN, trust_env=False)


async def post(client: httpx2.AsyncClient, path: str, content: str) -> bytes:
    try:
        answer = await client.post(path, content=content, headers={"content-type": "application/json"})
    except httpx2.HTTPError as error:
        raise FleetError("the coordinator does not answer at its fleet door", cause=str(error) or type(error).__name__) from error
    if answer.status_code != 200:
        raise FleetError(f"the coordinator refused {path} with {answer.status_code}", cause=answer.text[:300])
    return answer.content


async def keep_heartbeats(
    identity: Identity,
    coordinator: str,
    address: str,
    describe: Callable[[], NodeView],
    renewed: Callable[[], None],
    log: Callable[[str], None],
) -> None:
    """Says every HEARTBEAT_EVERY seconds what the node is and has, for ever; to `coordinator`, or where it enrolled when that is "".

    `renewed` is called after a new certificate was written. Never raises for a coordinator that is away or odd: that is logged once.
    """
    _, token, enrolled_with = identity.read()
    pause, said = HEARTBEAT_EVERY, False
    async with fleet_client(coordinator or enrolled_with, identity.fleet_ca.read_text()) as client:
        client.headers["authorization"] = f"Bearer {token}"
        while True:
            try:
                beat = Heartbeat(node=describe(), address=address)
                answer = HeartbeatAnswer.model_validate_json(
                    await post(client, "/v1/fleet/heartbeat", beat.model_dump_json(by_alias=True))
                )
                if answer.certificate:
                    identity.renew(answer.certificate)
                    renewed()
                pause, said = HEARTBEAT_EVERY, False
            except (FleetError, ValidationError) as error:
                if not said:
                    log(f"heartbeat: {error} ({getattr(error, 'problem', None) and error.problem.cause})")  # type: ignore[union-attr]
                pause, said = RETRY_EVERY, True
            await trio.sleep(pause)
