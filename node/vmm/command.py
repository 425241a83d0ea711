"""QEMU's argument list, in one place and pure: a spec and open descriptors in, words out.

QEMU gets descriptors, never paths, so that it needs no rights on the host's folders:
    /dev/fdset/N     what QEMU opens itself (disks, console, saved state): given with -add-fd, matched by access mode
    /proc/self/fd/N  what knows no fd sets (RAM, kernel, initrd, fw_cfg): the inode is opened anew
    fd=N             sockets and the tap

A saved state fits only the machine that made it, to the letter: every option of the board is said (defaults shift between versions of
QEMU), every device has an id, and
their order is fixed, each takes the next free slot. `machine_key` is what a template is kept under.

The firmware is qboot: SeaBIOS 1.16.3, microvm's default with ACPI, never comes to the kernel ("virtio-blk missing headers") when the guest
has exactly 2048 MiB (4 of 4 tries; 1024, 2047, 2049, 3072, 4096 and 8192 boot).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from image.boxd.protocol import FIRST_TOKEN_FW_CFG

Accel = Literal["kvm", "tcg"]

GUEST_MAC = "02:00:00:00:00:02"
BOARD = (
    "microvm,acpi=on,rtc=on,pit=on,pic=on,ioapic2=on,pcie=off,usb=off,isa-serial=on"
    ",auto-kernel-cmdline=off,mem-merge=off,dump-guest-core=off,firmware=qboot.rom"
)
# 512 gave Chromium 79 CPU seconds instead of 84 on a loaded host (a difference within the noise) and took 617 MiB a box instead of 307.
TRANSLATION_CACHE_MIB = 256  # TCG's own memory a box, counted in MachineSpec.overhead
PROCESS_MIB = 96  # QEMU's other memory: measured 55-70 MiB

STATE_SET, CONSOLE_SET, BASE_SET, WORK_SET, KVM_SET, FIRST_OVERLAY_SET = 1, 2, 3, 4, 5, 10


@dataclass(frozen=True)
class MachineSpec:
    """What the guest sees of its computer. `cpu` is QEMU's -cpu: `max` under TCG, a model of `probe.kvm_model` under KVM."""

    memory_mib: int
    vcpus: int
    accel: Accel
    kernel_line: str
    cpu: str = "max"
    binary: str = "qemu-system-x86_64"

    @property
    def overhead(self) -> int:
        """Bytes that a running box takes on the host beside its RAM."""
        return (PROCESS_MIB + (TRANSLATION_CACHE_MIB if self.accel == "tcg" else 0)) << 20

    @property
    def machine_key(self) -> str:
        return f"{BOARD} {_cpu(self)} {self.memory_mib}M {self.vcpus}"


@dataclass(frozen=True)
class Descriptors:
    """Open descriptors that QEMU inherits. `overlays`, one at least, lie on the base; the last is written to."""

    monitor: int  # a listening unix socket
    ram: int
    base: int
    overlays: tuple[int, ...]
    work: int
    console: int  # O_WRONLY | O_APPEND
    tap: int | None = None
    state: int | None = None  # to load; without it QEMU boots the kernel
    kernel: int | None = None
    initrd: int | None = None
    token: int | None = None
    kvm: int | None = None

    def all(self) -> tuple[int, ...]:
        """What must survive the exec."""
        always = (self.monitor, self.ram, self.base, *self.overlays, self.work, self.console)
        return (*always, *(fd for fd in (self.tap, self.state, self.kernel, self.initrd, self.token, self.kvm) if fd is not None))


def kernel_line(accel: Accel, tsc_khz: int) -> str:
    """The guest kernel's command line; `tsc_khz` is the host's, see `probe.tsc_khz`.

    Under TCG the guest counts the host's TSC: told its rate it need not calibrate, which hangs guests that boot on busy cores; trusted it
    need not fall back to jiffies, which lose 16 ms a second. Under KVM the clock is kvm-clock (report 15).
    """
    clock = {"tcg": f"tsc_early_khz={tsc_khz} tsc=reliable", "kvm": "clocksource=kvm-clock"}[accel]
    return f"console=ttyS0 quiet panic=-1 reboot=t {clock} systemd.mask=serial-getty@ttyS0.service"


def qemu_argv(spec: MachineSpec, fds: Descriptors, name: str = "box") -> list[str]:
    """The words that start QEMU for `spec`. With `fds.state` it waits for `migrate-incoming` and stays stopped; else it boots at once."""
    # fmt: off
    argv = [
        spec.binary,
        "-name", name,
        "-machine", f"{BOARD},memory-backend=ram",
        *_accel(spec, fds),
        "-cpu", _cpu(spec),
        "-smp", str(spec.vcpus),
        "-m", f"{spec.memory_mib}M",
        "-object", f"memory-backend-file,id=ram,size={spec.memory_mib}M,mem-path=/proc/self/fd/{fds.ram},share=on",
        "-nodefaults",
        "-no-user-config",
        "-display", "none",
        "-no-reboot",
        "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        "-global", "virtio-mmio.force-legacy=false",
        "-chardev", f"socket,id=monitor,fd={fds.monitor},server=on,wait=off",
        "-mon", "chardev=monitor,mode=control",
        *_given(CONSOLE_SET, fds.console),
        "-chardev", f"file,id=console,path=/dev/fdset/{CONSOLE_SET},append=on",
        "-serial", "chardev:console",
        *_root_disk(fds),
        "-device", f"virtio-blk-device,id=root,drive=overlay{len(fds.overlays)},serial=root",
        *_given(WORK_SET, fds.work),
        "-blockdev", f"driver=raw,node-name=work,discard=unmap,file.driver=file,file.filename=/dev/fdset/{WORK_SET},file.discard=unmap",
        "-device", "virtio-blk-device,id=work,drive=work,serial=work",
        "-netdev", "hubport,id=net,hubid=0" if fds.tap is None else f"tap,id=net,fd={fds.tap},vhost=off",
        "-device", f"virtio-net-device,id=card,netdev=net,mac={GUEST_MAC}",
        "-device", "virtio-rng-device,id=rng",
        "-device", "virtio-balloon-device,id=balloon,free-page-reporting=on",
    ]
    # fmt: on
    if fds.token is not None:  # by descriptor: argv is world-readable
        argv += ["-fw_cfg", f"name={FIRST_TOKEN_FW_CFG},file=/proc/self/fd/{fds.token}"]
    if fds.state is not None:
        return [*argv, *_given(STATE_SET, fds.state), "-incoming", "defer", "-S"]
    argv += ["-kernel", f"/proc/self/fd/{fds.kernel}", "-append", spec.kernel_line]
    return argv if fds.initrd is None else [*argv, "-initrd", f"/proc/self/fd/{fds.initrd}"]


def _cpu(spec: MachineSpec) -> str:
    return "max" if spec.accel == "tcg" else f"{spec.cpu},enforce,vmx=off,svm=off,pmu=off,invtsc=off"


def _accel(spec: MachineSpec, fds: Descriptors) -> list[str]:
    if spec.accel == "tcg":
        return ["-accel", f"tcg,thread=multi,tb-size={TRANSLATION_CACHE_MIB}"]
    return [*_given(KVM_SET, fds.kvm), "-accel", f"kvm,device=/dev/fdset/{KVM_SET}"]


def _root_disk(fds: Descriptors) -> list[str]:
    """Base and overlays as named nodes; no backing file name of a header, which a guest may have written, is ever followed."""
    words, below = _given(BASE_SET, fds.base), "base"
    words += ["-blockdev", f"driver=raw,node-name=base,read-only=on,file.driver=file,file.filename=/dev/fdset/{BASE_SET}"]
    for level, fd in enumerate(fds.overlays, 1):
        number, node = FIRST_OVERLAY_SET + level, f"overlay{level}"
        mode = "discard=unmap,file.discard=unmap" if level == len(fds.overlays) else "read-only=on"
        words += _given(number, fd)
        words += ["-blockdev", f"driver=qcow2,node-name={node},{mode},file.driver=file,file.filename=/dev/fdset/{number},backing={below}"]
        below = node
    return words


def _given(number: int, fd: int | None) -> list[str]:
    return ["-add-fd", f"fd={fd},set={number}"]
