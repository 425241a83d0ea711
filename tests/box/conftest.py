"""One fleet with real microVMs for all tests of this folder, and a box for all tests of a file that asks for one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.box.fleet import Agent, Fleet, running_fleet

# The SDK's client leaves generators of httpx2 to the garbage collector.
SDK_WARNINGS = ("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "fleet" in getattr(item, "fixturenames", ()):
            for warning in SDK_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    with running_fleet() as running:
        yield running


@pytest.fixture(scope="module")
def box(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[str]:
    started = fleet.start(request.module.__name__.rpartition(".")[2])
    yield started
    fleet.destroy(started)


@pytest.fixture
async def agent(fleet: Fleet) -> AsyncIterator[Agent]:
    async with fleet.agent() as connected:
        yield connected
