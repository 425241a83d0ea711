"""`box exec`, `box shell`: real processes, pipes and terminals on our side, a real process as the box's command."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st

from image.boxd.protocol import FRAME_HEADER, FRAME_MAX, Frame
from node.cli.attach import FrameReader, exit_code
from node.cli.failure import Failure


@given(st.lists(st.tuples(st.sampled_from([Frame.STDOUT, Frame.STDERR]), st.binary(max_size=50))), st.integers(1, 20))
def test_frames_come_out_whole_however_the_stream_is_cut(frames: list[tuple[Frame, bytes]], cut: int) -> None:
    stream = b"".join(FRAME_HEADER.pack(kind, len(payload)) + payload for kind, payload in frames)
    reader = FrameReader()
    assert [frame for at in range(0, len(stream), cut) for frame in reader.feed(stream[at : at + cut])] == frames


@pytest.mark.parametrize("header", [(Frame.STDOUT, FRAME_MAX + 1), (Frame.STDIN, 1), (99, 1)])
def test_a_box_cannot_send_frames_that_are_too_long_or_of_no_known_kind(header: tuple[int, int]) -> None:
    with pytest.raises(Failure):
        FrameReader().feed(FRAME_HEADER.pack(*header))


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b'{"exitCode": 7, "signal": null}', 7),
        (b'{"exitCode": null, "signal": "SIGKILL"}', 137),
        (b'{"exitCode": "x"}', 1),
        (b'{"signal": "SIGBOGUS"}', 128),
    ],
)
def test_the_exit_code_is_the_one_a_shell_would_tell(payload: bytes, code: int) -> None:
    assert exit_code(payload) == code


def test_exec_passes_input_both_outputs_and_the_exit_code(host: Any) -> None:
    host.node(host.view())
    done = host.run("box", "exec", "trial", "tr a-z A-Z; echo oops >&2; exit 42", stdin=b"hello\n")
    assert (done.returncode, done.stdout, done.stderr) == (42, b"HELLO\n", b"oops\n")


def test_exec_passes_large_binary_streams_unchanged(host: Any) -> None:
    host.node(host.view())
    data = os.urandom(3_000_000)
    assert host.run("box", "exec", "trial", "cat", stdin=data).stdout == data


def test_exec_in_no_such_box_is_4_and_without_a_node_3(host: Any) -> None:
    assert host.run("box", "exec", "trial", "true").returncode == 3
    host.node(host.view())
    assert host.run("box", "exec", "other", "true").returncode == 4


def test_ctrl_c_interrupts_the_command_and_ends_without_a_trace(host: Any) -> None:
    host.node(host.view())
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with host.spawn("box", "exec", "trial", "echo up; exec sleep 30", **streams) as process:
        assert process.stdout.read(3) == b"up\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130
        assert process.stderr.read() == b""


def test_a_shell_needs_a_terminal(host: Any) -> None:
    host.node(host.view())
    done = host.run("box", "shell", "trial")
    assert done.returncode == 1
    assert b"what to do: For scripts" in done.stderr


class Terminal:
    """A person's terminal: what is typed, and the screen as it is seen."""

    def __init__(self, master: int) -> None:
        self.master = master
        self.screen = pyte.Screen(90, 20)
        self._stream = pyte.ByteStream(self.screen)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait_for(self, text: str, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        os.set_blocking(self.master, False)
        while text not in "\n".join(self.screen.display):
            assert time.monotonic() < end, "\n".join(self.screen.display)
            try:
                self._stream.feed(os.read(self.master, 4096))
            except BlockingIOError:
                time.sleep(0.01)

    @property
    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self.master)[3] & termios.ECHO)


@contextmanager
def shell(host: Any) -> Iterator[tuple[Terminal, Any]]:
    master, slave = pty.openpty()
    terminal = Terminal(master)
    try:
        terminal.resize(90, 20)
        process = host.spawn("box", "shell", "trial", wrapped_in=("setsid", "--ctty", "--wait"), stdin=slave, stdout=slave, stderr=slave)
        with process:
            try:
                yield terminal, process
            finally:
                process.kill()
    finally:
        os.close(slave)
        os.close(master)


def test_a_shell_is_a_terminal_that_follows_the_window_and_gives_ours_back(host: Any) -> None:
    host.node(host.view())
    with shell(host) as (terminal, process):
        terminal.type("stty size; echo in=$((40+2))\n")
        terminal.wait_for("in=42")
        assert "20 90" in "\n".join(terminal.screen.display)
        assert not terminal.echoes

        terminal.resize(70, 15)
        terminal.type("clear; sleep 0.3; stty size; echo done=$((1+1))\n")
        terminal.wait_for("done=2")
        assert "15 70" in "\n".join(terminal.screen.display)

        terminal.type("echo go=$((6+1)); sleep 30\n")
        terminal.wait_for("go=7")
        terminal.type("\x03")  # the box's, not ours
        terminal.wait_for("^C")
        terminal.type("echo still=$((5+5))\n")
        terminal.wait_for("still=10")

        terminal.type("exit 9\n")
        assert process.wait(timeout=10) == 9
        assert terminal.echoes
