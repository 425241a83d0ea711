"""Steps side by side fail like steps one after another."""

from __future__ import annotations

import pytest
import trio

from node.errors import NodeError, StorageError
from node.together import together


async def fail(error: Exception) -> None:
    raise error


async def side_by_side(*errors: Exception) -> None:
    async with together() as steps:
        for error in errors:
            steps.start_soon(fail, error)
        await trio.sleep_forever()


async def test_a_typed_error_of_a_step_comes_out_as_itself() -> None:
    with pytest.raises(StorageError, match="no space"):
        await side_by_side(StorageError("no space"))


async def test_of_several_typed_errors_one_is_told() -> None:
    with pytest.raises(NodeError):
        await side_by_side(StorageError("one"), StorageError("two"))


async def test_a_defect_is_not_hidden_behind_a_typed_error() -> None:
    with pytest.raises(ExceptionGroup):
        await side_by_side(StorageError("one"), ZeroDivisionError())


async def test_steps_that_work_are_awaited() -> None:
    done = []

    async def step() -> None:
        await trio.lowlevel.checkpoint()
        done.append(1)

    async with together() as steps:
        steps.start_soon(step)
        steps.start_soon(step)
    assert done == [1, 1]
