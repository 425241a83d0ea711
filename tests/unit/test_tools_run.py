"""What each tool asks of its context, and what it makes of the answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from tools.arguments import parse
from tools.context import Boxes, Caller, Context, ToolError, Words
from tools.table import BY_NAME

CALLER = Caller("main", "laptop", "agent-1", "claude-code/2.1", wait_sec=25, call="0123456789abcdef" * 2)


@dataclass
class FakeServices:
    """Notes what it is asked, and answers what it was told to."""

    answers: dict[str, Any] = field(default_factory=dict)
    asked: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        async def answer(*args: Any, **kwargs: Any) -> Any:
            self.asked.append((name, args, kwargs))
            given = self.answers.get(name, {"ok": True})
            if isinstance(given, Exception):
                raise given
            return given

        return answer


@dataclass
class FakeContext:
    services: FakeServices
    caller: Caller = CALLER
    told: list[str] = field(default_factory=list)

    @property
    def boxes(self) -> Boxes:
        return cast(Boxes, self.services)

    @property
    def words(self) -> Words:
        return cast(Words, self.services)

    async def progress(self, message: str, fraction: float | None = None) -> None:
        self.told.append(message)


async def run(name: str, arguments: dict[str, Any], **answers: Any) -> tuple[dict[str, Any], FakeContext]:
    context = FakeContext(FakeServices(answers))
    tool = BY_NAME[name]
    result = await tool.run(cast(Context, context), parse(tool, arguments))
    return result.data, context


def only(context: FakeContext) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    (asked,) = context.services.asked
    return asked


async def test_start_cuts_name_and_goal_as_the_client_does_and_waits_no_longer_than_it_can() -> None:
    _, context = await run("sandbox_start", {"name": " a\tb\n" + "n" * 80, "goal": "g" * 600, "size": 2, "waitForCapacitySec": 600})
    _, _, asked = only(context)
    assert asked == {
        "name": "a b " + "n" * 56,
        "goal": "g" * 500,
        "size": 2,
        "flavour": None,
        "wait_for_capacity_sec": 25,
        "restore": None,
    }
    assert context.told


async def test_start_names_a_box_after_its_goal() -> None:
    _, context = await run("sandbox_start", {"goal": "Fix the checkout test"})
    assert only(context)[2]["name"] == "Fix the checkout test"


@pytest.mark.parametrize("arguments", [{}, {"goal": None}, {"goal": " \n"}, {"name": "a"}])
async def test_start_requires_a_goal(arguments: dict[str, Any]) -> None:
    with pytest.raises(ToolError, match="goal is required"):
        await run("sandbox_start", arguments)


async def test_start_restores_without_a_goal() -> None:
    _, context = await run("sandbox_start", {"restore": "k3v9x0q2m7ab"})
    assert only(context)[2]["restore"] == "k3v9x0q2m7ab"


@pytest.mark.parametrize("message", ["503 no box capacity right now for a box of size 4", "the host is full"])
async def test_no_capacity_has_the_words_that_the_client_knows(message: str) -> None:
    with pytest.raises(ToolError, match=r"^503 no box capacity right now") as caught:
        await run("sandbox_start", {"goal": "g"}, start=ToolError("no_capacity", message))
    assert caught.value.code == "no_capacity"
    assert caught.value.message.count("503") == 1


async def test_list_answers_with_boxes() -> None:
    data, _ = await run("sandbox_list", {}, list=[{"id": "a"}])
    assert data == {"boxes": [{"id": "a"}]}


async def test_exec_in_the_foreground_has_a_timeout_and_an_id_that_a_restart_finds_again() -> None:
    _, context = await run("sandbox_exec", {"id": "b", "cmd": "make", "note": "build", "cwd": "app"})
    name, args, asked = only(context)
    assert (name, args) == ("exec", ("b",))
    assert (asked["cwd"], asked["timeout_sec"], asked["exec_id"], asked["user"]) == ("/work/app", 1800, CALLER.call[:16], "root")
    assert context.told == [f"running: build (execId {CALLER.call[:16]})"]


async def test_exec_in_the_background_has_no_timeout_unless_asked() -> None:
    _, free = await run("sandbox_exec", {"id": "b", "cmd": "serve", "note": "serve", "background": True})
    _, bound = await run(
        "sandbox_exec", {"id": "b", "cmd": "serve", "note": "serve", "background": True, "timeoutSec": 5, "execId": "mine"}
    )
    assert only(free)[2]["timeout_sec"] is None
    assert (only(bound)[2]["timeout_sec"], only(bound)[2]["exec_id"]) == (5, "mine")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"note": None}, "note is required"),
        ({"note": "  "}, "note is required"),
        ({"timeoutSec": 4000}, "timeoutSec"),
        ({"execId": "a b"}, "execId"),
        ({"user": "root; rm"}, "user"),
        ({"cwd": "a\0b"}, "cwd: must not contain NUL"),
        ({"env": {"A": 1}}, "env.A"),
        ({"env": {"A=B": "c"}}, "env: needs names without '='"),
        ({"env": {"A": "c\0"}}, "env: needs names without '=', and no NUL"),
        ({"env": {f"A{n}": "x" * 100 for n in range(2000)}}, "env: has more than 120 KiB"),
        ({"cmd": "echo \0"}, "cmd: must not contain NUL"),
        ({"cmd": "\U0001f600" * 100_000}, "cmd: has more than 256 KiB"),
        ({"note": "half \ud83d"}, "'note' holds half of a surrogate pair"),
        ({"env": {"A": "\ud83d"}}, "'env' holds half of a surrogate pair"),
    ],
)
async def test_exec_names_the_field_that_is_wrong(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ToolError) as caught:
        await run("sandbox_exec", {"id": "b", "cmd": "true", "note": "n", **wrong})
    assert words in caught.value.message


async def test_procs_lists_by_default() -> None:
    data, _ = await run("sandbox_procs", {"id": "b"}, commands=[{"execId": "x"}])
    assert data == {"commands": [{"execId": "x"}]}


@pytest.mark.parametrize(("asked", "waited"), [(None, 25), (5, 5), (600, 25)])
async def test_procs_waits_no_longer_than_the_caller_survives(asked: float | None, waited: float) -> None:  # report 13
    _, context = await run("sandbox_procs", {"id": "b", "action": "wait", "bgId": "x", "waitSec": asked})
    assert only(context)[2] == {"wait_sec": waited, "until": "exited", "ready_port": None, "ready_log": None}


async def test_procs_waits_for_a_port_or_a_log_line() -> None:
    _, context = await run("sandbox_procs", {"id": "b", "action": "wait", "bgId": "x", "readyPort": 3000})
    assert (only(context)[2]["until"], only(context)[2]["ready_port"]) == ("ready", 3000)
    with pytest.raises(ToolError, match="readyPort or readyLog is required"):
        await run("sandbox_procs", {"id": "b", "action": "wait", "bgId": "x", "until": "ready"})


@pytest.mark.parametrize("action", ["wait", "stop"])
async def test_procs_needs_to_know_which_command(action: str) -> None:
    with pytest.raises(ToolError, match="bgId is required"):
        await run("sandbox_procs", {"id": "b", "action": action})


async def test_procs_stops_one_or_all_that_run() -> None:
    _, one = await run("sandbox_procs", {"id": "b", "action": "stop", "bgId": "x"})
    assert only(one)[1] == ("b", "x")
    commands = [{"execId": "x", "running": True}, {"execId": "y", "running": False}, {"execId": "z", "running": True}]
    _, every = await run("sandbox_procs", {"id": "b", "action": "stop", "all": True}, commands=commands)
    assert [args for name, args, _ in every.services.asked if name == "stop_command"] == [("b", "x"), ("b", "z")]


async def test_the_small_tools_pass_on_what_they_are_given() -> None:
    feedback = {"task": "t", "usage": "u", "problems": "none", "suggestions": "s"}
    for name, arguments, expected in (
        ("sandbox_status", {"id": "b"}, ("status", ("b",), {})),
        ("sandbox_say", {"id": "b", "text": " now\ntesting "}, ("say", ("b", "now testing"), {})),
        ("sandbox_stop", {"id": "b"}, ("stop", ("b",), {"delete": False})),
        ("sandbox_stop", {"id": "b", "delete": True}, ("stop", ("b",), {"delete": True})),
        ("sandbox_feedback", feedback, ("feedback", (), {**feedback, "box": None})),
    ):
        _, context = await run(name, cast("dict[str, Any]", arguments))
        assert only(context) == expected
