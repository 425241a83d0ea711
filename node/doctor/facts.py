"""What this host is like. Looks only: what a probe makes (a namespace, a tap, a nameless file) is gone when the probe ends.

A fact that cannot be found out is None; the check that needs it says so. Probes are independent of each other.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from node.config import NodeConfig
from node.storage.space import free_bytes, total_bytes
from node.storage.sparse import reflinks

T = TypeVar("T")
QEMU = "qemu-system-x86_64"
DEADLINE = 15.0  # seconds for a program that is asked something
TIME_ERROR = 5  # adjtimex: nobody keeps the clock
TABLES = ("raw", "mangle", "nat", "filter")

# In a throw-away namespace: "" when it works, else the first line of what was complained about.
NAMESPACE = ("unshare", "--net", "true")
TAP = ("unshare", "--net", "ip", "tuntap", "add", "dev", "probe0", "mode", "tap")
NFT_RULES = ("unshare", "--net", "iptables-nft", "-t", "nat", "-A", "POSTROUTING", "-j", "MASQUERADE")


@dataclass(frozen=True)
class Qemu:
    version: tuple[int, ...]
    types: frozenset[str]  # machines and devices
    capabilities: frozenset[str]  # of migration


@dataclass(frozen=True)
class Facts:
    """One host at one moment. Sizes in bytes, times in seconds."""

    root: bool
    demands_kvm: bool
    config_problem: str = ""
    kvm_device: bool = False
    kvm_boots: bool | None = None  # a guest really booted with it
    qemu: Qemu | None = None
    tap: str | None = None
    namespace: str | None = None
    legacy_tables: bool | None = None
    nft_rules: str | None = None
    forwarding: bool | None = None
    forward_policy: str | None = None
    docker: bool = False
    ufw: bool = False
    state_folder: str = ""
    reflink: bool | None = None
    disk_free: int | None = None
    disk_total: int | None = None
    memory_total: int | None = None
    memory_available: int | None = None
    unit_memory: int = 0
    clock_kept: bool | None = None
    rtc_ahead: float | None = None  # of the system's clock
    images: tuple[str, ...] = ()
    node_runs: bool = False
    leftovers: tuple[str, ...] = field(default=())  # networks of boxes that no record knows


def gather(config: NodeConfig, *, node_runs: bool, config_problem: str = "", boot_probe: bool = True) -> Facts:
    """All facts; some 2 s, and 10 s more where KVM is there but does not work. Blocking."""
    folder = _existing(config.places.lib)
    memory = _known(_memory) or {}
    return Facts(
        root=os.geteuid() == 0,
        demands_kvm=config.accel == "kvm" or not config.development,
        config_problem=config_problem,
        kvm_device=Path("/dev/kvm").exists(),
        kvm_boots=_known(lambda: _kvm_boots(config)) if boot_probe else None,
        qemu=_known(_qemu),
        tap=_known(lambda: complaint(TAP)),
        namespace=_known(lambda: complaint(NAMESPACE)),
        legacy_tables=_known(_legacy_tables),
        nft_rules=_known(lambda: complaint(NFT_RULES)),
        forwarding=_known(lambda: Path("/proc/sys/net/ipv4/ip_forward").read_text().strip() == "1"),
        forward_policy=_known(_forward_policy),
        docker=Path("/sys/class/net/docker0").exists(),
        ufw=_known(lambda: "ENABLED=yes" in Path("/etc/ufw/ufw.conf").read_text()) or False,
        state_folder=str(config.places.lib),
        reflink=_known(lambda: reflinks(folder)),
        disk_free=_known(lambda: free_bytes(folder)),
        disk_total=_known(lambda: total_bytes(folder)),
        memory_total=memory.get("MemTotal"),
        memory_available=memory.get("MemAvailable"),
        unit_memory=config.unit_memory,
        clock_kept=_known(_clock_kept),
        rtc_ahead=_known(lambda: float(Path("/sys/class/rtc/rtc0/since_epoch").read_text()) - time.time()),
        images=_known(lambda: _images(config)) or (),
        node_runs=node_runs,
        leftovers=() if node_runs else _known(lambda: _networks(config)) or (),
    )


def complaint(command: Sequence[str]) -> str:
    """ "" when the command succeeds, else the first line that it complained with. OSError when it is not installed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False, stdin=subprocess.DEVNULL)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]


def qemu_version(text: str) -> tuple[int, ...]:
    """ "QEMU emulator version 10.0.2 (Debian ...)" -> (10, 0, 2). ValueError for anything else."""
    found = re.match(r"QEMU emulator version (\d+(?:\.\d+)*)", text)
    if not found:
        raise ValueError(f"not a version of QEMU: {text[:80]!r}")
    return tuple(int(part) for part in found[1].split("."))


def _known(find: Callable[[], T]) -> T | None:
    try:
        return find()
    except Exception:  # whatever a probe stumbles over, the other checks are still of use
        return None


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def _kvm_boots(config: NodeConfig) -> bool | None:
    """Tried now, not remembered; None without a kernel to try it with."""
    from node.vmm.probe import kernel_to_try, kvm_boots

    return None if kernel_to_try(config.places.images) is None else kvm_boots(config)


def _qemu() -> Qemu:
    version = subprocess.run([QEMU, "--version"], capture_output=True, text=True, timeout=DEADLINE, check=True).stdout
    commands: tuple[dict[str, Any], ...] = (
        {"execute": "qmp_capabilities"},
        {"execute": "qom-list-types", "arguments": {"abstract": False}},
        {"execute": "query-migrate-capabilities"},
        {"execute": "quit"},
    )
    asked = subprocess.run(
        [QEMU, "-machine", "none", "-nodefaults", "-display", "none", "-qmp", "stdio"],
        input="\n".join(map(json.dumps, commands)),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    answers = [answer["return"] for line in asked.stdout.splitlines() if "return" in (answer := json.loads(line))]
    return Qemu(qemu_version(version), frozenset(t["name"] for t in answers[1]), frozenset(c["capability"] for c in answers[2]))


def _legacy_tables() -> bool:
    return not any(complaint(("unshare", "--net", "iptables-legacy", "-t", table, "-S")) for table in TABLES)


def _forward_policy() -> str:
    rules = subprocess.run(["iptables", "-S", "FORWARD"], capture_output=True, text=True, timeout=DEADLINE, check=True).stdout
    return rules.splitlines()[0].rpartition(" ")[2]


def _memory() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}


def _clock_kept() -> bool:
    """Asks the kernel, so it holds for every NTP client."""
    state: int = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    if state < 0:
        raise OSError("adjtimex")
    return state != TIME_ERROR


def _images(config: NodeConfig) -> tuple[str, ...]:
    from image.store import ImageStore

    return tuple(sorted({image.flavour for image in ImageStore(config.places.images).list()}))


def _networks(config: NodeConfig) -> tuple[str, ...]:
    """Those of boxes without a record: frozen boxes keep theirs while the node is down."""
    import trio

    from node.net.network import list_networks

    recorded = {record.stem for record in (config.places.node / "journal").glob("*.json")}
    return tuple(sorted(trio.run(list_networks, config).keys() - recorded))
