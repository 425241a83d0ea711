"""Commands in a box: the real boxd, driven by the node's Guest."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path

import pytest
import trio

from image.boxd.commands import end_reason
from image.boxd.processes import Exit
from node.errors import GuestError
from node.guest import Guest
from node.protocol import OutputView, RunCommand, WaitCommand

from .conftest import FIRST_TOKEN, TOKEN, HostBoxd, alive, eventually, gone, restore, running_boxd

Make = Callable[..., RunCommand]
WAIT = 20.0


def text(output: OutputView | None) -> str:
    assert output
    return base64.b64decode(output.text_b64).decode()


async def fetch(guest: Guest, exec_id: str, *, follow: bool = False, offset: int = 0) -> bytes:
    async with aclosing(guest.output(exec_id, "stdout", follow=follow, offset=offset)) as chunks:
        return b"".join([chunk async for chunk in chunks])


async def test_a_command_tells_its_streams_apart_and_its_exit_code(guest: Guest, command: Make) -> None:
    view = await guest.run(command("echo out; echo err >&2; exit 3"), wait=WAIT)
    assert (text(view.stdout), text(view.stderr), view.exit_code, view.end_reason) == ("out\n", "err\n", 3, "exited")


async def test_the_input_of_a_command_is_at_its_end(guest: Guest, command: Make) -> None:
    assert (await guest.run(command("cat; echo done"), wait=WAIT)).exit_code == 0


async def test_more_than_8_mib_of_output_are_kept_in_full_and_the_tail_is_marked_as_one(guest: Guest, command: Make) -> None:
    # reports 1 and 2
    view = await guest.run(command("head -c 9000000 /dev/zero | tr '\\0' x; echo end"), wait=WAIT)
    assert view.stdout
    assert (view.stdout.total, view.stdout.truncated, view.stdout.dropped) == (9_000_004, True, 0)
    assert len(text(view.stdout)) == 16 * 1024
    assert text(view.stdout).endswith("xend\n")
    assert await fetch(guest, view.exec_id) == b"x" * 9_000_000 + b"end\n"
    assert await fetch(guest, view.exec_id, offset=9_000_000) == b"end\n"


async def test_binary_output_arrives_as_it_was_written(guest: Guest, command: Make, tmp_path: Path) -> None:
    # report 10
    (tmp_path / "binary").write_bytes(data := os.urandom(2048))
    view = await guest.run(command(f"cat {tmp_path}/binary"), wait=WAIT)
    assert view.stdout
    assert hashlib.sha256(base64.b64decode(view.stdout.text_b64)).digest() == hashlib.sha256(data).digest()


async def test_a_background_child_delays_no_answer_and_lives_on(guest: Guest, command: Make) -> None:
    # report 4
    started = trio.current_time()
    view = await guest.run(command("sleep 60 & echo $!", timeout_sec=1), wait=WAIT)
    assert trio.current_time() - started < 1
    assert (view.running, view.exit_code, view.timed_out) == (False, 0, False)
    child = int(text(view.stdout))
    assert alive(child)
    await guest.stop(view.exec_id, grace=1)
    assert not alive(child)


async def test_what_a_background_child_prints_after_the_end_is_kept(guest: Guest, command: Make, tmp_path: Path) -> None:
    os.mkfifo(gate := tmp_path / "gate")
    view = await guest.run(command(f"(read < {gate}; echo late) & echo early"), wait=WAIT)
    assert text(view.stdout) == "early\n"
    await trio.to_thread.run_sync(gate.write_text, "go\n")

    async def is_kept() -> bool:
        return await fetch(guest, view.exec_id) == b"early\nlate\n"

    await eventually(is_kept)


async def test_a_command_out_of_time_is_killed_with_its_tree_and_says_so(guest: Guest, command: Make) -> None:
    # report 5
    view = await guest.run(command("trap '' TERM; sleep 60 & set -m; sleep 61 & echo $!; jobs -p; wait", timeout_sec=0.3), wait=WAIT)
    assert (view.timed_out, view.end_reason, view.running) == (True, "timed_out", False)
    for pid in map(int, text(view.stdout).split()):
        await eventually(partial(gone, pid))


async def test_running_commands_are_listed_with_pid_and_stopped_by_name(guest: Guest, command: Make) -> None:
    # report 7
    view = await guest.run(command("echo $$; exec sleep 60", background=True))
    assert view.running
    assert (await guest.ready(view.exec_id, WaitCommand(until="ready", wait_sec=WAIT, ready_log=str(view.pid)))).ready
    listed = next(each for each in await guest.commands() if each.exec_id == view.exec_id)
    assert (listed.pid, listed.running, listed.background, listed.stdout) == (view.pid, True, True, None)
    stopped = await guest.stop(view.exec_id, grace=5)
    assert (stopped.running, stopped.end_reason, stopped.signal, text(stopped.stdout)) == (False, "stopped", "SIGTERM", f"{view.pid}\n")


async def test_a_command_that_ignores_a_stop_is_killed(guest: Guest, command: Make) -> None:
    view = await guest.run(command("trap '' TERM; echo up; while :; do sleep 0.05; done", background=True))
    await guest.ready(view.exec_id, WaitCommand(until="ready", wait_sec=WAIT, ready_log="up"))
    assert (await guest.stop(view.exec_id, grace=0.2)).signal == "SIGKILL"


async def test_a_thousand_orphans_leave_no_zombie_and_no_exit_code_is_lost(boxd: HostBoxd, guest: Guest, command: Make) -> None:
    # report 8
    view = await guest.run(command("for i in $(seq 1000); do (true &); done; exit 7"), wait=60)
    assert view.exit_code == 7

    async def childless() -> bool:
        return not Path(f"/proc/{boxd.pid}/task/{boxd.pid}/children").read_text().split()

    await eventually(childless)


async def test_the_log_of_a_background_command_can_be_followed_before_it_says_anything(guest: Guest, command: Make) -> None:  # report 7
    view = await guest.run(command("exec sleep 60", background=True), wait=0)
    assert view.stdout
    assert Path(view.stdout.path).read_bytes() == b""
    await guest.stop(view.exec_id)


async def test_the_same_exec_id_starts_once(guest: Guest, command: Make, tmp_path: Path) -> None:
    request = command(f"echo once >> {tmp_path}/ran; exec sleep 60")
    first = await guest.run(request)
    assert (await guest.run(request)).pid == first.pid
    await guest.stop(first.exec_id, grace=1)
    assert (await guest.run(request)).end_reason == "stopped"
    assert (tmp_path / "ran").read_text() == "once\n"


async def test_a_client_that_stops_waiting_does_not_stop_the_command(guest: Guest, command: Make, tmp_path: Path) -> None:
    os.mkfifo(gate := tmp_path / "gate")
    request = command(f"read < {gate}; echo finished")
    with trio.move_on_after(0.2):
        await guest.run(request, wait=WAIT)
    await trio.to_thread.run_sync(gate.write_text, "go\n")
    assert text((await guest.run(request, wait=WAIT)).stdout) == "finished\n"


async def test_the_environment_holds_what_a_user_needs_and_no_secret(boxd: HostBoxd, guest: Guest, command: Make) -> None:
    # report 57
    view = await guest.run(command("env", user="nobody", env={"MINE": "1"}), wait=WAIT)
    env = dict(line.split("=", 1) for line in text(view.stdout).splitlines())
    assert set(env) - {"PWD", "SHLVL", "_", "OLDPWD"} == {
        "HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "TZ", "DISPLAY", "XAUTHORITY", "MINE", "BOXD_EXEC_ID",
    }  # fmt: skip
    assert (env["USER"], env["DISPLAY"], env["MINE"]) == ("nobody", ":99", "1")
    for file in ("environ", "cmdline"):
        seen = Path(f"/proc/{boxd.pid}/{file}").read_text()
        assert TOKEN not in seen
        assert FIRST_TOKEN not in seen


async def test_a_command_runs_as_the_user_that_is_named_with_its_groups(guest: Guest, command: Make) -> None:
    assert text((await guest.run(command("id -un; id -Gn", user="nobody"), wait=WAIT)).stdout) == "nobody\nnogroup\n"


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"cwd": "/no/such/folder"}, "cwd_not_found"),
        ({"user": "no-such-user"}, "user_not_found"),
        ({"env": {"A=B": "1"}}, "bad_request"),
        ({"cmd": "a\0b"}, "bad_request"),
    ],
)
async def test_what_cannot_be_started_is_refused_with_a_cause(guest: Guest, command: Make, more: dict[str, object], code: str) -> None:
    with pytest.raises(GuestError) as caught:
        await guest.run(command(**{"cmd": "true", **more}), wait=WAIT)
    assert caught.value.problem.code == code


async def test_what_the_kernel_will_not_start_ends_at_once_and_says_why(guest: Guest, command: Make) -> None:
    view = await guest.run(command("true", env={"BIG": "x" * 200_000}), wait=WAIT)
    assert (view.running, view.end_reason) == (False, "start_failed")
    assert "Argument list too long" in text(view.stderr)


async def test_a_script_may_be_longer_than_one_argument_of_the_kernel(guest: Guest, command: Make) -> None:
    view = await guest.run(command("true\n" * 50_000 + "cat; id -un", user="nobody"), wait=WAIT)
    assert text(view.stdout) == "nobody\n"
    assert all(len(listed.cmd) <= 500 for listed in await guest.commands())


async def test_an_unknown_command_is_told_as_one(guest: Guest) -> None:
    with pytest.raises(GuestError, match="nobody-ran-this") as caught:
        await guest.command("nobody-ran-this")
    assert (caught.value.problem.code, caught.value.status) == ("command_not_found", 404)


async def test_a_followed_stream_ends_with_its_command(guest: Guest, command: Make, tmp_path: Path) -> None:
    os.mkfifo(gate := tmp_path / "gate")
    view = await guest.run(command(f"echo first; read < {gate}; echo last", background=True))
    got = b""
    async with aclosing(guest.output(view.exec_id, "stdout", follow=True)) as chunks:
        async for chunk in chunks:
            if not got:
                await trio.to_thread.run_sync(gate.write_text, "go\n")
            got += chunk
    assert got == b"first\nlast\n"


async def test_readiness_comes_by_port_or_by_log_or_says_why_not(guest: Guest, command: Make) -> None:
    server = "import socket,time; s=socket.create_server(('127.0.0.1',0)); print(s.getsockname()[1],'Listening',flush=True); time.sleep(60)"
    view = await guest.run(command(f'python3 -c "{server}"', background=True))
    by_log = await guest.ready(view.exec_id, WaitCommand(until="ready", wait_sec=WAIT, ready_log="Listening"))
    assert (by_log.ready, by_log.why) == (True, "log has 'Listening'")
    assert by_log.command
    port = int(text(by_log.command.stdout).split()[0])
    assert (await guest.ready(view.exec_id, WaitCommand(until="ready", wait_sec=WAIT, ready_port=port))).why == f"port {port} listens"
    late = await guest.ready(view.exec_id, WaitCommand(until="ready", wait_sec=0.1, ready_log="never"))
    assert (late.ready, late.why) == (False, "waited 0.1 s")
    await guest.stop(view.exec_id, grace=1)
    ended = await guest.run(command("exit 4"), wait=WAIT)
    assert (await guest.ready(ended.exec_id, WaitCommand(until="ready", wait_sec=WAIT, ready_log="never"))).why == "exited with 4"


async def test_boxd_is_small(boxd: HostBoxd, guest: Guest) -> None:
    await guest.health()
    assert boxd.rss() < 40 << 20


async def test_a_restarted_boxd_knows_the_commands_of_before(tmp_path: Path, command: Make) -> None:
    # report 9, for the end of boxd itself
    with running_boxd(tmp_path) as boxd:
        guest = boxd.guest(FIRST_TOKEN)
        await guest.restore(restore())
        ended = await guest.run(command("echo kept; exit 5"), wait=WAIT)
        running = await guest.run(command("echo $$; exec sleep 60", background=True))
        await guest.ready(running.exec_id, WaitCommand(until="ready", wait_sec=WAIT, ready_log=str(running.pid)))
        guest.abort()
    assert running.pid
    os.kill(running.pid, 9)
    with running_boxd(tmp_path) as boxd:
        guest = boxd.guest(TOKEN)
        after = await guest.command(ended.exec_id)
        assert (after.exit_code, text(after.stdout), after.started_at) == (5, "kept\n", ended.started_at)
        lost = await guest.command(running.exec_id)
        assert (lost.running, lost.end_reason, text(lost.stdout)) == (False, "boxd_restarted", f"{running.pid}\n")
        assert [each.exec_id for each in await guest.commands()] == [ended.exec_id, running.exec_id]
        guest.abort()


@pytest.mark.parametrize(
    ("end", "oom_killed", "reason"),
    [
        (Exit(0, None, 0), True, "exited"),
        (Exit(None, 9, 0), True, "guest_oom"),
        (Exit(137, None, 0), True, "guest_oom"),
        (Exit(137, None, 0), False, "exited"),
        (Exit(None, 9, 0), False, "signal"),
        (Exit(None, 15, 0), True, "signal"),
    ],
)
def test_a_kill_for_want_of_memory_is_told_as_one(end: Exit, oom_killed: bool, reason: str) -> None:
    # report 12
    assert end_reason(end, oom_killed=oom_killed) == reason


