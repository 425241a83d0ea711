"""Commands in a box as an agent runs them, through MCP."""

from __future__ import annotations

import base64
import hashlib

import trio

from tests.box.fleet import Agent, Fleet, fetch, first_block


async def test_over_8_mib_of_output_can_be_fetched_whole(box: str, agent: Agent) -> None:  # report 1, 2
    command = "seq --format=%011.0f 800000 | tee /work/text; sha256sum /work/text >&2"
    done = await agent.call("sandbox_exec", id=box, cmd=command, note="9 MB")
    assert (done["truncated"], done["stdoutBytes"], done.get("stdoutDroppedBytes")) == (True, 9_600_000, None)
    whole = await fetch(done["outputUrl"])
    assert hashlib.sha256(whole).hexdigest() == done["stderr"].split()[0]
    assert whole.endswith(done["stdout"].encode())


async def test_bytes_that_are_no_text_come_unchanged(box: str, agent: Agent) -> None:  # report 10
    command = "head -c 2048 /dev/urandom | tee /work/blob; sha256sum /work/blob >&2"
    done = await agent.call("sandbox_exec", id=box, cmd=command, note="bytes")
    digest = done["stderr"].split()[0]
    exact = base64.b64decode(done["stdoutBase64"])
    assert (len(exact), hashlib.sha256(exact).hexdigest()) == (2048, digest)
    assert await fetch(done["outputUrl"]) == exact


async def test_a_child_in_the_background_holds_no_call_back(box: str, agent: Agent) -> None:  # report 4
    done = await agent.call("sandbox_exec", id=box, cmd="sleep 4001 & echo started", note="leave a child", timeoutSec=3600)
    assert (done["exitCode"], done["stdout"], done["timedOut"]) == (0, "started\n", False)
    assert await agent.run(box, "pgrep --count --full '^sleep 4001'") == "1"
    await agent.run(box, "pkill --full '^sleep 4001'")


async def test_a_timeout_ends_the_whole_tree_and_says_so(box: str, agent: Agent) -> None:  # report 4, 5
    done = await agent.call(
        "sandbox_exec", id=box, cmd="(sleep 4002; true) & (sleep 4003; true) & echo waiting; wait", note="too long", timeoutSec=1
    )
    assert (done["timedOut"], done["stdout"], done["endReason"]) == (True, "waiting\n", "timed_out")
    assert await agent.run(box, "pgrep --full '^sleep 400[23]' || echo none") == "none"


async def test_a_background_command_has_a_pid_a_log_and_an_end(box: str, agent: Agent) -> None:  # report 7
    work = "echo at work; until [ -e /work/end ]; do read -t 0.1 <> <(:); done; exit 7"
    begun = await agent.call("sandbox_exec", id=box, cmd=work, note="work", background=True)
    known = (await agent.commands(box))[begun["bgId"]]
    assert (known["running"], known["pid"], known["foreground"], known["mine"]) == (True, begun["pid"], False, True)
    await agent.ready(box, begun["bgId"], readyLog="at work")
    assert await agent.run(box, f"kill -0 {begun['pid']} && cat {begun['log']} && touch /work/end") == "at work"
    ended = await agent.call("sandbox_procs", id=box, action="wait", bgId=begun["bgId"])
    assert (ended["running"], ended["exitCode"], ended["stdout"]) == (False, 7, "at work\n")
    assert not (await agent.commands(box))[begun["bgId"]]["running"]


async def test_stop_ends_the_whole_tree(box: str, agent: Agent) -> None:  # report 5, 7
    begun = await agent.call("sandbox_exec", id=box, cmd="(sleep 4004; true) & sleep 4005; true", note="two", background=True)
    stopped = await agent.call("sandbox_procs", id=box, action="stop", bgId=begun["bgId"])
    assert (stopped["running"], stopped["endReason"]) == (False, "stopped")
    assert await agent.run(box, "pgrep --full '^sleep 400[45]' || echo none") == "none"


async def test_a_server_is_waited_for_by_its_port(box: str, agent: Agent) -> None:
    begun = await agent.call("sandbox_exec", id=box, cmd="python3 -m http.server 8123", note="serve", background=True)
    await agent.ready(box, begun["bgId"], readyPort=8123)
    assert "text" in await agent.run(box, "curl --silent --show-error localhost:8123")
    await agent.call("sandbox_procs", id=box, action="stop", bgId=begun["bgId"])


async def test_a_thousand_orphans_leave_no_zombie(box: str, agent: Agent) -> None:  # report 8
    await agent.run(box, 'python3 -c "import os; [os.fork() or os._exit(0) for _ in range(1000)]"')
    assert await agent.run(box, "while ps -eo stat= | grep -q ^Z; do :; done; echo none", timeoutSec=120) == "none"


async def test_progress_comes_at_once_and_a_lost_result_is_fetched_by_execid(fleet: Fleet, box: str, agent: Agent) -> None:  # report 13
    told = trio.Event()

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        if message and "lost1" in message:
            told.set()

    async def call_and_give_up(task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        arguments = {"id": box, "cmd": "until [ -e /work/go ]; do :; done; echo done", "note": "long", "execId": "lost1"}
        async with fleet.agent() as another:
            with trio.CancelScope() as scope:
                task_status.started(scope)
                await another.client.call_tool("sandbox_exec", arguments, progress_callback=hear)

    async with trio.open_nursery() as nursery:
        scope: trio.CancelScope = await nursery.start(call_and_give_up)
        with trio.fail_after(120):
            await told.wait()
        scope.cancel()
    assert (await agent.commands(box))["lost1"]["running"]
    await agent.run(box, "touch /work/go")
    ended = await agent.call("sandbox_procs", id=box, action="wait", bgId="lost1")
    assert (ended["exitCode"], ended["stdout"]) == (0, "done\n")


async def test_the_same_exec_id_never_runs_twice(box: str, agent: Agent) -> None:
    arguments = {"id": box, "cmd": "echo ran | tee --append /work/runs", "note": "once", "execId": "once1"}
    first = await agent.call("sandbox_exec", **arguments)
    again = await agent.call("sandbox_exec", **arguments)
    assert (first["execId"], first["stdout"], again["stdout"]) == ("once1", "ran\n", "ran\n")
    assert await agent.run(box, "cat /work/runs") == "ran"


async def test_a_command_runs_where_and_as_whom_it_was_asked_to(box: str, agent: Agent) -> None:
    assert await agent.run(box, "whoami; pwd; cat; echo $DISPLAY; date +%Z") == "root\n/work\n:99\nUTC"  # stdin is at its end
    await agent.run(box, "install --directory --owner=tester '/work/a place'")
    told = await agent.run(box, 'whoami; pwd; echo "$GREETING"; touch made', cwd="a place", user="tester", env={"GREETING": "grüß dich"})
    assert told == "tester\n/work/a place\ngrüß dich"


async def test_what_cannot_run_says_what_to_do(box: str, agent: Agent) -> None:
    error = await agent.fail("sandbox_exec", id=box, cmd="true", note="x", cwd="/work/nowhere")
    assert (error["code"], "/work/nowhere" in error["message"]) == ("cwd_not_found", True)
    failed = first_block(await agent.client.call_tool("sandbox_exec", {"id": box, "cmd": "kill -9 $$", "note": "x"}))
    assert (failed["exitCode"], failed["signal"]) == (None, "SIGKILL")
