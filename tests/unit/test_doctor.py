from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.config import NodeConfig, Places
from node.doctor.checks import CHECKS, NEEDED_CAPABILITIES, NEEDED_TYPES, Check, judge
from node.doctor.facts import Facts, Qemu, complaint, gather, qemu_version

GIB = 1 << 30
GOOD = Facts(
    root=True,
    demands_kvm=True,
    kvm_device=True,
    kvm_boots=True,
    qemu=Qemu((10, 0, 2), frozenset(NEEDED_TYPES), frozenset(NEEDED_CAPABILITIES)),
    tap="",
    namespace="",
    legacy_tables=True,
    nft_rules="",
    forwarding=True,
    forward_policy="ACCEPT",
    state_folder="/var/lib/boxfleet",
    reflink=True,
    disk_free=100 * GIB,
    disk_total=200 * GIB,
    memory_total=64 * GIB,
    memory_available=60 * GIB,
    clock_kept=True,
    rtc_ahead=0.3,
    images=("core", "full"),
)


def found(name: str, **facts: Any) -> Check:
    return next(check for check in judge(replace(GOOD, **facts)) if check.name == name)


def test_a_good_host_has_nothing_to_mend() -> None:
    assert {(check.status, check.fix) for check in judge(GOOD)} == {("ok", "")}
    assert len({check.name for check in judge(GOOD)}) == len(CHECKS)


@pytest.mark.parametrize(
    ("name", "status", "facts"),
    [
        ("root", "fail", {"root": False}),
        ("configuration", "fail", {"config_problem": "node.bogus is not a setting"}),
        ("kvm", "fail", {"kvm_boots": False}),
        ("kvm", "warn", {"kvm_boots": False, "demands_kvm": False}),
        ("kvm", "warn", {"kvm_boots": None}),
        ("kvm", "fail", {"kvm_boots": None, "kvm_device": False}),
        ("qemu", "fail", {"qemu": None}),
        ("qemu", "fail", {"qemu": Qemu((7, 2, 1), frozenset(NEEDED_TYPES), frozenset(NEEDED_CAPABILITIES))}),
        ("qemu", "fail", {"qemu": Qemu((10, 0), frozenset(NEEDED_TYPES), frozenset())}),
        ("namespaces", "fail", {"namespace": "unshare failed: Operation not permitted"}),
        ("tun", "fail", {"tap": "open: No such file or directory"}),
        ("iptables", "ok", {"legacy_tables": False}),
        ("iptables", "fail", {"legacy_tables": False, "nft_rules": "not supported"}),
        ("iptables", "fail", {"legacy_tables": None, "nft_rules": None}),
        ("forwarding", "ok", {"forwarding": False}),
        ("forwarding", "fail", {"forwarding": False, "node_runs": True}),
        ("forwarding", "warn", {"ufw": True}),
        ("forwarding", "ok", {"docker": True, "forward_policy": "DROP"}),
        ("reflink", "warn", {"reflink": False}),
        ("space", "fail", {"disk_free": 4 * GIB}),
        ("space", "warn", {"disk_free": 10 * GIB}),
        ("space", "warn", {"disk_free": None}),
        ("memory", "fail", {"memory_total": GIB}),
        ("memory", "warn", {"memory_total": 3 * GIB}),
        ("memory", "fail", {"unit_memory": 128 * GIB}),
        ("clock", "warn", {"clock_kept": False}),
        ("clock", "warn", {"rtc_ahead": -3600.0}),
        ("image", "warn", {"images": ()}),
        ("leftovers", "warn", {"leftovers": ("abcdefghij12",)}),
    ],
)
def test_what_is_not_right_is_named_with_a_fix(name: str, status: str, facts: dict[str, Any]) -> None:
    check = found(name, **facts)
    assert check.status == status
    assert bool(check.fix) == (status != "ok")


def test_a_host_of_which_nothing_is_known_is_judged_all_the_same() -> None:
    assert len(judge(Facts(root=False, demands_kvm=False))) == len(CHECKS)


def test_the_detail_names_what_qemu_lacks() -> None:
    assert "virtio-blk-device" in found("qemu", qemu=Qemu((10,), frozenset(), frozenset())).detail


def test_a_version_of_qemu_is_read_from_its_greeting() -> None:
    assert qemu_version("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)") == (10, 0, 2)
    with pytest.raises(ValueError, match="not a version"):
        qemu_version("bash: qemu: command not found")


def test_a_command_that_fails_is_told_by_its_first_line() -> None:
    assert complaint([sys.executable, "-c", "pass"]) == ""
    assert complaint([sys.executable, "-c", "import sys; sys.exit('first\\nsecond')"]) == "first"
    assert complaint([sys.executable, "-c", "raise SystemExit(3)"]) == "exit code 3"


def test_looking_at_a_host_changes_nothing_in_its_state_folder(tmp_path: Path) -> None:
    state = tmp_path / "state"
    config = NodeConfig(Places(state / "config.toml", state / "lib", state / "run"))
    facts = gather(config, node_runs=False, boot_probe=False)
    assert facts.kvm_boots is None
    assert facts.memory_total
    assert facts.memory_total > GIB // 2
    assert list(tmp_path.iterdir()) == []


def test_boxctl_doctor_gives_json_and_ends_with_1_when_something_must_be_mended(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from node.cli.main import app

    (tmp_path / "config.toml").write_text("[node]\nbogus = 1\n")
    shown = CliRunner(env={"BOXFLEET_STATE": str(tmp_path)}).invoke(app, ["doctor", "--json"])
    checks = {check["name"]: check for check in json.loads(shown.stdout)}
    assert shown.exit_code == 1
    assert set(checks["kvm"]) == {"name", "status", "detail", "fix"}
    assert "node.bogus is not a setting" in checks["configuration"]["detail"]
