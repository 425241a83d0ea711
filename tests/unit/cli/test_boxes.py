from __future__ import annotations

import json
import os
import threading
from typing import Any

import pytest

from node.cli.boxes import command_line, find_box, parse_env
from node.cli.coordinator import write_secret
from node.cli.failure import NotFound, WrongUsage

BOXES = [{"id": "abcdefghij12", "name": "web"}, {"id": "abcxyz000000", "name": "db"}, {"id": "zzz000000000", "name": "abcx"}]


@pytest.mark.parametrize(("reference", "found"), [("abcdefghij12", "abcdefghij12"), ("abcd", "abcdefghij12"), ("db", "abcxyz000000")])
def test_a_box_is_found_by_its_id_the_beginning_of_one_or_its_name(reference: str, found: str) -> None:
    assert find_box(reference, BOXES)["id"] == found


def test_what_could_be_two_boxes_is_refused_with_both_ids() -> None:
    with pytest.raises(WrongUsage) as refused:
        find_box("abc", BOXES)
    assert "abcdefghij12 (web)" in refused.value.cause
    assert "abcxyz000000 (db)" in refused.value.cause


@pytest.mark.parametrize("reference", ["", "nothing"])
def test_a_box_that_is_not_there_is_not_found(reference: str) -> None:
    with pytest.raises(NotFound):
        find_box(reference, BOXES)


def test_one_word_is_a_line_and_several_are_a_program_with_its_arguments() -> None:
    assert command_line(["ls | wc -l"]) == "ls | wc -l"
    assert command_line(["echo", "a b", "$HOME"]) == "echo 'a b' '$HOME'"
    assert command_line(["--", "ls", "-l"]) == "ls -l"
    with pytest.raises(WrongUsage):
        command_line(["--"])


def test_environment_keeps_everything_after_the_first_equals_sign() -> None:
    assert parse_env(["A=1=2", "B="]) == {"A": "1=2", "B": ""}
    with pytest.raises(WrongUsage):
        parse_env(["A"])


def test_a_list_for_programs_is_json_on_stdout_and_nothing_else(host: Any) -> None:
    host.node(host.view())
    shown = host.boxctl("box", "list", "--json")
    assert shown.exit_code == 0
    assert json.loads(shown.stdout) == [host.view()]
    assert shown.stderr == ""


def test_a_list_in_a_pipe_is_not_cut(host: Any) -> None:
    host.node(host.view(name="a name that is longer than most terminals are wide " * 4))
    assert "wide " * 1 + "a name" in host.boxctl("box", "list").stdout


def test_names_cannot_steer_the_terminal(host: Any) -> None:
    host.node(host.view(name="\x1b]0;gotcha\x07[bold]x"))
    shown = host.boxctl("box", "list").stdout
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "[bold]x" in shown


def test_without_boxes_stdout_stays_empty(host: Any) -> None:
    host.node()
    shown = host.boxctl("box", "list")
    assert (shown.stdout, shown.exit_code) == ("", 0)
    assert "box start" in shown.stderr


def test_one_box_is_shown_with_its_problem_and_remedy(host: Any) -> None:
    problem = {"code": "vm_failed", "message": "QEMU ended", "remedy": "Start it again.", "hop": "vm"}
    host.node(host.view(state="failed", problem=problem))
    shown = host.boxctl("box", "show", "trial").stdout
    assert "QEMU ended" in shown
    assert "Start it again." in shown


def test_a_freeze_shows_progress_on_stderr_and_its_result(host: Any) -> None:
    node = host.node(host.view())
    events = [{"type": "progress", "message": "saving"}, {"type": "alive"}, {"type": "result", "result": host.view(state="frozen")}]
    node.routes["POST", "/v1/boxes/abcdefghij12/freeze"] = (200, events)
    shown = host.boxctl("box", "freeze", "trial", "--json")
    assert json.loads(shown.stdout)["state"] == "frozen"
    assert "saving" in shown.stderr


def test_an_operation_that_fails_tells_message_cause_and_remedy(host: Any) -> None:
    node = host.node(host.view())
    problem = {"code": "box_conflict", "message": "it is archived", "cause": "since Monday", "remedy": "Restore it.", "hop": "node"}
    node.routes["POST", "/v1/boxes/abcdefghij12/thaw"] = (200, [{"type": "error", "error": problem}])
    shown = host.boxctl("box", "thaw", "trial")
    assert (shown.exit_code, shown.stdout) == (1, "")
    said = ["error: it is archived", "cause: since Monday, box_conflict at the node", "what to do: Restore it."]
    assert shown.stderr.splitlines() == said


def test_an_operation_that_ends_without_a_result_is_a_failure(host: Any) -> None:
    host.node(host.view()).routes["POST", "/v1/boxes/abcdefghij12/thaw"] = (200, [{"type": "alive"}])
    assert host.boxctl("box", "thaw", "trial").exit_code == 1


def test_a_daemon_that_talks_nonsense_is_a_failure_not_a_stack_trace(host: Any) -> None:
    host.node().routes["GET", "/v1/boxes"] = (200, b"<html>")
    shown = host.boxctl("box", "list")
    assert shown.exit_code == 1
    assert shown.stderr.startswith("error: ")
    assert "Traceback" not in shown.stderr


def test_a_box_is_started_through_the_coordinators_socket_whatever_its_public_url_is(host: Any) -> None:
    coordinator = host.coordinator()
    coordinator.routes["POST", "/public/v1/boxes"] = lambda body: (201, {"id": "abcdefghij12", **body})
    write_secret(host.state / "lib" / "local.key", "psbx_local\n")
    shown = host.boxctl("box", "start", "--name", "trial")
    assert (shown.exit_code, shown.stdout) == (0, "abcdefghij12\n")
    assert coordinator.keys == ["Bearer psbx_local"]


@pytest.mark.parametrize(
    ("word", "method", "path", "said"),
    [("stop", "POST", "/stop", "stopping: box abcdefghij12"), ("rm", "DELETE", "", "deleting: box abcdefghij12")],
)
def test_an_end_that_takes_long_says_on_a_terminal_what_is_being_done(host: Any, word: str, method: str, path: str, said: str) -> None:
    def slow(_: Any) -> tuple[int, Any]:
        assert terminal_shows.wait(20)  # the answer comes only when the terminal has told of the work
        return 200, {"id": "abcdefghij12"}

    terminal_shows = threading.Event()
    host.node(host.view())
    host.coordinator().routes[method, f"/public/v1/boxes/abcdefghij12{path}"] = slow
    write_secret(host.state / "lib" / "local.key", "psbx_local\n")
    master, slave = os.openpty()
    with host.spawn("box", word, "trial", stderr=slave) as process:
        os.close(slave)
        shown = b""
        while said.encode() not in shown:
            shown += os.read(master, 4096)
        terminal_shows.set()
        assert process.wait(20) == 0
    os.close(master)


def test_a_detached_command_prints_its_exec_id(host: Any) -> None:
    node = host.node(host.view())
    node.routes["POST", "/v1/boxes/abcdefghij12/exec"] = lambda body: (200, [{"type": "result", "result": {"execId": body["execId"]}}])
    shown = host.boxctl("box", "exec", "-d", "-e", "A=1", "trial", "sleep", "60")
    _, _, body = node.asked[-1]
    assert shown.stdout == body["execId"] + "\n"
    assert (body["cmd"], body["env"], body["background"]) == ("sleep 60", {"A": "1"}, True)


def test_logs_give_the_bytes_as_they_are(host: Any) -> None:
    node = host.node(host.view())
    node.routes["GET", "/v1/boxes/abcdefghij12/commands/e1/output/stderr"] = (200, b"\xff\x00raw\n")
    assert host.boxctl("box", "logs", "trial", "e1", "--stderr", "-f").stdout_bytes == b"\xff\x00raw\n"
    assert node.asked[-1][1].endswith("?offset=0&follow=1")


def test_the_console_never_wakes_and_is_passed_on(host: Any) -> None:
    host.node(host.view(state="frozen")).routes["GET", "/v1/boxes/abcdefghij12/console"] = (200, b"[    0.000000] Linux\n")
    assert host.boxctl("box", "console", "trial").stdout == "[    0.000000] Linux\n"
