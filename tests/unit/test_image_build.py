"""How a build ends: well, badly, in the middle."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from image.build import BuildError, Step, Work, estimate, program_output, run
from image.recipe import FLAVOURS, Settings

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="programs run in namespaces of their own")


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(tmp_path / "images", FLAVOURS["core"], Settings(), patience=0.0)


def quiet(step: str, fraction: float) -> None:
    pass


def publish(work: Work) -> Iterator[float]:
    """A step that makes an image which holds nothing."""
    (work.out / "manifest.json").write_text(json.dumps({"flavour": "core", "digest": work.digest, "built_at": 1.0}))
    yield 0.5
    work.out.rename(work.images / f"core-{work.digest}")


def download(work: Work) -> Iterator[float]:
    """A step that is under way: packages lie in the unfinished root."""
    work.debs.mkdir(parents=True)
    archives = work.scratch / "root/var/cache/apt/archives"
    archives.mkdir(parents=True)
    (archives / "git_1.deb").write_bytes(b"git")
    yield 0.5


def fail(work: Work) -> Iterator[float]:
    work.log.append("no space left")
    yield 0.1
    raise OSError("the disk is full")


def shown(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".lock"))


def test_the_steps_make_an_image_and_the_bar_only_moves_forward(work: Work) -> None:
    seen: list[tuple[str, float]] = []
    steps = [Step("one", "One", 3, lambda work: iter([0.5, 1.0])), Step("publish", "Publishing", 1, publish)]
    image = run(work, steps, lambda title, fraction: seen.append((title, fraction)))
    assert image.digest == work.digest
    assert shown(work.images) == [image.folder.name]
    assert [title for title, _ in seen] == ["One", "One", "One", "Publishing", "Publishing", "Done"]
    assert [fraction for _, fraction in seen] == [0.0, 0.375, 0.75, 0.75, 0.875, 1.0]


def test_an_image_of_the_same_recipe_is_not_made_again(work: Work) -> None:
    first = run(work, [Step("publish", "Publishing", 1, publish)], quiet)
    assert run(work, [Step("fail", "Failing", 1, fail)], quiet) == first


def test_a_failed_build_leaves_nothing_and_says_which_step_with_the_last_lines(work: Work) -> None:
    with pytest.raises(BuildError, match="fail: the disk is full") as caught:
        run(work, [Step("fail", "Failing", 1, fail), Step("publish", "Publishing", 1, publish)], quiet)
    assert (caught.value.step, caught.value.log) == ("fail", ("no space left",))
    assert shown(work.images) == []


def test_an_interrupted_build_keeps_only_what_it_had_downloaded(work: Work) -> None:
    def interrupt(step: str, fraction: float) -> None:
        if fraction:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(work, [Step("packages", "Installing", 1, download)], interrupt)
    assert shown(work.images) == [".cache"]
    assert shown(work.debs) == ["git_1.deb"]


def test_what_a_killed_build_left_is_removed_by_the_next_and_its_packages_are_kept(work: Work) -> None:
    work.scratch.mkdir(parents=True)
    for _ in download(work):
        pass
    run(work, [Step("publish", "Publishing", 1, publish)], quiet)
    assert not work.scratch.exists()
    assert shown(work.debs) == ["git_1.deb"]


def test_only_one_build_runs_in_a_folder(work: Work) -> None:
    work.images.mkdir()
    with (work.images / ".lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BuildError, match="another build is running"):
            run(work, [Step("publish", "Publishing", 1, publish)], quiet)
    assert run(work, [Step("publish", "Publishing", 1, publish)], quiet).flavour == "core"


@needs_root
def test_a_program_that_fails_is_named_with_its_last_lines(work: Work) -> None:
    def step(work: Work) -> Iterator[float]:
        yield from (0.5 for _ in program_output(work, ["sh", "-c", "echo one; echo two >&2; printf three; exit 3"]))

    with pytest.raises(BuildError, match="step: sh ended with 3") as caught:
        run(work, [Step("step", "Step", 1, step)], quiet)
    assert caught.value.log == ("one", "two", "three")


@needs_root
def test_no_program_outlives_an_interrupted_step(work: Work, tmp_path: Path) -> None:
    def step(work: Work) -> Iterator[float]:
        yield from (0.5 for _ in program_output(work, ["sh", "-c", f"sleep 1000 & echo $$; exec sleep 1000 {tmp_path.name}"]))

    def interrupt(title: str, fraction: float) -> None:
        if fraction:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(work, [Step("step", "Step", 1, step)], interrupt)
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if tmp_path.name.encode() in _read(path)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_what_an_image_takes_is_told_beforehand() -> None:
    assert estimate("core").minutes < estimate("full").minutes
    assert estimate("core").gigabytes < estimate("full").gigabytes
