"""What this host can do, found out by trying: whether KVM runs a guest, how fast its TSC counts, which QEMU it has. Blocking; for a thread.

That /dev/kvm opens, creates a VM and even runs a few instructions in long mode proves nothing: on a nested host without VMX all of that
works and a stock kernel spins for ever. So the probe boots a kernel, the image's own, until it panics for want of a root disk.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from node.config import NodeConfig, Places
from node.errors import VmError
from node.vmm.command import BOARD, Accel, kernel_line
from node.vmm.snapshot import boot_id

QEMU = "qemu-system-x86_64"
OLDEST = (9, 0)
NEEDED = "x-ignore-shared"
ANSWER_DEADLINE = 20.0  # seconds
BOOT_DEADLINE = 10.0  # seconds; a kernel under KVM is at its panic within one, under emulation in three
RDTSC = bytes.fromhex("0f3148c1e2204809d0c3")  # rdtsc; shl rdx, 32; or rax, rdx; ret

# Newest first; the first of which the host lacks no feature is taken, so that frozen boxes may move between hosts of one kind.
KVM_MODELS = (
    "SapphireRapids-v3", "EPYC-Genoa-v1", "EPYC-Milan-v2", "Icelake-Server-v7", "EPYC-Rome-v4", "Cascadelake-Server-v5",
    "EPYC-v4", "Skylake-Server-v5", "Broadwell-v4", "Haswell-v4", "Westmere-v2", "Nehalem-v2", "Nehalem-v1",
)  # fmt: skip


@dataclass(frozen=True)
class QemuFacts:
    digest: str  # of the binary
    version: str


@dataclass(frozen=True)
class Choice:
    name: Accel
    cpu: str  # for -cpu
    why: str


def choose_accel(accel: str, places: Places) -> Choice:
    """What `accel` of the configuration (auto, kvm, tcg) comes to on this host. `auto` tries once per boot of the host and remembers.

    `kvm` is not tried: it was demanded. VmError when this QEMU knows no CPU model for it.
    """
    if accel == "tcg":
        return Choice("tcg", "max", "configured")
    if accel == "kvm":
        return Choice("kvm", kvm_model(), "configured")
    kernel, memory = kernel_to_try(places.images), places.run / "accel.json"
    question = {"boot": boot_id(), "kernel": str(kernel), "qemu": str(shutil.which(QEMU))}
    if (known := _remembered(memory, question)) is not None:
        return known
    why = why_no_kvm(kernel)
    choice = Choice("tcg", "max", why) if why else Choice("kvm", kvm_model(), "a guest booted")
    memory.parent.mkdir(parents=True, exist_ok=True)
    memory.write_text(json.dumps({"question": question, "choice": asdict(choice)}))
    return choice


def kvm_boots(config: NodeConfig) -> bool:
    """Tries it now, whatever was found before."""
    return why_no_kvm(kernel_to_try(config.places.images)) is None


def why_no_kvm(kernel: Path | None, accel: Accel = "kvm", deadline: float = BOOT_DEADLINE) -> str | None:
    """None if `kernel` ran under `accel` all the way to its panic; else what happened instead."""
    if kernel is None:
        return "no kernel to try it with: no image has been built here"
    argv = [QEMU, "-machine", BOARD, "-accel", accel, "-cpu", "max", "-m", "128M", "-nodefaults", "-no-user-config", "-display", "none"]
    argv += ["-no-reboot", "-serial", "stdio", "-kernel", str(kernel), "-append", kernel_line(accel, tsc_khz())]
    try:
        ran = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=deadline, check=False)
    except subprocess.TimeoutExpired:
        return f"a guest was started and had not booted after {deadline:g} s"
    except OSError as error:
        return str(error)
    if ran.returncode == 0 and b"Kernel panic" in ran.stdout:
        return None
    return ran.stderr.decode(errors="replace").strip()[-300:] or f"QEMU ended with {ran.returncode}"


def kernel_to_try(images: Path) -> Path | None:
    """The newest image's kernel, else the host's own."""
    for found in (images.glob("*/vmlinuz"), Path("/boot").glob("vmlinuz-*")):
        if kernels := sorted(found, key=lambda path: path.stat().st_mtime):
            return kernels[-1]
    return None


def tsc_khz(seconds: float = 0.1) -> int:
    """The rate of the host's TSC, measured over `seconds` and rounded to 100 kHz (at most 1.2 ms a minute off at 2.5 GHz)."""
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
        page.write(RDTSC)
        address = ctypes.c_char.from_buffer(page)
        rdtsc = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(address))

        def sample() -> tuple[int, int, int]:
            before = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
            ticks = rdtsc()  # noqa: F821 (deleted below, when nobody samples any more)
            after = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
            return after - before, ticks, (before + after) // 2

        _, first_ticks, first_time = min(sample() for _ in range(50))  # the one that was interrupted least
        time.sleep(seconds)
        _, last_ticks, last_time = min(sample() for _ in range(50))
        del rdtsc, address  # the page cannot be closed while they point to it
    return round((last_ticks - first_ticks) * 1e6 / (last_time - first_time) / 100) * 100


def qemu_facts(binary: str = QEMU) -> QemuFacts:
    """Which QEMU this is; VmError if it is missing, older than 9, or cannot save a state beside a shared RAM file."""
    path = shutil.which(binary)
    if path is None:
        raise VmError(f"{binary} is not installed", remedy="Install QEMU >= 9: on Debian 12 from backports.")
    version, capabilities = ask(["-machine", "none"], "query-version", "query-migrate-capabilities")
    numbers = version["qemu"]
    text = f"{numbers['major']}.{numbers['minor']}.{numbers['micro']}"
    if (numbers["major"], numbers["minor"]) < OLDEST:
        raise VmError(f"QEMU {text} is too old", remedy="Install QEMU >= 9: on Debian 12 from backports.")
    if NEEDED not in {capability["capability"] for capability in capabilities}:
        raise VmError(f"QEMU {text} cannot migrate with {NEEDED}", remedy="Install QEMU >= 9 as Debian builds it.")
    with Path(path).open("rb") as file:
        return QemuFacts(hashlib.file_digest(file, "sha256").hexdigest(), text)


def kvm_model() -> str:
    """The CPU model for guests under KVM."""
    (definitions,) = ask(["-machine", "microvm", "-accel", "kvm"], "query-cpu-definitions")
    return best_model(definitions)


def best_model(definitions: Iterable[Mapping[str, Any]]) -> str:
    """The first of KVM_MODELS that QEMU's list says lacks nothing on this host. Pure."""
    complete = {definition["name"] for definition in definitions if definition.get("unavailable-features") == []}
    for model in KVM_MODELS:
        if model in complete:
            return model
    raise VmError("no CPU model of QEMU's fits this host", remedy="Set node.accel = 'tcg' for trials.")


def ask(options: list[str], *commands: str) -> list[Any]:
    """What a QEMU that runs nothing answers to these commands of its monitor, in their order."""
    words = "\n".join(json.dumps({"execute": command}) for command in ("qmp_capabilities", *commands, "quit"))
    argv = [QEMU, *options, "-nodefaults", "-no-user-config", "-display", "none", "-S", "-qmp", "stdio"]
    try:
        said = subprocess.run(argv, input=words.encode(), capture_output=True, timeout=ANSWER_DEADLINE, check=True)
        lines = [json.loads(line) for line in said.stdout.splitlines()]
        return [line["return"] for line in lines if "return" in line or "error" in line][1 : len(commands) + 1]
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        raise VmError("QEMU does not answer", cause=str(error)) from error


def _remembered(memory: Path, question: Mapping[str, str]) -> Choice | None:
    try:
        kept = json.loads(memory.read_text())
        return Choice(**kept["choice"]) if kept["question"] == question else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
