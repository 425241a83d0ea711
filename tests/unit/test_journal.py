"""The journal: what a restarted daemon finds."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from node.journal import BoxRecord, Journal, read_record
from node.protocol import BoxState

RECORD = BoxRecord(
    id="abcdefghijkl",
    name="shop",
    state=BoxState.READY,
    flavour="core",
    size=1,
    image="d1",
    template="t1",
    machine_id="0" * 32,
    hostname="box-abcdefghijkl",
    created_at=1.0,
    state_since=2.0,
    last_call_at=3.0,
    token="secret",
)


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    Journal(tmp_path / "journal").write(RECORD, durable=True)
    assert list(Journal(tmp_path / "journal").load()) == [RECORD]


def test_the_last_write_wins_and_leaves_no_other_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write(RECORD)
    journal.write(frozen := replace(RECORD, state=BoxState.FROZEN))
    assert list(journal.load()) == [frozen]
    assert [path.name for path in tmp_path.iterdir()] == ["abcdefghijkl.json"]


def test_a_removed_record_is_gone_and_may_be_removed_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write(RECORD)
    journal.remove(RECORD.id)
    journal.remove(RECORD.id)
    assert list(journal.load()) == []


def test_a_torn_record_is_set_aside_and_the_others_are_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write(RECORD)
    (tmp_path / "torntorntorn.json").write_text('{"id": "torntorn')
    assert list(journal.load()) == [RECORD]
    assert (tmp_path / "torntorntorn.unreadable").exists()


def test_only_root_reads_what_holds_a_token(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.write(RECORD)
    assert stat.S_IMODE((tmp_path / "journal").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "journal" / "abcdefghijkl.json").stat().st_mode) == 0o600
    assert "secret" not in repr(RECORD)


@given(st.dictionaries(st.text(min_size=1), st.integers()))
def test_fields_of_a_newer_version_do_not_hurt(extra: dict[str, int]) -> None:
    known = {**RECORD.__dict__, "state": "ready"}
    assert read_record({**extra, **known}) == RECORD
