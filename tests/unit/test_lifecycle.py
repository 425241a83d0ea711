"""Which clock acts next: the rules of DESIGN "States and clocks", with the time passed in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from node.config import Clocks
from node.lifecycle import Due, Use, action_now, last_use, next_due
from node.protocol import BoxState

CLOCKS = Clocks()
HOUR = 3600.0
READY, FROZEN, ARCHIVED = BoxState.READY, BoxState.FROZEN, BoxState.ARCHIVED


def test_a_ready_box_freezes_ten_idle_minutes_after_the_last_call() -> None:
    assert next_due(READY, 0, Use(last_call_at=1000), CLOCKS) == Due("freeze", 1600)


def test_a_running_command_keeps_the_box_awake_beyond_ten_minutes() -> None:  # report 29
    assert next_due(READY, 0, Use(last_call_at=0, commands_running=True), CLOCKS) == Due("freeze", HOUR)


def test_a_running_command_keeps_it_awake_for_an_hour_after_the_last_call_at_most() -> None:
    assert action_now(READY, 0, Use(last_call_at=0, commands_running=True), CLOCKS, HOUR) == "freeze"


def test_a_box_goes_on_for_ten_minutes_after_its_command_ended() -> None:  # report 31
    use = Use(last_call_at=0, last_command_end=1800)
    assert next_due(READY, 0, use, CLOCKS) == Due("freeze", 2400)


def test_page_views_count_as_use() -> None:  # report 76
    assert next_due(READY, 0, Use(last_call_at=0, last_url_at=900), CLOCKS) == Due("freeze", 1500)


def test_page_views_count_for_two_hours_after_the_last_call_at_most() -> None:  # report 32
    assert next_due(READY, 0, Use(last_call_at=0, last_url_at=10 * HOUR), CLOCKS) == Due("freeze", 2 * HOUR + 600)


def test_the_idle_period_begins_anew_with_a_wake() -> None:  # report 25
    woken = Use(last_call_at=50 * HOUR)
    assert action_now(READY, 0, woken, CLOCKS, 50 * HOUR + 599) is None
    assert action_now(READY, 0, woken, CLOCKS, 50 * HOUR + 600) == "freeze"


def test_a_frozen_box_is_archived_a_day_after_its_last_use() -> None:
    assert next_due(FROZEN, 600, Use(last_call_at=0), CLOCKS) == Due("archive", 24 * HOUR)


def test_an_archived_box_is_deleted_after_thirty_days_in_the_archive() -> None:  # report 34: time before it does not count
    assert next_due(ARCHIVED, 1000, Use(last_call_at=0), CLOCKS) == Due("delete", 1000 + 30 * 24 * HOUR)


def test_a_box_that_starts_or_is_gone_has_no_clock() -> None:
    assert next_due(BoxState.STARTING, 0, Use(last_call_at=0), CLOCKS) is None
    assert next_due(BoxState.STOPPED, 0, Use(last_call_at=0), CLOCKS) is None


times = st.floats(min_value=0, max_value=1e9, allow_nan=False)
uses = st.builds(Use, last_call_at=times, last_url_at=times, commands_running=st.booleans(), last_command_end=times, held=st.booleans())


@given(uses)
def test_no_use_keeps_a_box_awake_past_its_caps(use: Use) -> None:
    due = next_due(READY, 0, use, CLOCKS)
    assert due is not None
    assert use.last_call_at + CLOCKS.freeze_after <= due.at <= use.last_call_at + CLOCKS.url_use + CLOCKS.freeze_after


@given(uses, times)
def test_an_action_is_taken_exactly_from_its_time_on(use: Use, now: float) -> None:
    due = next_due(READY, 0, use, CLOCKS)
    assert due is not None
    assert action_now(READY, 0, use, CLOCKS, now) == ("freeze" if now >= due.at else None)


@given(uses)
def test_use_never_begins_before_the_last_call(use: Use) -> None:
    assert last_use(use, CLOCKS) >= use.last_call_at
