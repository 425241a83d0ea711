"""Snapshots: which fit, and that each is used once."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.vmm import snapshot
from node.vmm.snapshot import Manifest, compatible

texts = st.text(max_size=4)
numbers = st.integers(0, 3)
manifests = st.builds(
    Manifest,
    generation=numbers, qemu=texts, qemu_version=texts, machine=texts, accel=texts, kernel_line=texts, image=texts,
    memory_mib=numbers, vcpus=numbers, boot_id=texts, durable=st.booleans(),
)  # fmt: skip
FREE = {"generation", "qemu_version", "boot_id", "durable"}  # may differ between saving and loading


@given(manifests, manifests)
def test_a_snapshot_fits_exactly_when_all_that_shapes_the_machine_is_equal(saved: Manifest, now: Manifest) -> None:
    same = all(getattr(saved, f.name) == getattr(now, f.name) for f in fields(Manifest) if f.name not in FREE)
    safe = saved.durable or saved.boot_id == now.boot_id
    assert (compatible(saved, now) is None) == (same and safe)


@given(manifests)
def test_a_snapshot_fits_where_it_was_made(saved: Manifest) -> None:
    assert compatible(saved, replace(saved, generation=saved.generation + 1)) is None


@given(manifests)
def test_after_a_crash_of_the_host_only_a_durable_one_fits(saved: Manifest) -> None:
    now = replace(saved, boot_id=saved.boot_id + "another")
    assert (compatible(saved, now) is None) == saved.durable


MANIFEST = Manifest(3, "digest", "10.0.2", "microvm", "tcg", "line", "image", 1024, 2, "boot")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    (tmp_path / snapshot.STATE).write_bytes(b"state")
    snapshot.write(tmp_path, MANIFEST)
    assert snapshot.read(tmp_path) == MANIFEST
    assert snapshot.make_durable(tmp_path, MANIFEST, []).durable
    assert snapshot.read(tmp_path) == replace(MANIFEST, durable=True)


def test_a_spent_snapshot_is_none(tmp_path: Path) -> None:
    (tmp_path / snapshot.STATE).write_bytes(b"state")
    snapshot.write(tmp_path, MANIFEST)
    snapshot.spend(tmp_path)
    assert snapshot.read(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    snapshot.spend(tmp_path)  # once more does no harm


def test_a_manifest_without_its_state_is_none(tmp_path: Path) -> None:
    snapshot.write(tmp_path, MANIFEST)
    assert snapshot.read(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"generation": "3"}', '{"generation": true}', "[" * 70_000])
def test_a_manifest_that_makes_no_sense_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / snapshot.STATE).write_bytes(b"state")
    (tmp_path / snapshot.MANIFEST).write_text(text)
    assert snapshot.read(tmp_path) is None
