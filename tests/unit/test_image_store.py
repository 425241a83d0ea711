"""Images on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from image.store import ImageInUseError, ImageNotFoundError, ImageStore, describe_powershell


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path)


def keep(store: ImageStore, flavour: str, digest: str, built_at: float, **more: Any) -> Path:
    folder = store.folder / f"{flavour}-{digest}"
    folder.mkdir()
    (folder / "disk.raw").write_bytes(bytes(8192))
    (folder / "manifest.json").write_text(json.dumps({"flavour": flavour, "digest": digest, "built_at": built_at, **more}))
    return folder


def nobody(digest: str) -> list[str]:
    return []


def test_an_empty_or_missing_store_has_no_images(store: ImageStore) -> None:
    assert store.list() == []
    assert ImageStore(store.folder / "missing").list() == []
    assert store.find("core") is None


def test_images_are_listed_the_newest_first_with_their_size_on_disk(store: ImageStore) -> None:
    keep(store, "core", "aaaaaaaaaaaa", 1.0)
    folder = keep(store, "full", "bbbbbbbbbbbb", 2.0)
    newest, oldest = store.list()
    assert (newest.flavour, oldest.flavour) == ("full", "core")
    assert newest.disk == folder / "disk.raw"
    assert newest.bytes >= 8192


def test_a_flavour_is_found_by_the_current_recipe_before_the_newest(store: ImageStore) -> None:
    keep(store, "core", "aaaaaaaaaaaa", 1.0)
    keep(store, "core", "bbbbbbbbbbbb", 2.0)
    keep(store, "full", "cccccccccccc", 3.0)
    newest, current = store.show("bbbbbbbbbbbb"), store.show("aaaaaaaaaaaa")
    assert store.find("core") == newest
    assert store.find("core", prefer="aaaaaaaaaaaa") == current
    assert store.find("core", prefer="dddddddddddd") == newest


NO_MANIFESTS = [b"", b"{", b"[]", b"null", b'{"flavour": "core"}', b'{"flavour":"core","digest":"a","built_at":"soon"}']


@pytest.mark.parametrize("manifest", NO_MANIFESTS)
def test_a_folder_without_a_readable_manifest_is_no_image(store: ImageStore, manifest: bytes) -> None:
    (store.folder / "core-eeeeeeeeeeee").mkdir()
    (store.folder / "core-eeeeeeeeeeee/manifest.json").write_bytes(manifest)
    (store.folder / ".scratch").mkdir()
    assert store.list() == []


def test_removing_an_image_leaves_nothing_of_it(store: ImageStore) -> None:
    keep(store, "core", "aaaaaaaaaaaa", 1.0)
    assert store.remove("aaaaaaaaaaaa", nobody).flavour == "core"
    assert list(store.folder.iterdir()) == []


def test_an_image_that_boxes_need_is_not_removed_and_they_are_named(store: ImageStore) -> None:
    keep(store, "core", "aaaaaaaaaaaa", 1.0)
    with pytest.raises(ImageInUseError, match="box x1, template t"):
        store.remove("aaaaaaaaaaaa", lambda digest: ["box x1", "template t"])
    assert store.show("aaaaaaaaaaaa").digest == "aaaaaaaaaaaa"


def test_an_unknown_digest_is_told(store: ImageStore) -> None:
    with pytest.raises(ImageNotFoundError, match="no image ffffffffffff"):
        store.remove("ffffffffffff", nobody)


def test_an_image_says_plainly_whether_it_holds_powershell(store: ImageStore) -> None:
    keep(store, "core", "aaaaaaaaaaaa", 1.0, powershell=False)
    keep(store, "full", "bbbbbbbbbbbb", 2.0, powershell=True)
    assert describe_powershell(store.show("aaaaaaaaaaaa")) == "PowerShell: not in this image"
    assert describe_powershell(store.show("bbbbbbbbbbbb")) == "PowerShell: in this image"
