"""CONTRACT section 0 on the wire, rule by rule, in memory and with trio's clock in hand."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import trio

from coordinator.mcp.endpoint import MAX_BODY
from coordinator.store import calls as store
from coordinator.store.calls import CallRecord
from tests.unit.mcp_server import AUTH, BOTH, WIRE, Exchange, Gate, MemoryDatabase, OneKey, call, endpoint

INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 0,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "claude code", "version": "2.1"}},
}
LIST = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
NEWEST = {**BOTH, "mcp-protocol-version": "2025-11-25"}


async def ask(message: object, headers: dict[str, str] = BOTH, method: str = "POST", **more: Any) -> Exchange:
    async with endpoint(MemoryDatabase(), Gate(), **more) as app:
        return await Exchange().run(app, method, message, headers)


def texts(exchange: Exchange) -> list[str]:
    return [block["text"] for block in exchange.json()["result"]["content"] if block["type"] == "text"]


@pytest.mark.parametrize("session", ["never-seen", "0" * 32 + ".claude", "x" * 500])
async def test_rule_1_any_session_id_is_served(session: str) -> None:  # report 54
    answer = await ask(call("echo", {"text": "hi"}), {**BOTH, "mcp-session-id": session})
    assert answer.status == 200
    assert json.loads(texts(answer)[0])["text"] == "hi"


async def test_a_session_id_is_handed_out_and_carries_the_clients_name_through_restarts() -> None:  # report 54
    first = await ask(INITIALIZE)
    assert first.json()["result"]["protocolVersion"] == "2025-11-25"
    assert "note is required" in first.json()["result"]["instructions"]
    after_restart = await ask(call("echo", {"text": ""}), {**BOTH, "mcp-session-id": first.headers["mcp-session-id"]})
    assert json.loads(texts(after_restart)[0])["client"] == "claude_code/2.1"


async def test_rules_2_and_3_one_page_of_tools_with_the_same_bytes_and_no_output_schema() -> None:
    first, second = await ask(LIST), await ask(LIST)
    assert first.body == second.body
    result = first.json()["result"]
    assert "nextCursor" not in result
    assert [tool["name"] for tool in result["tools"]] == list(WIRE)
    assert all("outputSchema" not in tool for tool in result["tools"])


async def test_rule_4_a_failure_is_a_result_with_code_cause_remedy_and_hop() -> None:
    answer = await ask(call("full"))
    assert answer.status == 200
    assert answer.json()["result"]["isError"] is True
    first, line = texts(answer)
    expected = {"code": "no_capacity", "cause": "2 of 2 in use", "remedy": "Come back in about 5 minutes.", "hop": "coordinator"}
    assert json.loads(first)["error"] == {**expected, "message": "503 no box capacity right now"}
    assert line == "no_capacity (coordinator): 503 no box capacity right now. Cause: 2 of 2 in use. Come back in about 5 minutes."


async def test_rules_5_and_6_what_breaks_inside_stays_inside(caplog: pytest.LogCaptureFixture) -> None:
    answer = await ask(call("broken"))
    assert answer.status == 200
    assert json.loads(texts(answer)[0])["error"]["code"] == "internal_error"
    for word in (b"hunter2", b"network", b"fetch failed", b"terminated", b"ECONNRESET"):
        assert word not in answer.body
    assert "hunter2" in caplog.text  # the operator's log has it


@pytest.mark.parametrize(
    ("message", "status", "code"),
    [
        (b"{", 400, -32700),
        (b"[" * 100_000, 400, -32700),
        ([LIST], 400, -32600),
        ({"id": 1, "method": "ping"}, 400, -32600),
        ({"jsonrpc": "2.0", "id": None, "method": "ping"}, 400, -32600),
        ({"jsonrpc": "2.0", "id": 1, "method": "ping", "params": [1]}, 400, -32600),
        ({"jsonrpc": "2.0", "id": 1, "method": "resources/list"}, 200, -32601),
        ({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"arguments": {}}}, 200, -32602),
        ({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "echo", "arguments": []}}, 200, -32602),
    ],
)
async def test_what_is_no_message_gets_a_json_rpc_error(message: object, status: int, code: int) -> None:
    answer = await ask(message)
    assert (answer.status, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize("message", [{"jsonrpc": "2.0", "method": "notifications/initialized"}, {"jsonrpc": "2.0", "id": 7, "result": {}}])
async def test_notifications_and_replies_are_accepted(message: object) -> None:
    answer = await ask(message)
    assert (answer.status, bytes(answer.body)) == (202, b"")


@pytest.mark.parametrize("method", ["ping", "logging/setLevel"])
async def test_small_questions_are_answered_with_nothing(method: str) -> None:
    assert (await ask({"jsonrpc": "2.0", "id": "a", "method": method})).json() == {"jsonrpc": "2.0", "id": "a", "result": {}}


async def test_an_unknown_tool_and_wrong_arguments_are_results_that_name_what_is_known() -> None:  # report 20 of CONTRACT 9
    assert "echo" in texts(await ask(call("sandbox_fly")))[1]
    missing = await ask(call("echo"))
    assert "text is required" in texts(missing)[1]
    unknown = await ask(call("echo", {"text": "a", "colour": "red"}))
    assert "colour is not an argument of this tool" in texts(unknown)[1]
    assert "echo takes text" in texts(unknown)[1]


async def test_rule_9_the_first_block_is_pure_json_and_the_rest_comes_after() -> None:
    content = (await ask(call("shot"))).json()["result"]["content"]
    assert json.loads(content[0]["text"]) == {"path": "/work/.sbx/a.png"}
    assert [block["type"] for block in content] == ["text", "text", "image"]


@pytest.mark.parametrize("token", [None, "p1"])
async def test_rule_7_a_silent_call_puts_bytes_on_the_wire_every_ten_seconds(
    token: str | None, autojump_clock: object
) -> None:  # report 13
    gate, exchange = Gate(), Exchange()
    async with endpoint(MemoryDatabase(), gate) as app, trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run, app, "POST", call("slow", token=token), NEWEST)
        await trio.sleep(300)
        gate.open.set()
    times = [at for at, _ in exchange.sent]
    assert max(later - earlier for earlier, later in pairwise(times)) <= 10
    assert times[-1] - times[0] > 290
    if token:
        heard = [message["params"] for _, message in exchange.events if message.get("method") == "notifications/progress"]
        assert [step["progress"] for step in heard] == sorted({step["progress"] for step in heard})
        assert heard[0] | {"progress": 0, "total": 0} == {"progressToken": "p1", "message": "begun", "progress": 0, "total": 0}
        assert heard[-1]["message"].startswith("slow still running (")
    assert exchange.events[-1][1]["result"]["content"]


async def test_rule_7_holds_for_a_client_that_takes_json_only(autojump_clock: object) -> None:
    gate, exchange = Gate(), Exchange()
    async with endpoint(MemoryDatabase(), gate) as app, trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run, app, "POST", call("slow"), {**AUTH, "accept": "application/json"})
        await trio.sleep(60)
        gate.open.set()
    assert len(exchange.sent) > 6
    assert exchange.json()["result"]["content"]


async def test_rule_8_a_stream_opens_with_an_id_and_a_short_retry(autojump_clock: object) -> None:
    gate, exchange = Gate(), Exchange()
    async with endpoint(MemoryDatabase(), gate) as app, trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run, app, "POST", call("slow"), NEWEST)
        await gate.began.wait()
        await trio.sleep(0.2)
        assert exchange.body.startswith(b"retry: 500\nid: ")
        gate.open.set()
    assert exchange.headers["content-type"] == "text/event-stream"
    assert exchange.headers["x-accel-buffering"] == "no"  # report 39
    call_id, _, number = (exchange.events[-1][0] or "").partition(".")
    assert (len(call_id), number) == (32, "1")


async def test_an_older_client_gets_no_empty_event(autojump_clock: object) -> None:
    gate, exchange = Gate(), Exchange()
    async with endpoint(MemoryDatabase(), gate) as app, trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run, app, "POST", call("slow"), {**BOTH, "mcp-protocol-version": "2025-06-18"})
        await gate.began.wait()
        await trio.sleep(0.2)
        gate.open.set()
    assert b"data:\n" not in exchange.body


async def test_rules_8_and_12_a_lost_stream_is_taken_up_where_it_broke(autojump_clock: object) -> None:  # report 13, CONTRACT 9 row 14
    gate, first, second = Gate(), Exchange(), Exchange()
    session = {**NEWEST, "mcp-session-id": "s1"}
    async with endpoint(MemoryDatabase(), gate) as app, trio.open_nursery() as nursery:
        nursery.start_soon(first.run, app, "POST", call("slow", token=1), session)
        await gate.began.wait()
        await trio.sleep(0.2)
        first.left.set()
        await first.ended.wait()
        last = first.events[-1][0]
        assert last
        nursery.start_soon(second.run, app, "GET", None, {**session, "last-event-id": last})
        await trio.sleep(0.05)
        gate.open.set()
        await second.ended.wait()
        assert [("method" in message, message.get("id")) for _, message in second.events] == [(False, 1)]
        late = await Exchange().run(app, "GET", None, {**session, "last-event-id": last})
        assert late.events == second.events
    assert len(gate.runs) == 1


async def test_rule_12_closing_the_connection_does_not_stop_the_work(autojump_clock: object) -> None:
    gate, exchange = Gate(), Exchange()
    async with endpoint(MemoryDatabase(), gate) as app:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(exchange.run, app, "POST", call("slow"), BOTH)
            await gate.began.wait()
            await trio.sleep(0.1)
            exchange.left.set()
        gate.open.set()
        await trio.testing.wait_all_tasks_blocked()
        assert gate.finished == gate.runs


async def test_rule_12_a_cancel_ends_the_wait_and_not_the_work(autojump_clock: object) -> None:
    gate, exchange = Gate(), Exchange()
    session = {**NEWEST, "mcp-session-id": "s1"}
    cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}}
    async with endpoint(MemoryDatabase(), gate) as app:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(exchange.run, app, "POST", call("slow"), session)
            await gate.began.wait()
            assert (await Exchange().run(app, "POST", cancel, {**session, "mcp-session-id": "of another"})).status == 202
            await trio.sleep(0.1)
            assert not exchange.ended.is_set()
            assert (await Exchange().run(app, "POST", cancel, session)).status == 202
        assert exchange.events[-1][1]["error"]["message"] == "Request cancelled; the work goes on"
        gate.open.set()
        await trio.testing.wait_all_tasks_blocked()
        assert gate.finished == gate.runs
        first = exchange.body.split(b"id: ")[1].split(b"\n")[0].decode()
        late = await Exchange().run(app, "GET", None, {**session, "last-event-id": first})
        assert late.events[-1][1]["result"]["content"]


async def test_a_full_disk_costs_the_resumption_and_not_the_answer(caplog: pytest.LogCaptureFixture, autojump_clock: object) -> None:
    database, gate, exchange = MemoryDatabase(), Gate(), Exchange()
    database.connection.execute("PRAGMA query_only = ON")
    async with endpoint(database, gate) as app, trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run, app, "POST", call("slow"), NEWEST)
        await gate.began.wait()
        await trio.sleep(0.1)
        gate.open.set()
    assert exchange.events[-1][1]["result"]["content"]


async def test_what_became_of_a_call_is_counted_under_names_that_are_known() -> None:
    gate = Gate()
    async with endpoint(MemoryDatabase(), gate) as app:
        for tool in ("shot", "full", "no-such-tool"):
            await Exchange().run(app, "POST", call(tool))
    assert gate.observed == [("shot", "ok"), ("full", "no_capacity"), ("unknown", "unknown_tool")]


async def test_old_calls_are_forgotten() -> None:
    connection = MemoryDatabase().connection
    for number in range(10):
        store.add(connection, CallRecord(f"c{number}", "a", "s", "slow", "{}", started_at=float(number)))
    store.prune(connection, before=3.0, keep=5)
    assert [store.find(connection, f"c{number}") is not None for number in range(10)] == [False] * 5 + [True] * 5


async def test_a_stream_belongs_to_its_session_and_account(autojump_clock: object) -> None:
    gate, exchange = Gate(), Exchange()
    session = {**NEWEST, "mcp-session-id": "s1"}
    async with endpoint(MemoryDatabase(), gate) as app:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(exchange.run, app, "POST", call("slow"), session)
            await gate.began.wait()
            await trio.sleep(0.1)
            gate.open.set()
        last = {"last-event-id": f"{gate.runs[0]}.0"}
        assert (await Exchange().run(app, "GET", None, {**session, **last})).status == 200
        for other in ({**session, "mcp-session-id": "s2"}, {**session, "authorization": "Bearer psbx_other"}):
            assert (await Exchange().run(app, "GET", None, {**other, **last})).status == 410
        for nonsense in ("", "1", "x.y", f"{gate.runs[0]}.-1", f"{gate.runs[0]}.²", "a" * 32 + ".1"):
            assert (
                await Exchange().run(app, "GET", None, {**session, "last-event-id": nonsense.encode("latin-1").decode("latin-1")})
            ).status == 410


@pytest.mark.parametrize("tool", ["slow", "once"])
async def test_rule_8_across_a_restart_a_call_is_taken_up_or_says_that_it_was_interrupted(
    tool: str, autojump_clock: object
) -> None:  # report 54
    database, gate, first = MemoryDatabase(), Gate(), Exchange()
    session = {**NEWEST, "mcp-session-id": "s1"}
    async with endpoint(database, gate) as app, trio.open_nursery() as nursery:
        nursery.start_soon(first.run, app, "POST", call(tool, request="r"), session)
        await gate.began.wait()
        await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
    last = f"{gate.runs[0]}.0"
    gate.open.set()
    async with endpoint(database, gate) as app:
        answer = (await Exchange().run(app, "GET", None, {**session, "last-event-id": last})).events[-1][1]
        again = (await Exchange().run(app, "GET", None, {**session, "last-event-id": last})).events[-1][1]
    assert answer == again
    assert answer["id"] == "r"
    first_block = json.loads(answer["result"]["content"][0]["text"])
    if tool == "slow":  # its tool says that it can pick up its work, by the same call id
        assert first_block == {"done": True, "call": gate.runs[0]}
        assert gate.runs == [gate.runs[0]] * 2
    else:
        assert first_block["error"]["code"] == "call_interrupted"


async def test_rule_8_across_a_restart_a_finished_answer_is_replayed_as_it_was(autojump_clock: object) -> None:  # report 54
    database, gate, first = MemoryDatabase(), Gate(), Exchange()
    async with endpoint(database, gate) as app, trio.open_nursery() as nursery:
        nursery.start_soon(first.run, app, "POST", call("once"), NEWEST)
        await gate.began.wait()
        await trio.sleep(0.1)
        gate.open.set()
    async with endpoint(database, gate) as app:
        replay = await Exchange().run(app, "GET", None, {**NEWEST, "last-event-id": f"{gate.runs[0]}.0"})
    assert replay.events == first.events


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"x-psbx-agent": "agent-1", "mcp-session-id": "s1"}, ("agent-1", None, 25)),
        ({"mcp-session-id": "s1", "x-psbx-tool-wait-sec": "90"}, ("session:s1", None, 90)),
        ({"x-psbx-agent": "no spaces allowed", "mcp-session-id": "s1"}, ("session:s1", None, 25)),
        ({"x-psbx-client": "cursor/1", "x-psbx-tool-wait-sec": "1e9"}, ("key:laptop/cursor", "cursor/1", 1800)),
        ({"x-psbx-client": "a\x07b", "x-psbx-tool-wait-sec": "nan"}, ("key:laptop/ab", "ab", 25)),
        ({"x-psbx-tool-wait-sec": "-4"}, ("key:laptop/", None, 0)),
    ],
)
async def test_a_conversation_is_the_agent_else_the_session_else_key_and_client(headers: dict[str, str], expected: tuple[Any, ...]) -> None:
    data = json.loads(texts(await ask(call("echo", {"text": ""}), {**BOTH, **headers}))[0])
    assert (data["conversation"], data["client"], data["waitSec"]) == expected


@pytest.mark.parametrize("key", [None, "Bearer psbx_wrong", "Basic psbx_test", "Bearer"])
async def test_without_a_key_the_answer_is_401_and_says_where_to_get_one(key: str | None) -> None:
    answer = await ask(LIST, {"authorization": key} if key else {})
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "boxctl key create" in answer.json()["remedy"]


async def test_when_keys_cannot_be_verified_the_503_is_typed_and_nothing_ran(caplog: pytest.LogCaptureFixture) -> None:  # CONTRACT 9 row 17
    keys = OneKey()
    keys.broken = True
    answer = await ask(LIST, keys=keys)
    assert (answer.status, answer.headers["retry-after"]) == (503, "5")
    assert answer.json() == {"error": "Keys cannot be verified right now", "reason": "upstream_auth", "retryAfterSec": 5}


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("https://boxes.example.org", 200),
        ("http://localhost:5173", 200),
        ("http://[::1]:80", 200),
        ("https://evil.example", 403),
        ("https://x-1.box.localhost", 403),
        ("null", 403),
        ("http://[", 403),
    ],
)
async def test_only_our_own_pages_may_call(origin: str, status: int) -> None:
    assert (await ask(LIST, {**BOTH, "origin": origin})).status == status


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", BOTH, 405),
        ("PUT", BOTH, 405),
        ("OPTIONS", {}, 405),
        ("DELETE", {**BOTH, "mcp-session-id": "s1"}, 204),
        ("POST", {**AUTH, "accept": "text/html"}, 406),
        ("POST", {**AUTH, "accept": "*/*"}, 200),
        ("POST", AUTH, 200),
        ("GET", {**AUTH, "accept": "application/json", "last-event-id": "a.1"}, 406),
        ("POST", {**BOTH, "content-length": str(MAX_BODY + 1)}, 413),
    ],
)
async def test_methods_and_types_are_answered_as_the_transport_says(method: str, headers: dict[str, str], status: int) -> None:
    assert (await ask(LIST, headers, method)).status == status


async def test_a_body_over_the_limit_is_refused_while_it_arrives() -> None:
    assert (await ask(b" " * (MAX_BODY + 1))).status == 413
