"""The node's settings: what is wrong is refused by name at the start, never found out in the middle of a box's."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.config import NodeConfig, Places, load_node_config
from node.errors import BadRequest


def load(folder: Path, text: str) -> NodeConfig:
    (folder / "config.toml").write_text(text)
    return load_node_config(Places(folder / "config.toml", folder / "lib", folder / "run"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[node", "TOML"),
        ("[node]\nfoo = 1", "node.foo"),
        ("[node]\nlisten = 5", "node.listen"),
        ('[node]\nlisten = "nonsense"', "node.listen"),
        ('[node]\nlisten = "127.0.0.1:99999"', "node.listen"),
        ('[node]\nlisten = "::1:80"', "node.listen"),
        ('[node]\naddress = "far"', "node.address"),
        ('[node]\ncoordinator = "10.0.0.1:7081"', "node.coordinator"),
        ('[node]\nnetwork_pool = "10.1.1.1/16"', "node.network_pool"),
        ('[node]\nallow = ["10.0.0.0/8", "x"]', "node.allow"),
        ("[node]\nallow = [5]", "node.allow"),
        ("[node]\nunit_memory = -5", "node.unit_memory"),
        ("[node]\nunit_vcpus = 0", "node.unit_vcpus"),
        ("[node]\nparallel_starts = 0", "node.parallel_starts"),
        ("[node.clocks]\nfreeze_after = -1", "node.clocks.freeze_after"),
        ("[node.clocks]\nfreeze_after = nan", "node.clocks.freeze_after"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        load(tmp_path, text)


def test_what_an_operator_may_write_is_taken(tmp_path: Path) -> None:
    text = """
    [node]
    listen = "[::1]:0"
    address = "node-2.example.org:7082"
    coordinator = "https://10.0.0.1:7081"
    allow = ["10.20.0.0/24", "fd00::/8"]
    clocks = {freeze_after = 3}
    """
    config = load(tmp_path, text)
    assert (config.listen, config.allow, config.clocks.freeze_after) == ("[::1]:0", ("10.20.0.0/24", "fd00::/8"), 3.0)
    assert load(tmp_path, "") == NodeConfig(config.places)
