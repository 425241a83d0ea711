"""One fleet with real microVMs for all tests of this folder; each test starts and deletes its own boxes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.box.fleet import Fleet, running_fleet


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    with running_fleet() as running:
        yield running
