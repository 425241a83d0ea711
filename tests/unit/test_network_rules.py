"""The firewall's rules as data."""

from __future__ import annotations

from node.net.addresses import FLOOR, GATEWAY, GUEST, slot
from node.net.firewall import BOX_POLICIES, HOST_CHAIN, Option, Rule, box_rules, host_anchors, restore_script

SLOT = slot(7, "10.112.0.0/16")


def forward(allow: tuple[str, ...] = ()) -> list[Rule]:
    return [rule for rule in box_rules(SLOT, allow) if rule.chain == "FORWARD" and rule.table == "filter"]


def test_every_network_of_the_floor_is_refused_before_the_world_is_opened() -> None:
    rules = forward()
    opened = next(at for at, rule in enumerate(rules) if rule.target == "ACCEPT" and not rule.destination)
    assert {rule.destination for rule in rules[:opened] if rule.target == "REJECT" and rule.protocol == ""} >= set(FLOOR)


def test_what_the_operator_allows_stands_before_the_floor_but_after_the_connection_limit() -> None:
    rules = forward(("10.9.0.0/16",))
    limits = [at for at, rule in enumerate(rules) if any(option.module == "connlimit" for option in rule.options)]
    allowed = next(at for at, rule in enumerate(rules) if rule.destination == "10.9.0.0/16")
    floor = next(at for at, rule in enumerate(rules) if rule.destination == FLOOR[0])
    assert max(limits) < allowed < floor


def test_nothing_is_let_through_that_no_rule_names() -> None:
    assert set(BOX_POLICIES.values()) == {"DROP"}
    assert {chain for _, chain in BOX_POLICIES} == {"INPUT", "OUTPUT", "FORWARD"}


def test_the_namespace_itself_speaks_to_its_guest_only_and_listens_to_dns_only() -> None:
    rules = list(box_rules(SLOT))
    assert [rule.destination for rule in rules if rule.chain == "OUTPUT"] == [GUEST]
    doors = [rule for rule in rules if rule.chain == "INPUT" and rule.destination]
    assert {(rule.protocol, rule.destination, rule.options) for rule in doors} == {
        (protocol, GATEWAY, (Option(protocol, "dport", "53"),)) for protocol in ("udp", "tcp")
    }


def test_boxes_are_kept_apart_at_the_host_before_anything_is_accepted() -> None:
    assert (HOST_CHAIN[0].came_in, HOST_CHAIN[0].goes_out, HOST_CHAIN[0].target) == ("bf+", "bf+", "DROP")
    assert host_anchors("10.112.0.0/16")[0] == Rule("filter", "INPUT", "DROP", came_in="bf+")


def test_a_rule_is_written_as_iptables_reads_it() -> None:
    options = Option("tcp", "tcp-flags", "SYN,RST SYN"), Option("TCPMSS", "clamp-mss-to-pmtu")
    rule = Rule("mangle", "FORWARD", "TCPMSS", options, came_in="tap0", source="!10.0.0.1")
    written = "-i tap0 ! -s 10.0.0.1 -m tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu"
    assert " ".join(rule.words()) == written
    script = restore_script([rule], {("filter", "INPUT"): "DROP"})
    assert script == f"*filter\n:INPUT DROP [0:0]\nCOMMIT\n*mangle\n-A FORWARD {written}\nCOMMIT\n"


def test_options_of_one_match_share_it() -> None:
    options = Option("connlimit", "connlimit-above", "9"), Option("connlimit", "connlimit-mask", "0")
    assert Rule("filter", "FORWARD", "DROP", options).words().count("connlimit") == 1
