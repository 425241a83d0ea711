"""What an image is made of, told as data: the recipe, the mirror, the initramfs."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from image import initramfs, mirror, recipe
from image.recipe import FLAVOURS, Flavour, Settings

CORE, FULL = FLAVOURS["core"], FLAVOURS["full"]

# As `apt-get indextargets` of a Debian 12 host with other people's repositories says it: origin|label|codename|archive
BOOKWORM = """\
Docker|Docker CE|bookworm|https://docker.example/linux/debian/
Debian Backports|Debian Backports|bookworm-backports|http://mirror.example/debian/
Debian|Debian-Security|bookworm-security|http://security.example/debian-security/
Debian|Debian|bookworm-updates|http://elsewhere.example/debian/
Debian|Debian|bookworm|http://mirror.example/debian/
. nodistro|. nodistro|nodistro|https://node.example/
"""


def test_the_guest_gets_the_hosts_own_mirror_and_its_security_mirror() -> None:
    assert mirror.derive(BOOKWORM).sources("trixie") == (
        "deb http://mirror.example/debian trixie main\n"
        "deb http://mirror.example/debian trixie-updates main\n"
        "deb http://security.example/debian-security trixie-security main\n"
    )


def test_a_host_without_a_security_mirror_gives_the_guest_none() -> None:
    found = mirror.derive("Debian|Debian|trixie|http://mirror.example/debian/\n")
    assert found == mirror.Mirror("http://mirror.example/debian", None)
    assert "security" not in found.sources("trixie")


def test_a_list_of_mirrors_on_the_host_becomes_the_lists_first_mirror() -> None:
    targets = "Debian|Debian|trixie|mirror+file:/etc/apt/mirrors/debian.list/\n"
    lists = {"/etc/apt/mirrors/debian.list": "https://first.example/debian\nhttps://second.example/debian\n"}
    assert mirror.derive(targets, lists.__getitem__).main == "https://first.example/debian"


@pytest.mark.parametrize("targets", ["", "|||\n", BOOKWORM.splitlines()[0], "Debian|Debian-Security|trixie-security|http://s.example/\n"])
def test_a_host_without_a_debian_archive_is_told_what_to_do(targets: str) -> None:
    with pytest.raises(mirror.NoMirrorError, match="apt-get update"):
        mirror.derive(targets)


@given(st.text())
def test_whatever_apt_says_gives_a_mirror_or_a_plain_error(said: str) -> None:
    with contextlib.suppress(mirror.NoMirrorError):
        assert mirror.derive(said, lambda path: "http://mirror.example").main is not None


def test_the_full_image_holds_all_of_the_core_image() -> None:
    assert set(CORE.packages) <= set(FULL.packages)
    assert dict(recipe.files_of(CORE)).items() <= dict(recipe.files_of(FULL)).items()


@pytest.mark.parametrize("flavour", FLAVOURS.values(), ids=FLAVOURS)
def test_no_package_is_named_twice(flavour: Flavour) -> None:
    assert sorted(flavour.packages) == sorted(set(flavour.packages))


def test_one_recipe_has_one_digest_and_flavours_differ() -> None:
    assert recipe.image_digest(CORE, Settings(), b"init") == recipe.image_digest(CORE, Settings(), b"init")
    assert recipe.image_digest(CORE, Settings(), b"init") != recipe.image_digest(FULL, Settings(), b"init")


@pytest.mark.parametrize("change", [{"packages": (*CORE.packages, "cowsay")}, {"files": ("core", "full")}, {"disk": 5 << 30}])
def test_another_recipe_is_another_image(change: dict[str, Any]) -> None:
    other = dataclasses.replace(CORE, **change)
    assert recipe.root_digest(other, Settings()) != recipe.root_digest(CORE, Settings())
    assert recipe.image_digest(other, Settings(), b"init") != recipe.image_digest(CORE, Settings(), b"init")


def test_a_better_estimate_does_not_make_another_image() -> None:
    other = dataclasses.replace(CORE, installed=1, minutes=99, gigabytes=99.0)
    assert recipe.image_digest(other, Settings(), b"init") == recipe.image_digest(CORE, Settings(), b"init")


def test_another_initramfs_is_another_image_on_the_same_root() -> None:
    assert recipe.image_digest(CORE, Settings(), b"one") != recipe.image_digest(CORE, Settings(), b"two")


def test_a_powershell_source_is_told_apart_by_its_content_not_its_path(tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in ("one.tar.gz", "two.tar.gz", "three.tar.gz"))
    for path, content in ((one, b"7.4"), (two, b"7.4"), (three, b"7.5")):
        path.write_bytes(content)
    of = [recipe.root_digest(CORE, Settings(powershell_source=str(path))) for path in (one, two, three)]
    assert of[0] == of[1] != of[2]
    assert recipe.root_digest(CORE, Settings()) not in of


MODULES_DEP = """\
kernel/drivers/virtio/virtio_mmio.ko.xz:
kernel/drivers/net/virtio_net.ko.xz: kernel/drivers/net/net_failover.ko.xz kernel/net/core/failover.ko.xz
kernel/drivers/net/net_failover.ko.xz: kernel/net/core/failover.ko.xz
kernel/net/core/failover.ko.xz:
kernel/drivers/char/hw_random/virtio-rng.ko.zst:
"""


def test_a_module_is_loaded_after_all_that_it_needs_and_once() -> None:
    order = initramfs.load_order(MODULES_DEP, "kernel/fs/ext4/ext4.ko\n", ["virtio_net", "net_failover", "ext4", "virtio_rng"])
    assert [Path(file).name for file in order] == ["failover.ko.xz", "net_failover.ko.xz", "virtio_net.ko.xz", "virtio-rng.ko.zst"]


def test_a_module_that_the_kernel_does_not_have_is_named() -> None:
    with pytest.raises(LookupError, match="no module virtio_blk"):
        initramfs.load_order(MODULES_DEP, "", ["virtio_blk"])


def test_the_archive_is_one_that_cpio_reads_and_always_the_same(tmp_path: Path) -> None:
    entries = [initramfs.Entry("bin", 0o40755), initramfs.Entry("bin/odd", 0o100755, b"12345"), initramfs.Entry("init", 0o100755, b"#!")]
    made = initramfs.archive(entries)
    assert made == initramfs.archive(entries)
    unpack = ["cpio", "--extract", "--make-directories", "--quiet", "--no-absolute-filenames"]
    subprocess.run(unpack, cwd=tmp_path, input=made, check=True)
    assert (tmp_path / "bin/odd").read_bytes() == b"12345"
    assert (tmp_path / "init").stat().st_mode == 0o100755


def test_the_first_script_finds_its_disk_by_label_and_gives_up_in_time() -> None:
    text = initramfs.script(["virtio_blk.ko"], "boxroot").decode()
    assert "findfs LABEL=boxroot" in text
    assert "/dev/vd" not in text
    assert subprocess.run(["sh", "-n"], input=text.encode(), check=False).returncode == 0
