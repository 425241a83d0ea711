"""The coordinator's process and its doors, on loopback: TLS enrolment, mTLS to a node, REST, the operator's socket, a clean end."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypercorn.trio import serve
from quart import Response, request
from quart_trio import QuartTrio

from coordinator.config import CoordinatorConfig
from coordinator.daemon import Door, run
from coordinator.listeners import LOOPBACK, door_names, fleet_name, listen, listen_again, url_of
from node.protocol import Enrol, Enrolled, Event, Heartbeat, RunCommand, StartBox
from tests.unit.fake_node import FakeNode
from tests.unit.fleets import Wall, places


@dataclass
class Running:
    """A coordinator that serves on free ports of loopback, and its operator's client."""

    config: CoordinatorConfig
    operator: httpx2.AsyncClient
    status: dict[str, Any]
    key: str

    def agent(self, **headers: str) -> httpx2.AsyncClient:
        auth = {"authorization": f"Bearer {self.key}", "x-psbx-agent": "agent-1", **headers}
        return httpx2.AsyncClient(base_url=self.status["apiUrl"], headers=auth, trust_env=False)


@pytest.fixture
async def running(tmp_path: Path, nursery: trio.Nursery) -> AsyncIterator[Running]:
    config = CoordinatorConfig(places(tmp_path), listen="127.0.0.1:0", fleet_listen="127.0.0.1:0", graceful_stop=0.5)
    started, stopping, over = trio.Event(), trio.Event(), trio.Event()

    async def process() -> None:
        await run(config, started=started, stopping=stopping)
        over.set()

    nursery.start_soon(process)
    with trio.fail_after(20):
        await started.wait()
    transport = httpx2.AsyncHTTPTransport(uds=str(config.places.socket))
    async with httpx2.AsyncClient(transport=transport, base_url="http://coordinator") as operator:
        key = (await operator.post("/v1/keys", json={"name": "laptop"})).json()["key"]
        yield Running(config, operator, (await operator.get("/v1/status")).json(), key)
    stopping.set()
    with trio.fail_after(10):
        await over.wait()
    assert not config.places.socket.exists()


@dataclass
class RealNode:
    """A node in memory behind the real protocol: mTLS and lines of JSON. `cut` closes so many exec answers before their end."""

    fake: FakeNode
    given: Enrolled
    address: str
    cut: int = 0

    async def beat(self, running: Running, token: str | None = None) -> httpx2.Response:
        body = Heartbeat(node=self.fake.describe(), address=self.address).model_dump_json(by_alias=True)
        headers = {"authorization": f"Bearer {token or self.given.node_token}"}
        async with httpx2.AsyncClient(verify=ssl.create_default_context(cadata=self.given.fleet_ca), trust_env=False) as client:
            return await client.post(f"{running.status['fleetUrl']}/v1/fleet/heartbeat", content=body, headers=headers)


async def enrol(running: Running, folder: Path, nursery: trio.Nursery) -> RealNode:
    """Enrols through the fleet door with what the operator was given, then serves the node's API with the certificate that came back."""
    order = (await running.operator.post("/v1/nodes/tokens", json={"name": "host", "here": True})).json()
    key, listener = ec.generate_private_key(ec.SECP256R1()), listen("127.0.0.1:0")
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "anything")])
    csr = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    body = Enrol(token=order["token"], csr=csr.decode(), address=address).model_dump_json(by_alias=True)
    async with httpx2.AsyncClient(verify=ssl.create_default_context(cadata=order["fleetCa"]), trust_env=False) as client:
        given = Enrolled.model_validate((await client.post(f"{order['coordinator']}/v1/fleet/enrol", content=body)).json())
    (folder / "node.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (folder / "node.pem").write_text(given.certificate)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=given.coordinator_ca)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(folder / "node.pem", folder / "node.key")
    node = RealNode(FakeNode(given.node_id, Wall()), given, address)
    await nursery.start(partial(serve, node_api(node), Door(listener, graceful=0.1, tls=context), mode="asgi"))
    assert (await node.beat(running)).status_code == 200
    return node


def node_api(node: RealNode) -> Any:
    app, fake = QuartTrio("node"), node.fake

    def lines(*events: Event) -> Response:
        return Response("".join(event.model_dump_json(by_alias=True) + "\n" for event in events), content_type="application/x-ndjson")

    @app.put("/v1/boxes/<box>")
    async def start(box: str) -> Response:
        view = await fake.start(box, StartBox.model_validate_json(await request.get_data()))
        return lines(Event(type="progress", message="booting", fraction=0.5), Event(type="alive"), Event(type="result", result=view.wire()))

    @app.post("/v1/boxes/<box>/exec")
    async def execute(box: str) -> Response:
        command = await fake.exec(box, RunCommand.model_validate_json(await request.get_data()))
        if node.cut:
            node.cut -= 1
            return lines(Event(type="alive"))
        return lines(Event(type="result", result=command.wire()))

    @app.get("/v1/boxes/<box>")
    async def view(box: str) -> dict[str, Any]:
        return (await fake.box(box)).wire()

    @app.get("/v1/boxes/<box>/commands/<exec_id>/output/<stream>")
    async def output(box: str, exec_id: str, stream: str) -> bytes:
        async with fake.output(box, exec_id, stream, 0) as chunks:
            return b"".join([chunk async for chunk in chunks])

    return app


async def test_a_node_enrols_over_tls_and_its_box_works_over_mtls(running: Running, tmp_path: Path, nursery: trio.Nursery) -> None:
    async with trio.open_nursery() as serving:
        node = await enrol(running, tmp_path, serving)
        node.fake.answer = lambda command: (0, b"hello\xff", b"")
        async with running.agent() as agent:
            assert (await agent.get("/healthz")).json() == {"ok": True, "problems": []}
            box = (await agent.post("/v1/boxes", json={"goal": "try it"})).json()
            assert box["status"] == "ready"
            node.cut = 1  # the link breaks under the first answer; the same request joins the command again
            called = await call(agent, "sandbox_exec", id=box["id"], cmd="cat x", note="look", execId="e1")
            assert called["stdout"] == "hello\ufffd"
            assert node.fake.asked["exec"] == 2
            whole = await httpx_get(called["outputUrl"])
            assert whole.content == b"hello\xff"
            assert (await httpx_get(called["outputUrl"].replace("e1", "e2"))).status_code == 403
            assert (await agent.get(f"/v1/boxes/{box['id']}")).json()["steps"][0]["cmd"] == "cat x"
            metrics = (await agent.get("/metrics")).text
            assert 'boxfleet_operation_seconds_count{operation="start",outcome="ok"} 1.0' in metrics
            assert 'boxfleet_boxes{state="ready"} 1.0' in metrics
        serving.cancel_scope.cancel()


async def httpx_get(url: str) -> httpx2.Response:
    async with httpx2.AsyncClient(trust_env=False) as client:
        return await client.get(url)


async def call(agent: httpx2.AsyncClient, tool: str, **arguments: Any) -> dict[str, Any]:
    """A tool call over MCP; the first text block."""
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool, "arguments": arguments}}
    answer = await agent.post("/mcp", json=message, headers={"accept": "application/json, text/event-stream"}, timeout=20)
    data = next(line[6:] for line in answer.text.splitlines() if line.startswith("data: {")) if "data: " in answer.text else answer.text
    told: dict[str, Any] = json.loads(json.loads(data)["result"]["content"][0]["text"])
    return told


async def test_a_node_opens_to_nobody_without_the_coordinators_certificate(running: Running, tmp_path: Path) -> None:
    async with trio.open_nursery() as serving:
        node = await enrol(running, tmp_path, serving)
        anyone = ssl.create_default_context(cadata=(running.config.places.certificates / "nodes-ca.pem").read_text())
        anyone.check_hostname = False
        async with httpx2.AsyncClient(verify=anyone, trust_env=False) as client:
            with pytest.raises(httpx2.TransportError):
                await client.get(f"https://{node.address}/v1/node")
        serving.cancel_scope.cancel()


async def test_a_heartbeat_with_a_wrong_token_is_refused(running: Running, tmp_path: Path) -> None:
    async with trio.open_nursery() as serving:
        node = await enrol(running, tmp_path, serving)
        refused = await node.beat(running, token="wrong")
        assert (refused.status_code, refused.json()["code"]) == (401, "unauthorised")
        serving.cancel_scope.cancel()


async def test_without_a_node_health_says_what_is_wrong(running: Running) -> None:
    async with running.agent() as agent:
        sick = await agent.get("/healthz")
        assert sick.status_code == 503
        assert sick.json() == {"ok": False, "problems": ["no node is ready: none has enrolled"]}
        refused = await agent.post("/v1/boxes", json={"goal": "x"})
        assert (refused.status_code, refused.json()["code"]) == (503, "no_capacity")


async def test_every_error_is_json_and_only_a_key_opens(running: Running) -> None:
    async with running.agent(authorization="Bearer psbx_wrong") as stranger:
        for path in ("/v1/boxes", "/v1/boxes/aaaaaaaaaaaa"):
            refused = await stranger.get(path)
            assert (refused.status_code, refused.json()["code"]) == (401, "unauthorised")
        assert (await stranger.get("/nowhere")).json() == {"error": "Not Found", "code": "not_found"}
        assert (await stranger.put("/v1/boxes")).json()["code"] == "method_not_allowed"
    async with running.agent() as agent:
        wrong = await agent.post("/v1/boxes", json={"goal": "x", "sise": 1})
        assert (wrong.status_code, wrong.json()["error"]) == (400, "sise: Extra inputs are not permitted")
        assert (await agent.get("/v1/boxes/aaaaaaaaaaaa")).status_code == 404


async def test_a_revoked_key_opens_no_more_at_once(running: Running) -> None:
    async with running.agent() as agent:
        assert (await agent.get("/v1/boxes")).status_code == 200
        assert (await running.operator.delete("/v1/keys/laptop")).json() == {"revoked": 1}
        assert (await agent.get("/v1/boxes")).status_code == 401


async def test_heartbeat_and_leave_are_taken_from_agents_with_a_key(running: Running) -> None:  # CONTRACT 2.3
    async with running.agent() as agent:
        assert (await agent.post("/v1/agents/agent-1/heartbeat", json={"client": "codex/1"})).json() == {"ok": True}
        assert (await agent.post("/v1/agents/agent-1/leave", json={})).json() == {"ok": True}
        assert (await agent.post("/v1/agents/a%20b/heartbeat", json={})).status_code == 400
    async with running.agent(authorization="") as nobody:
        assert (await nobody.post("/v1/agents/agent-1/heartbeat", json={})).status_code == 401


@pytest.mark.parametrize("body", [b'{"client": "half \\ud83d"}', b"\xff{", b"[" * 5000, b"", b'{"client": 5}'])
async def test_a_heartbeat_that_makes_no_sense_spoils_nothing(running: Running, body: bytes) -> None:
    async with running.agent() as agent:
        assert (await agent.post("/v1/agents/agent-1/heartbeat", content=body)).json() == {"ok": True}
        assert (await agent.post("/v1/agents/agent-1/leave")).json() == {"ok": True}
        assert (await agent.get("/v1/boxes")).status_code == 200


async def test_below_public_the_operators_socket_is_rest_and_asks_for_a_key(running: Running) -> None:
    assert (await running.operator.get("/public/v1/boxes")).status_code == 401
    held = {"authorization": f"Bearer {running.key}"}
    assert (await running.operator.get("/public/v1/boxes", headers=held)).json() == {"boxes": []}
    assert (await running.operator.post("/public/v1/boxes", headers=held, json={"goal": "x"})).json()["code"] == "no_capacity"
    assert (await running.operator.get("/public/v1/status", headers=held)).status_code == 404


async def test_the_operators_socket_is_the_operators_alone(running: Running) -> None:
    assert running.config.places.socket.stat().st_mode & 0o777 == 0o600
    assert running.status["mcpUrl"] == running.status["url"] + "/mcp"
    assert running.status["nodes"] == []
    for secret in running.config.places.lib.rglob("*.key"):
        assert secret.stat().st_mode & 0o777 == 0o600


def test_port_0_gets_the_same_port_at_the_next_start_while_it_is_free(tmp_path: Path) -> None:
    with listen_again("127.0.0.1:0", tmp_path / "port") as first:
        port = first.getsockname()[1]
        with listen_again("127.0.0.1:0", tmp_path / "port") as other:
            assert other.getsockname()[1] != port
            port = other.getsockname()[1]
    with listen_again("127.0.0.1:0", tmp_path / "port") as again:
        assert again.getsockname()[1] == port
    (tmp_path / "port").write_text("99999")
    with listen_again("127.0.0.1:0", tmp_path / "port") as anew:
        assert anew.getsockname()[1] == int((tmp_path / "port").read_text())


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"fleet_names": ("fleet.example.org", "10.1.2.3"), "public_url": "https://boxes.example.org"}, "fleet.example.org"),
        ({"public_url": "https://boxes.example.org:8443/x"}, "boxes.example.org"),
        ({}, LOOPBACK),
    ],
)
def test_other_hosts_are_told_a_name_that_the_fleet_doors_certificate_bears(tmp_path: Path, settings: dict[str, Any], name: str) -> None:
    config = CoordinatorConfig(places(tmp_path), fleet_listen="0.0.0.0:0", **settings)
    assert name in door_names(config)
    with listen(config.fleet_listen) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener, "https", everywhere=fleet_name(config)) == f"https://{name}:{port}"
        assert url_of(listener, "https") == f"https://127.0.0.1:{port}"
