from __future__ import annotations

import contextlib
import io
import os
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest

from node.cli.copying import split_place
from node.cli.failure import Failure
from node.cli.unpack import unpack


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("box:/a/b", ("box", "/a/b")),
        ("box:", ("box", "/work")),
        ("box:a:b", ("box", "a:b")),
        ("./a:b", (None, "./a:b")),
        ("/x:y", (None, "/x:y")),
        ("plain", (None, "plain")),
        (":/a", (None, ":/a")),
    ],
)
def test_a_place_is_in_a_box_when_a_name_stands_before_the_colon(text: str, place: tuple[str | None, str]) -> None:
    assert split_place(text) == place


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "empty").mkdir(parents=True)
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o751)
    (root / "same").hardlink_to(root / "run.sh")
    (root / "link").symlink_to("/usr/bin/python3")
    (root / "dangling").symlink_to("nowhere")
    (root / "big").write_bytes(os.urandom(300_000))
    return root


def assert_same(copy: Path, project: Path) -> None:
    assert (copy / "empty").is_dir()
    assert stat.S_IMODE((copy / "run.sh").stat().st_mode) == 0o751
    assert (copy / "same").samefile(copy / "run.sh")
    assert (copy / "link").readlink() == Path("/usr/bin/python3")
    assert (copy / "dangling").readlink() == Path("nowhere")
    assert (copy / "big").read_bytes() == (project / "big").read_bytes()


def test_a_folder_goes_in_with_its_modes_and_links(host: Any, project: Path, tmp_path: Path) -> None:
    host.node(host.view())
    shown = host.boxctl("box", "cp", str(project), f"trial:{tmp_path}/copy")
    assert shown.exit_code == 0, shown.stderr
    assert_same(tmp_path / "copy", project)
    assert "copied 5 files" in shown.stderr
    assert shown.stdout == ""


def test_a_folder_comes_out_with_its_modes_and_links(host: Any, project: Path, tmp_path: Path) -> None:
    host.node(host.view())
    shown = host.boxctl("box", "cp", f"trial:{project}", str(tmp_path / "copy"))
    assert shown.exit_code == 0, shown.stderr
    assert_same(tmp_path / "copy", project)


def test_what_goes_to_a_folder_lands_inside_of_it(host: Any, project: Path, tmp_path: Path) -> None:
    host.node(host.view())
    (tmp_path / "there").mkdir()
    assert host.boxctl("box", "cp", str(project / "run.sh"), f"trial:{tmp_path}/there").exit_code == 0
    assert host.boxctl("box", "cp", f"trial:{project}/big", str(tmp_path / "there")).exit_code == 0
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"run.sh", "big"}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("trial:{tmp}/nothing", "{tmp}/x"), 4),
        (("{tmp}/nothing", "trial:/tmp"), 4),
        (("trial:/etc/hostname", "{tmp}/no/such/folder"), 4),
        (("trial:/", "{tmp}/x"), 2),
        (("a", "b"), 2),
        (("trial:/a", "trial:/b"), 2),
        (("{tmp}", "trial:/proc/no/such"), 1),
    ],
)
def test_what_cannot_be_copied_is_said_with_its_own_exit_code(host: Any, tmp_path: Path, words: tuple[str, str], code: int) -> None:
    host.node(host.view())
    shown = host.boxctl("box", "cp", *(word.format(tmp=tmp_path) for word in words))
    assert shown.exit_code == code, shown.stderr
    assert shown.stderr.splitlines()[-2:][0].startswith(("error: ", "cause: "))


def archive(*members: tuple[str, bytes | str, int]) -> io.BytesIO:
    """(name, content, or the target of a link, type)"""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, content, kind in members:
            member = tarfile.TarInfo(name)
            member.type, member.mode = bytes([kind]), 0o6777
            if isinstance(content, str):
                member.linkname = content
            else:
                member.size = len(content)
            tar.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    file.seek(0)
    return file


FILE, HARD, LINK, FOLDER, DEVICE = tarfile.REGTYPE[0], tarfile.LNKTYPE[0], tarfile.SYMTYPE[0], tarfile.DIRTYPE[0], tarfile.BLKTYPE[0]


@pytest.mark.parametrize(
    "members",
    [
        (("x/../../out", b"bad", FILE),),
        (("/x/out", b"bad", FILE),),
        (("x", b"", FOLDER), ("x/l", "{outside}", LINK), ("x/l/file", b"bad", FILE)),
        (("x", b"", FOLDER), ("x/l", "{outside}/secret", LINK), ("x/l", b"bad", FILE)),
        (("x", b"", FOLDER), ("x/l", "../outside/secret", HARD), ("x/l", b"bad", FILE)),
        (("x", b"", FOLDER), ("x/d", "{outside}", LINK), ("x/h", "x/d/secret", HARD), ("x/h", b"bad", FILE)),
        (("x", "{outside}", LINK), ("x/file", b"bad", FILE)),
    ],
)
def test_a_hostile_archive_writes_nothing_outside(tmp_path: Path, members: tuple[tuple[str, bytes | str, int], ...]) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "here"
    outside.mkdir()
    folder.mkdir()
    (outside / "secret").write_text("kept")
    filled = [(name, content.format(outside=outside) if isinstance(content, str) else content, kind) for name, content, kind in members]
    with contextlib.suppress(Failure):
        unpack(archive(*filled), folder, "x")
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_text() == "kept"
    assert not (tmp_path / "out").exists()


def test_an_old_link_at_the_target_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "x" / "l").symlink_to(tmp_path / "kept")
    unpack(archive(("x", b"", FOLDER), ("x/l", b"new", FILE)), tmp_path, "x")
    assert (tmp_path / "kept").read_text() == "kept"
    assert (tmp_path / "x" / "l").read_text() == "new"


def test_devices_are_left_out_and_set_uid_bits_taken_away(tmp_path: Path) -> None:
    assert unpack(archive(("a", b"", FOLDER), ("a/sda", b"", DEVICE), ("a/su", b"x", FILE)), tmp_path, "b") == 1
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["su"]
    assert stat.S_IMODE((tmp_path / "b" / "su").stat().st_mode) == 0o777


def test_a_damaged_archive_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(Failure):
        unpack(io.BytesIO(b"not a tar" * 100), tmp_path, "x")
