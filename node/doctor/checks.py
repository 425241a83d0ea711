"""What the facts mean: one function a check, and CHECKS in the order in which an operator wants to mend things. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from node.doctor.facts import Facts

Status = Literal["ok", "warn", "fail"]
GIB = 1 << 30

OLDEST_QEMU = (9,)  # 7.2 hangs in early boot on microvm
NEEDED_TYPES = (
    "microvm-machine",
    "memory-backend-file",
    "virtio-blk-device",
    "virtio-net-device",
    "virtio-rng-device",
    "virtio-balloon-device",
)
NEEDED_CAPABILITIES = ("x-ignore-shared", "events")
SMALLEST_MEMORY, SMALL_MEMORY = 2 * GIB, 4 * GIB
SMALLEST_DISK, SMALL_DISK = 5 * GIB, 20 * GIB
CLOCKS_APART = 5.0  # seconds between the system's clock and the RTC


@dataclass(frozen=True)
class Check:
    """`warn`: boxes work, but not as well as they could. `fix` is empty when all is well."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def judge(facts: Facts) -> list[Check]:
    """Every check, in order."""
    return [check(facts) for check in CHECKS]


def root(facts: Facts) -> Check:
    if facts.root:
        return Check("root", "ok", "running as root")
    return Check("root", "fail", "not running as root, so most of the other checks could not look", "sudo boxctl doctor")


def configuration(facts: Facts) -> Check:
    if facts.config_problem:
        return Check("configuration", "fail", facts.config_problem, "Correct the configuration file; without it all defaults hold.")
    return Check("configuration", "ok", f"state in {facts.state_folder}")


def kvm(facts: Facts) -> Check:
    if facts.kvm_boots:
        return Check("kvm", "ok", "a guest boots with KVM")
    if facts.kvm_boots is None and facts.kvm_device:
        return Check("kvm", "warn", "/dev/kvm is there; it is tried with an image's kernel: there is none", "boxctl image build core")
    why = "/dev/kvm is there but no guest boots with it" if facts.kvm_device else "no /dev/kvm"
    fix = "Use bare metal, or a VM with nested virtualisation; switch VT-x or AMD-V on in the firmware; modprobe kvm_intel or kvm_amd."
    if facts.demands_kvm:
        return Check("kvm", "fail", f"{why}, and this node demands KVM", fix)
    return Check("kvm", "warn", f"{why}: boxes run under software emulation, 10 to 30 times slower; for development only", fix)


def qemu(facts: Facts) -> Check:
    install = "apt-get install qemu-system-x86 (Debian 13; on Debian 12 from backports), or run node/provision.sh"
    if facts.qemu is None:
        return Check("qemu", "fail", "QEMU is not installed or does not answer", install)
    version = ".".join(map(str, facts.qemu.version))
    if facts.qemu.version < OLDEST_QEMU:
        return Check("qemu", "fail", f"QEMU {version} is too old: it hangs in early boot", install)
    missing = [name for name in NEEDED_TYPES if name not in facts.qemu.types]
    missing += [name for name in NEEDED_CAPABILITIES if name not in facts.qemu.capabilities]
    if missing:
        return Check("qemu", "fail", f"QEMU {version} lacks {', '.join(missing)}", install)
    return Check("qemu", "ok", f"QEMU {version} with all that is needed")


def namespaces(facts: Facts) -> Check:
    if facts.namespace == "":
        return Check("namespaces", "ok", "a network namespace can be made")
    found = facts.namespace or "unshare does not run"
    return Check("namespaces", "fail", f"no network namespace: {found}", "Run on a host, not in a container.")


def tun(facts: Facts) -> Check:
    if facts.tap == "":
        return Check("tun", "ok", "a tap can be made")
    return Check("tun", "fail", f"no tap: {facts.tap or '`ip` does not run'}", "modprobe tun; apt-get install iproute2")


def iptables(facts: Facts) -> Check:
    if facts.legacy_tables:
        return Check("iptables", "ok", "the kernel has the legacy tables")
    if facts.nft_rules == "":
        return Check("iptables", "ok", "no legacy tables; rules go through nftables")
    fix = "apt-get install iptables; modprobe -a ip_tables iptable_filter iptable_nat iptable_mangle iptable_raw, or nf_tables"
    return Check("iptables", "fail", f"neither legacy tables nor nftables: {facts.nft_rules or 'iptables is not installed'}", fix)


def forwarding(facts: Facts) -> Check:
    if facts.ufw:
        fix = "ufw reload takes our rules away: restart the node after it."
        return Check("forwarding", "warn", "ufw is on: its rules come and go beside ours", fix)
    if facts.docker and facts.forward_policy == "DROP":
        return Check("forwarding", "ok", "this host's Docker drops what it does not know; the node's rules stand before it")
    if facts.forwarding is False and not facts.node_runs:
        return Check("forwarding", "ok", "off; the node switches net.ipv4.ip_forward on when it starts")
    if facts.forwarding is False:
        return Check("forwarding", "fail", "switched off under a running node: boxes reach nothing", "sysctl -w net.ipv4.ip_forward=1")
    if facts.forwarding is None:
        return Check("forwarding", "warn", "whether this host forwards could not be found out", "cat /proc/sys/net/ipv4/ip_forward")
    return Check("forwarding", "ok", "on")


def reflink(facts: Facts) -> Check:
    if facts.reflink:
        return Check("reflink", "ok", f"files in {facts.state_folder} share their blocks: starts copy no memory")
    fix = f"Put {facts.state_folder} on XFS or btrfs."
    return Check("reflink", "warn", "no reflinks in the state folder: each start copies the template's memory, 0.1 to 0.3 s", fix)


def space(facts: Facts) -> Check:
    if facts.disk_free is None:
        return Check("space", "warn", f"free space of {facts.state_folder} could not be found out", f"df {facts.state_folder}")
    detail = f"{facts.disk_free / GIB:.0f} GB free for {facts.state_folder}"
    fix = "Delete boxes and images that nobody needs (boxctl box rm, boxctl image rm), or give it a larger disk."
    status: Status = "fail" if facts.disk_free < SMALLEST_DISK else "warn" if facts.disk_free < SMALL_DISK else "ok"
    return Check("space", status, detail, "" if status == "ok" else fix)


def memory(facts: Facts) -> Check:
    if facts.memory_total is None or facts.memory_available is None:
        return Check("memory", "warn", "the host's memory could not be found out", "cat /proc/meminfo")
    detail = f"{facts.memory_available / GIB:.1f} of {facts.memory_total / GIB:.1f} GB available"
    if facts.unit_memory > facts.memory_total:
        needed = f"one box takes {facts.unit_memory / GIB:.1f} GB"
        return Check("memory", "fail", f"{detail}, but {needed}", "Lower node.unit_memory, or leave it out.")
    if facts.memory_total < SMALLEST_MEMORY:
        return Check("memory", "fail", detail, "A host needs 2 GB, better 16.")
    if facts.memory_total < SMALL_MEMORY:
        return Check("memory", "warn", detail, "Boxes will be small and few: give the host more memory.")
    return Check("memory", "ok", detail)


def clock(facts: Facts) -> Check:
    if facts.rtc_ahead is not None and abs(facts.rtc_ahead) > CLOCKS_APART:
        way = "ahead of" if facts.rtc_ahead > 0 else "behind"
        detail = f"the hardware clock is {abs(facts.rtc_ahead):.0f} s {way} the system's"
        return Check("clock", "warn", detail, "hwclock --systohc, once the system's clock is right")
    if facts.clock_kept is False:
        return Check("clock", "warn", "nobody keeps this host's clock right, and boxes follow it", "apt-get install systemd-timesyncd")
    if facts.clock_kept is None:
        return Check("clock", "warn", "whether the clock is kept right could not be found out", "timedatectl")
    return Check("clock", "ok", "kept right")


def image(facts: Facts) -> Check:
    if facts.images:
        return Check("image", "ok", f"built: {', '.join(facts.images)}")
    return Check("image", "warn", "no image is built yet", "boxctl image build full (boxctl up does it)")


def leftovers(facts: Facts) -> Check:
    if not facts.leftovers:
        return Check("leftovers", "ok", "nothing left by a node that ended")
    found = f"networks of {len(facts.leftovers)} boxes that no record knows: {', '.join(facts.leftovers[:5])}"
    return Check("leftovers", "warn", found, "boxctl up: the node removes them when it starts.")


CHECKS: tuple[Callable[[Facts], Check], ...] = (
    root,
    configuration,
    kvm,
    qemu,
    namespaces,
    tun,
    iptables,
    forwarding,
    reflink,
    space,
    memory,
    clock,
    image,
    leftovers,
)
