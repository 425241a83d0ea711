"""`box exec` and `box shell`: this terminal, or these pipes, joined to a command in a box."""

from __future__ import annotations

import os
import signal
import struct
import sys
import termios
import tty
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

from image.boxd.protocol import Frame
from node.cli.attach import Attached, Kept, attach, read_some, writer
from node.cli.failure import Failure
from node.protocol import AttachBox

STDIN, STDOUT, STDERR = 0, 1, 2
INTERRUPTED = 130


async def run_command(socket: Path, box: str, spec: AttachBox) -> int:
    """Runs it with our stdin, stdout and stderr; its exit code. The first Ctrl-C is the command's, the second one leaves (130)."""
    with trio.open_signal_receiver(signal.SIGINT) as interrupts:
        async with attach(socket, box, spec) as command, trio.open_nursery() as nursery:
            nursery.start_soon(_pass_input, command)
            nursery.start_soon(_interrupt, command, interrupts, nursery.cancel_scope)
            code = INTERRUPTED
            with _quiet_pipes():
                code = await command.run(writer(STDOUT), writer(STDERR))
            nursery.cancel_scope.cancel()
    return code


async def run_quietly(socket: Path, box: str, spec: AttachBox) -> tuple[int, str]:
    """Runs it with no input; its exit code and the end of what it said."""
    said = Kept()
    async with attach(socket, box, spec) as command:
        await command.send(Frame.STDIN)
        code = await command.run(said.take, said.take)
    return code, said.text()


async def run_shell(socket: Path, box: str, spec: AttachBox) -> int:
    """An interactive shell on this terminal, which is restored whatever happens; the shell's exit code."""
    if not os.isatty(STDIN) or not os.isatty(STDOUT):
        raise Failure("a shell needs a terminal", remedy="For scripts: `boxctl box exec BOX COMMAND`.")
    spec = spec.model_copy(update={"tty": True, **dict(zip(("cols", "rows"), window_size(), strict=True))})
    signals = (signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP)
    with raw_terminal(STDIN), trio.open_signal_receiver(*signals) as received:
        async with attach(socket, box, spec) as command, trio.open_nursery() as nursery:
            nursery.start_soon(_pass_input, command)
            nursery.start_soon(_follow_window, command, received, nursery.cancel_scope)
            code = 1
            code = await command.run(writer(STDOUT), writer(STDERR))
            nursery.cancel_scope.cancel()
    return code


@contextmanager
def raw_terminal(descriptor: int) -> Iterator[None]:
    """Keys reach the box one by one, also Ctrl-C; afterwards the terminal is as it was."""
    before = termios.tcgetattr(descriptor)
    try:
        tty.setraw(descriptor, termios.TCSADRAIN)  # what was typed meanwhile is kept
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def window_size() -> tuple[int, int]:
    """Columns and rows of our terminal, within what the node takes."""
    try:
        columns, rows = os.get_terminal_size(STDOUT)
    except OSError:
        columns, rows = 80, 24
    return min(max(columns, 1), 1000), min(max(rows, 1), 1000)


async def _pass_input(command: Attached) -> None:
    while data := await read_some(STDIN):
        await command.send(Frame.STDIN, data)
    await command.send(Frame.STDIN)


async def _interrupt(command: Attached, interrupts: AsyncIterator[int], scope: trio.CancelScope) -> None:
    await anext(interrupts)
    await command.send(Frame.SIGNAL, bytes([signal.SIGINT]))
    await anext(interrupts)
    scope.cancel()


async def _follow_window(command: Attached, received: AsyncIterator[int], scope: trio.CancelScope) -> None:
    async for number in received:
        if number != signal.SIGWINCH:
            scope.cancel()
            return
        await command.send(Frame.RESIZE, struct.pack("!HH", *window_size()))


@contextmanager
def _quiet_pipes() -> Iterator[None]:
    """A reader that has enough (`| head`) is no error of ours; Python must not complain about the closed pipe at exit either."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise Failure("the reader of our output has gone") from None
