"""The one request that opens a started or thawed box (reports 14-17): all of it or none, and to one token only."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from image.boxd.protocol import Restore
from node.errors import GuestError
from node.guest import Guest

from .conftest import FIRST_TOKEN, TOKEN, HostBoxd, restore, running_boxd

START: dict[str, Any] = {"machine_id": "0123456789abcdef" * 2, "hostname": "box-abc", "mount_work": True, "x_cookie": "00" * 16}


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[HostBoxd]:
    with running_boxd(tmp_path) as boxd:
        yield boxd


@pytest.fixture(scope="module")
def shut(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostBoxd]:
    """One that no test opens."""
    with running_boxd(tmp_path_factory.mktemp("shut")) as boxd:
        yield boxd


def notes(boxd: HostBoxd) -> list[list[Any]]:
    return [json.loads(line) for line in (boxd.folder / "notes").read_text().splitlines()]


async def code_of(guest: Guest, wanted: Restore | None = None) -> str:
    with pytest.raises(GuestError) as caught:
        await (guest.restore(wanted) if wanted else guest.commands())
    guest.abort()
    return caught.value.problem.code


async def test_a_start_gives_the_guest_all_that_makes_it_one_of_its_own(fresh: HostBoxd) -> None:
    guest = fresh.guest(FIRST_TOKEN)
    assert (await guest.status()).ready
    wanted = replace(restore(), **START)
    restored = await guest.restore(wanted)
    assert (restored.generation, restored.ready) == (1, True)
    await guest.commands()
    guest.abort()
    assert [step for step, _ in notes(fresh)] == ["entropy", "clock", "machine-id", "hostname", "work"]
    assert notes(fresh)[0][1] == base64.b64decode(wanted.entropy).hex()
    assert 0 <= notes(fresh)[1][1] - wanted.realtime < 2  # report 14
    assert (fresh.folder / "Xauthority").read_bytes() == b"\xff\xff\0\0\0\x0299\0\x12MIT-MAGIC-COOKIE-1\0\x10" + bytes(16)
    assert (fresh.folder / "Xauthority").stat().st_mode & 0o777 == 0o640


async def test_before_its_restore_a_box_says_only_how_it_is(shut: HostBoxd) -> None:
    assert await code_of(shut.guest(FIRST_TOKEN)) == "not_restored"
    assert await code_of(shut.guest("another-token-altogether")) == "unauthorised"


async def test_a_restore_ends_the_token_before_it(fresh: HostBoxd) -> None:
    guest = fresh.guest(FIRST_TOKEN)
    await guest.restore(restore())
    await guest.restore(restore(2, "the-token-of-generation-2"))
    assert (await guest.status()).generation == 2
    guest.abort()
    assert await code_of(fresh.guest(TOKEN)) == "unauthorised"
    assert await code_of(fresh.guest(FIRST_TOKEN), restore(3)) == "unauthorised"


async def test_a_restore_whose_answer_was_lost_may_be_repeated(fresh: HostBoxd) -> None:
    guest = fresh.guest(FIRST_TOKEN)
    await guest.restore(restore())
    again = fresh.guest(FIRST_TOKEN)
    assert (await again.restore(restore())).generation == 1
    guest.abort()
    again.abort()


async def test_a_boxd_that_was_killed_knows_its_box_again(tmp_path: Path) -> None:
    with running_boxd(tmp_path) as before:
        guest = before.guest(FIRST_TOKEN)
        await guest.restore(restore(3))
        guest.abort()
    assert (tmp_path / "identity").stat().st_mode & 0o777 == 0o600
    with running_boxd(tmp_path) as after:
        assert await code_of(after.guest(FIRST_TOKEN)) == "unauthorised"
        assert await code_of(after.guest(TOKEN), restore(3, "the-token-of-another-one")) == "stale_generation"
        guest = after.guest(TOKEN)
        await guest.commands()
        assert (await guest.restore(restore(4, "the-token-of-generation-4"))).generation == 4
        guest.abort()


async def test_a_boxd_that_was_killed_in_a_restore_serves_no_one(tmp_path: Path) -> None:
    with running_boxd(tmp_path) as before:
        guest = before.guest(FIRST_TOKEN)
        await guest.restore(restore())
        (tmp_path / "notes.fails").write_text("entropy")
        with pytest.raises(GuestError, match="entropy"):
            await guest.restore(restore(2, "the-token-of-generation-2"))
        guest.abort()
    with running_boxd(tmp_path) as after:
        assert await code_of(after.guest(TOKEN)) == "unauthorised"


async def test_a_generation_never_goes_back(fresh: HostBoxd) -> None:
    guest = fresh.guest(FIRST_TOKEN)
    await guest.restore(restore(5))
    assert await code_of(fresh.guest(TOKEN), restore(5, "the-token-of-another-one")) == "stale_generation"
    guest.abort()


async def test_a_step_that_fails_leaves_the_box_shut_and_is_named(fresh: HostBoxd) -> None:
    for step in ("entropy", "clock", "machine-id", "hostname", "work"):
        (fresh.folder / "notes.fails").write_text(step)
        guest = fresh.guest(FIRST_TOKEN)
        with pytest.raises(GuestError, match=step):
            await guest.restore(replace(restore(), **START))
        assert await code_of(guest) == "not_restored"
    (fresh.folder / "notes.fails").unlink()
    guest = fresh.guest(FIRST_TOKEN)
    await guest.restore(restore())
    await guest.commands()
    guest.abort()


async def test_a_failed_restore_after_a_thaw_shuts_what_was_open(fresh: HostBoxd) -> None:
    guest = fresh.guest(FIRST_TOKEN)
    await guest.restore(restore())
    (fresh.folder / "notes.fails").write_text("entropy")
    with pytest.raises(GuestError, match="entropy"):
        await guest.restore(restore(2, "the-token-of-generation-2"))
    assert await code_of(guest) == "not_restored"


@pytest.mark.parametrize(
    "odd",
    [
        {"entropy": base64.b64encode(bytes(63)).decode()}, {"entropy": "no base64!"}, {"token": "short"}, {"token": "a token with spaces"},
        {"realtime": 0.0}, {"machine_id": "x" * 32}, {"hostname": "a b"}, {"hostname": "-a"}, {"x_cookie": "00"},
    ],
)  # fmt: skip
async def test_a_restore_that_makes_no_sense_changes_nothing(shut: HostBoxd, odd: dict[str, Any]) -> None:
    assert await code_of(shut.guest(FIRST_TOKEN), replace(restore(), **odd)) == "bad_request"
    assert not (shut.folder / "notes").exists()


async def test_health_is_measured(shut: HostBoxd) -> None:
    guest = shut.guest(FIRST_TOKEN)
    health = await guest.health()
    guest.abort()
    assert health.healthy
    assert health.memory_total > health.memory_available > 0
    assert abs(health.checked_at - time.time()) < 5
