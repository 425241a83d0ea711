"""QEMU's argument list: what it must say, and what must never be in it."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from node.vmm.command import Descriptors, MachineSpec, kernel_line, qemu_argv

SPEC = MachineSpec(memory_mib=1024, vcpus=2, accel="tcg", kernel_line=kernel_line("tcg", 2_100_000))
BOOT = Descriptors(monitor=3, ram=4, base=5, overlays=(6,), work=7, console=8, tap=9, kernel=10, initrd=11, token=12)
LOAD = replace(BOOT, overlays=(6, 13), kernel=None, initrd=None, token=None, state=14)


def test_no_path_of_the_host_is_ever_said() -> None:
    for fds in (BOOT, LOAD):
        paths = re.findall(r"(?<![\w.])/[\w/.-]+", " ".join(qemu_argv(SPEC, fds)))
        assert all(path.startswith(("/dev/fdset/", "/proc/self/fd/")) for path in paths)


def test_every_descriptor_is_used_and_inherited() -> None:
    for fds in (BOOT, LOAD):
        said = {int(n) for n in re.findall(r"(?:fd=|/proc/self/fd/)(\d+)", " ".join(qemu_argv(SPEC, fds)))}
        assert said == set(fds.all())


def test_the_saving_and_the_loading_machine_are_the_same_to_the_letter() -> None:
    def shape(fds: Descriptors) -> list[str]:
        argv = qemu_argv(SPEC, fds)
        fixed = ("-machine", "-cpu", "-smp", "-m", "-device", "-global", "-accel")
        same = [f"{option} {value}" for option, value in pairwise(argv) if option in fixed]
        return [re.sub(r"drive=overlay\d+", "drive=top", line) for line in same]

    assert shape(BOOT) == shape(LOAD)


def test_the_box_overlay_is_the_only_one_written_to() -> None:
    nodes = [word for word in qemu_argv(SPEC, LOAD) if word.startswith("driver=") and "work" not in word]
    assert ["read-only=on" in node for node in nodes] == [True, True, False]
    assert "backing=base" in nodes[1]
    assert "backing=overlay1" in nodes[2]


def test_the_token_is_not_in_the_arguments_but_in_a_descriptor() -> None:
    argv = qemu_argv(SPEC, BOOT)
    assert argv[argv.index("-fw_cfg") + 1] == "name=opt/boxfleet/token,file=/proc/self/fd/12"


def test_a_loaded_machine_waits_and_needs_no_kernel() -> None:
    argv = qemu_argv(SPEC, LOAD)
    assert argv[-3:] == ["-incoming", "defer", "-S"]
    assert "-kernel" not in argv


def test_everything_that_the_sandbox_can_deny_is_denied() -> None:
    argv = qemu_argv(SPEC, BOOT)
    assert argv[argv.index("-sandbox") + 1] == "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


def test_kvm_comes_as_a_descriptor_with_a_named_model() -> None:
    argv = qemu_argv(replace(SPEC, accel="kvm", cpu="Haswell-v4"), replace(BOOT, kvm=20))
    assert argv[argv.index("-cpu") + 1] == "Haswell-v4,enforce,vmx=off,svm=off,pmu=off,invtsc=off"
    assert argv[argv.index("-accel") + 1] == "kvm,device=/dev/fdset/5"


@pytest.mark.parametrize(("accel", "clock"), [("tcg", "tsc_early_khz=2100000 tsc=reliable"), ("kvm", "clocksource=kvm-clock")])  # report 15
def test_the_guest_is_told_which_clock_to_trust(accel: str, clock: str) -> None:
    line = kernel_line("kvm" if accel == "kvm" else "tcg", 2_100_000)
    assert clock in line
    assert "systemd.mask=serial-getty@ttyS0.service" in line
