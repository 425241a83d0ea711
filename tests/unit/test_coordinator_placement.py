"""Placement: fits, then most free memory; and what a node's refusal means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.errors import ImageMissing, NoCapacity
from coordinator.placement import GIB, Candidate, after_failure, choose_flavour, place
from node.protocol import Capacity, Hop, ImageView, NodeView


def candidate(
    name: str = "n", *, units: int = 8, used: int = 0, promised: int = 0, flavours: tuple[str, ...] = ("core",), accel: str = "kvm",
    development: bool = False, ready: bool = True,
) -> Candidate:  # fmt: skip
    capacity = Capacity(
        memory_total=units * GIB, memory_used=used * GIB, disk_total=GIB, disk_free=GIB, vcpus=units * 2, vcpus_used=used * 2,
        unit_memory=GIB, unit_vcpus=2, unit_work=GIB,
    )  # fmt: skip
    images = [ImageView(flavour=flavour, digest=flavour, built_at=0, bytes=1) for flavour in flavours]
    traits = {"id": name, "version": "0", "pid": 1, "ready": ready, "accel": accel, "development": development, "boxes": []}
    return Candidate(NodeView.model_validate(traits | {"capacity": capacity, "images": images}), promised)


NODES = st.lists(
    st.builds(
        candidate, units=st.integers(0, 12), used=st.integers(0, 6), promised=st.integers(0, 6), ready=st.booleans(),
        flavours=st.sampled_from([("core",), ("full",), ("core", "full"), ()]), accel=st.sampled_from(["kvm", "tcg", "unknown"]),
        development=st.booleans(),
    ),
    max_size=6,
).map(lambda nodes: [Candidate(node.view.model_copy(update={"id": f"n{i}"}), node.promised) for i, node in enumerate(nodes)])  # fmt: skip


@given(NODES, st.sampled_from([1, 2, 4]), st.sets(st.sampled_from(["n0", "n1", "n2"])), st.booleans())
def test_a_placed_box_fits_on_a_node_that_may_run_it_and_none_has_more_room(
    nodes: list[Candidate], size: int, excluded: set[str], development: bool
) -> None:
    able = [
        node
        for node in nodes
        if node.view.ready
        and (node.view.accel == "kvm" or (node.view.development and development))
        and node.has("core")
        and node.fits(size)
        and node.view.id not in excluded
    ]
    try:
        chosen = place(nodes, flavour="core", size=size, excluded=excluded, development=development)
    except (NoCapacity, ImageMissing):
        assert able == []
        return
    [node] = [node for node in able if node.view.id == chosen]
    assert node.free_memory == max(other.free_memory for other in able)


@given(st.lists(st.sampled_from([1, 2, 4]), max_size=20))
def test_promises_never_exceed_what_there_is(sizes: list[int]) -> None:
    promised = 0
    for size in sizes:
        node = candidate(units=8, promised=promised)
        try:
            place([node], flavour="core", size=size, excluded=(), development=False)
        except NoCapacity:
            assert promised + size > 8
        else:
            promised += size
    assert promised <= 8


def test_a_promise_that_the_node_counts_itself_is_not_counted_twice() -> None:
    node = candidate("n")
    assert node.promising([("n", "a", 2), ("other", "b", 4)]).promised == 2


def test_no_room_names_the_limit_and_what_is_used_of_it() -> None:  # report 71
    with pytest.raises(NoCapacity) as caught:
        place([candidate("n", units=4, used=3)], flavour="core", size=2, excluded=(), development=False)
    assert "n: memory 3.0 of 4.0 GiB used" in caught.value.cause
    with pytest.raises(NoCapacity) as caught:
        place([], flavour="core", size=1, excluded=(), development=False)
    assert caught.value.cause == "No node is connected."


def test_a_missing_image_is_no_lack_of_room() -> None:  # report 69
    with pytest.raises(ImageMissing):
        place([candidate(flavours=("full",))], flavour="core", size=1, excluded=(), development=False)


@pytest.mark.parametrize(
    ("code", "hop", "then"),
    [
        ("no_capacity", Hop.NODE, "another_node"),
        ("bad_request", Hop.AGENT, "give_up"),
        ("vm_failed", Hop.VM, "exclude_node"),
        ("image_missing", Hop.NODE, "exclude_node"),
        ("node_unreachable", Hop.NODE, "exclude_node"),
    ],
)
def test_a_refusal_leads_to_one_of_three_ways(code: str, hop: Hop, then: str) -> None:  # report 69
    assert after_failure(code, hop) == then


@pytest.mark.parametrize(
    ("asked", "default", "there", "chosen"),
    [("core", "full", ("full",), "core"), (None, "mine", (), "mine"), (None, "", ("core", "full"), "full"), (None, "", ("core",), "core")],
)
def test_the_flavour_is_what_was_asked_for_or_the_best_there_is(
    asked: str | None, default: str, there: tuple[str, ...], chosen: str
) -> None:
    assert choose_flavour([candidate(flavours=there)], asked=asked, default=default, development=False) == chosen
