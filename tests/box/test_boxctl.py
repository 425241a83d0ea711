"""boxctl with a real box: the operator's ways into it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import stat
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyte

from tests.box.fleet import BOXCTL, CALL_WITHIN, Fleet

COLUMNS, ROWS = 100, 30


class Terminal:
    """A person's terminal with boxctl in it."""

    def __init__(self, master: int) -> None:
        self._master = master
        self._screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self._screen)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def resize(self, columns: int, rows: int) -> None:
        """The kernel tells the foreground process, as for any terminal."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._screen.resize(rows, columns)

    def read_until(self, shown: Callable[[list[str]], bool]) -> None:
        """Reads until the screen shows it. A terminal that was left ends the wait."""
        deadline = time.monotonic() + CALL_WITHIN
        while not shown(lines := [line.rstrip() for line in self._screen.display]):
            assert time.monotonic() < deadline, lines
            self._stream.feed(os.read(self._master, 65536))

    def read_to_the_end(self) -> bytes:
        said = b""
        try:
            while chunk := os.read(self._master, 65536):
                said += chunk
        except OSError:  # EIO: nobody holds the other side any more
            pass
        return said


@contextmanager
def shell(fleet: Fleet, box: str) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    master, slave = pty.openpty()
    terminal = Terminal(master)
    terminal.resize(COLUMNS, ROWS)
    command = ["setsid", "--ctty", "--wait", *BOXCTL, "box", "shell", box]  # so that the terminal is its own
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=fleet.environment)
    os.close(slave)
    try:
        yield terminal, process
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_exec_passes_input_both_outputs_and_the_exit_code(fleet: Fleet, box: str) -> None:
    blob = os.urandom(300_000)
    done = fleet.boxctl("box", "exec", box, "cat; echo aside >&2; exit 42", input=blob, check=False)
    assert (done.returncode, done.stdout == blob, done.stderr) == (42, True, b"aside\n")
    done = fleet.boxctl("box", "exec", "--user", "tester", "--cwd", "/tmp", "-e", "A=b c", box, "--", "sh", "-c", "echo $USER $PWD $A")
    assert done.stdout == b"tester /tmp b c\n"


def test_a_tree_is_the_same_after_the_way_in_and_out(fleet: Fleet, box: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "empty").mkdir(parents=True)
    (tree / "odd names").mkdir()
    (tree / "odd names" / "-n 'ö\n$(x)").write_text("odd")
    (tree / "tool").write_bytes(os.urandom(200_000))
    (tree / "tool").chmod(0o750)
    (tree / "link").symlink_to("odd names/nowhere")
    fleet.boxctl("box", "cp", str(tree), f"{box}:/work/copied")
    assert fleet.boxctl("box", "exec", box, "stat --format='%a %U' /work/copied/tool; readlink /work/copied/link").stdout == (
        b"750 root\nodd names/nowhere\n"
    )
    fleet.boxctl("box", "cp", f"{box}:/work/copied", str(tmp_path / "back"))
    assert look(tmp_path / "back") == look(tree)


def look(tree: Path) -> dict[str, tuple[str, bytes]]:
    return {
        str(path.relative_to(tree)): (stat.filemode(path.lstat().st_mode), content(path)) for path in sorted(tree.rglob("*"))
    }  # fmt: skip


def content(path: Path) -> bytes:
    if path.is_symlink():
        return os.fsencode(path.readlink())
    return b"" if path.is_dir() else path.read_bytes()


def test_a_shell_is_a_terminal_that_follows_the_window_and_loses_nothing_at_its_end(fleet: Fleet, box: str) -> None:  # report 3
    with shell(fleet, box) as (terminal, process):
        terminal.type("stty size; test -t 0 && echo on a$((1))terminal\r")
        terminal.read_until(lambda lines: f"{ROWS} {COLUMNS}" in lines and "on a1terminal" in lines)
        terminal.resize(77, 22)
        terminal.type("until [ \"$(stty size)\" = '22 77' ]; do :; done; echo resized $((1 + 1))\r")
        terminal.read_until(lambda lines: "resized 2" in lines)
        terminal.type("clear; seq 20000; exit 5\r")
        said = terminal.read_to_the_end()
        assert process.wait(CALL_WITHIN) == 5
    assert b"\r\n".join(b"%d" % number for number in range(1, 20001)) in said


def test_logs_tell_the_commands_and_all_they_said(fleet: Fleet, box: str) -> None:
    exec_id = fleet.boxctl("box", "exec", "--detach", box, "echo to stdout; echo to stderr >&2").stdout.decode().strip()
    assert fleet.boxctl("box", "logs", "--follow", box, exec_id).stdout == b"to stdout\n"
    assert fleet.boxctl("box", "logs", "--stderr", box, exec_id).stdout == b"to stderr\n"
    known = {command["execId"]: command for command in json.loads(fleet.boxctl("box", "logs", "--json", box).stdout)}
    assert known[exec_id]["exitCode"] == 0


def test_a_box_is_frozen_and_thawed_by_its_name_and_looking_wakes_nothing(fleet: Fleet, box: str) -> None:
    name = fleet.view(box)["name"]
    assert json.loads(fleet.boxctl("box", "freeze", "--json", name).stdout)["state"] == "frozen"
    fleet.boxctl("box", "console", name)
    assert json.loads(fleet.boxctl("box", "show", "--json", name).stdout)["state"] == "frozen"
    listed = json.loads(fleet.boxctl("box", "list", "--json").stdout)
    assert [(seen["name"], seen["state"]) for seen in listed if seen["id"] == box] == [(name, "frozen")]
    assert json.loads(fleet.boxctl("box", "thaw", "--json", name).stdout)["state"] == "ready"
    assert fleet.boxctl("box", "exec", name, "echo awake").stdout == b"awake\n"


def test_status_and_connect_tell_programs_what_they_need(fleet: Fleet, box: str) -> None:
    status = fleet.status()
    assert Path(f"/proc/{status['coordinator']['pid']}").exists()
    assert Path(f"/proc/{status['node']['pid']}").exists()
    assert box in [known["id"] for known in status["boxes"]]
    connect = json.loads(fleet.boxctl("connect", "--json").stdout)
    assert connect["mcpUrl"].startswith(connect["apiUrl"])
    assert connect["apiKey"].startswith("psbx_")


def test_a_box_that_is_not_there_is_said_in_three_lines_and_a_code(fleet: Fleet) -> None:
    done = fleet.boxctl("box", "exec", "nobody", "true", check=False)
    assert done.returncode != 0
    assert b"nobody" in done.stderr
    assert b"Traceback" not in done.stderr
