"""Spools: whatever is written, what is kept is right, ordered and bounded (report 1)."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from image.boxd.output import Budget, Spool

QUOTA = 800  # head 400, four tail segments of 100


def kept(spool: Spool) -> list[tuple[int, bytes]]:
    found, offset = [], 0
    while (piece := spool.read(offset, 37))[1]:
        found.append(piece)
        offset = piece[0] + len(piece[1])
    assert offset <= spool.total
    return found


@given(sizes=st.lists(st.integers(1, 300), max_size=30), limit=st.sampled_from([600, 10_000]), reopen=st.booleans())
def test_what_is_kept_is_what_was_written_there(sizes: list[int], limit: int, reopen: bool) -> None:
    with TemporaryDirectory() as folder:
        spool = Spool(Path(folder, "x.out"), Budget(limit), QUOTA)
        written = b""
        for number, size in enumerate(sizes):
            spool.write(bytes([number]) * size)
            written += bytes([number]) * size
        spool.close()
        if reopen:
            before, spool = spool, Spool(spool.path, Budget(limit), QUOTA)
            spool.recover(before.total)
        pieces = kept(spool)
        assert all(written[start:].startswith(data) for start, data in pieces)
        assert spool.total == len(written)
        assert spool.kept == sum(len(data) for _, data in pieces) == spool.total - spool.dropped <= min(QUOTA, limit)
        assert spool.kept == sum(path.stat().st_size for path in Path(folder).iterdir())
        if spool.kept:
            assert written.endswith(spool.tail(50)) or limit == 600
        if limit > 600:
            assert written[: QUOTA // 2] == b"".join(data for start, data in pieces if start < QUOTA // 2)[: QUOTA // 2]
            assert written.endswith(spool.tail(50))


def test_beyond_the_quota_head_and_tail_stay_and_the_gap_is_counted(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "x.out", Budget(), QUOTA)
    for number in range(100):
        spool.write(b"%09d\n" % number * 2)
    assert spool.read(0, 10) == (0, b"000000000\n")
    assert spool.tail(10) == b"000000099\n"
    assert spool.dropped == 2000 - spool.kept > 1000
    assert spool.read(600)[0] > 600


def test_room_is_made_before_anything_is_dropped(tmp_path: Path) -> None:
    budget = Budget(limit=100)
    old, new = Spool(tmp_path / "old.out", budget, QUOTA), Spool(tmp_path / "new.out", budget, QUOTA)

    def make_room() -> bool:
        had = old.kept
        old.discard()
        return had > 0

    budget.make_room = make_room
    old.write(b"o" * 80)
    new.write(b"n" * 80)
    assert (old.kept, old.total, old.dropped, new.kept) == (0, 80, 80, 80)
    new.write(b"n" * 30)
    assert (new.kept, new.total, new.dropped) == (80, 110, 30)
    assert budget.used == 80


def test_a_full_disk_counts_as_dropped_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    spool = Spool(tmp_path / "gone" / "x.out", budget := Budget(), QUOTA)
    (tmp_path / "gone").rmdir()
    spool.write(b"lost")
    assert (spool.total, spool.kept, spool.dropped, budget.used) == (4, 0, 4, 0)
    assert spool.read(0) == (4, b"")
