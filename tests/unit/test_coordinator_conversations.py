"""Conversations: who is who, and who is still there."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.config import Presence as Periods
from coordinator.conversations import Conversations, agent_state, identify
from coordinator.errors import BadInput
from coordinator.store.conversations import Presence
from coordinator.store.database import open_database

PERIODS = Periods()
TIMES = st.none() | st.floats(1e9, 2e9)
PRESENCES = st.builds(Presence, st.just("main"), st.just("a"), last_call_at=TIMES, heartbeat_at=TIMES, left_at=TIMES)


def state(now: float, *, calls: int = 0, **signs: float | None) -> str:
    return agent_state(Presence("main", "a", **signs), calls=calls, now=now, periods=PERIODS)  # type: ignore[arg-type]


def test_a_conversation_is_its_agent_header_else_its_session_else_its_key_and_client() -> None:
    assert identify(agent="Ab_-9", session="s1", key_name="laptop", client="codex/1.0") == "Ab_-9"
    assert identify(agent=None, session="s1", key_name="laptop", client="codex/1.0") == "session:s1"
    assert identify(agent=None, session=None, key_name="laptop", client="codex/1.0") == "key:laptop/codex"


@pytest.mark.parametrize("agent", ["a b", "x" * 65, "../x", "é"])
def test_an_agent_header_that_is_no_name_is_refused(agent: str) -> None:
    with pytest.raises(BadInput):
        identify(agent=agent, session=None, key_name="k", client=None)


def test_a_state_follows_calls_heartbeats_and_goodbyes() -> None:  # CONTRACT 2.3, 4.2
    assert state(1000.0, last_call_at=900.0) == "working"
    assert state(1000.0, last_call_at=500.0, heartbeat_at=950.0) == "away"
    assert state(5000.0, last_call_at=500.0, heartbeat_at=4950.0) == "idle"
    assert state(1000.0, last_call_at=500.0, heartbeat_at=800.0) == "left"
    assert state(1000.0, last_call_at=990.0, left_at=995.0) == "left"
    assert state(1000.0, last_call_at=999.0, left_at=995.0) == "working"


def test_a_client_without_heartbeats_is_never_said_to_have_left() -> None:
    assert state(2000.0, last_call_at=1000.0) == "away"
    assert state(9000.0, last_call_at=1000.0) == "idle"


@given(PRESENCES, st.floats(1e9, 2e9))
def test_a_running_call_means_working_whatever_else(presence: Presence, now: float) -> None:
    assert agent_state(presence, calls=1, now=now, periods=PERIODS) == "working"


@given(PRESENCES, st.floats(2e9, 3e9), st.floats(0, 1e6))
def test_without_a_sign_nobody_comes_back(presence: Presence, now: float, later: float) -> None:
    order = ["working", "away", "idle", "left"]
    before = agent_state(presence, calls=0, now=now, periods=PERIODS)
    after = agent_state(presence, calls=0, now=now + later, periods=PERIODS)
    assert order.index(after) >= order.index(before)


async def test_presence_outlives_a_restart(tmp_path: Path) -> None:
    async with open_database(tmp_path / "db") as database:
        before = Conversations(database, PERIODS, lambda: 100_000.0)
        await before.heartbeat("main", "a", "codex/1")
        await before.leave("main", "b")
        after = Conversations(database, PERIODS, lambda: 100_010.0)
        await after.load()
        assert after.state("main", "a") == "idle"
        assert after.state("main", "b") == "left"
        with after.calling("main", "a"):
            assert after.state("main", "a") == "working"
