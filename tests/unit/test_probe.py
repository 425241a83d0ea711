"""What a host can do: how the answer is judged and remembered. (Whether KVM runs here is for the host to say.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from node.config import Places
from node.errors import VmError
from node.vmm.probe import KVM_MODELS, best_model, choose_accel, kernel_to_try, tsc_khz, why_no_kvm


def definitions(**lacking: list[str]) -> list[dict[str, object]]:
    return [{"name": name.replace("_", "-"), "unavailable-features": features} for name, features in lacking.items()]


def test_the_newest_model_that_lacks_nothing_is_taken() -> None:
    assert best_model(definitions(Nehalem_v2=[], Haswell_v4=[], Skylake_Server_v5=["avx512f"], max=[])) == "Haswell-v4"


def test_a_host_that_no_model_fits_is_an_error_with_a_remedy() -> None:
    with pytest.raises(VmError) as raised:
        best_model([*definitions(max=[], Haswell_v4=["avx2"]), {"name": KVM_MODELS[0]}])
    assert "node.accel" in raised.value.problem.remedy


def test_what_is_configured_is_not_tried(tmp_path: Path) -> None:
    choice = choose_accel("tcg", Places(tmp_path, tmp_path, tmp_path))
    assert (choice.name, choice.cpu) == ("tcg", "max")


def test_without_a_kernel_nothing_is_proven() -> None:
    assert "no kernel" in (why_no_kvm(None) or "")


def test_the_newest_images_kernel_is_tried(tmp_path: Path) -> None:
    for name in ("core-1", "core-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vmlinuz").touch()
    assert kernel_to_try(tmp_path) in (tmp_path / "core-1/vmlinuz", tmp_path / "core-2/vmlinuz")


def test_the_tsc_is_measured_the_same_each_time() -> None:
    first, second = tsc_khz(0.02), tsc_khz(0.02)
    assert first > 500_000
    assert abs(first - second) <= first / 1000
