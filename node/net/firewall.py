"""What a box may say and to whom: the rules as data, and the two ways to put them into the kernel.

In a box's namespace: python-iptables where the kernel has the legacy tables (in process), else `iptables-nft-restore`.
At the host: the host's own `iptables`, so that our rules lie in the tables where the operator's Docker or ufw has theirs.

Traps of python-iptables, all met here:
- It caches one handle a table and process, bound to the namespace where it was opened: refresh() on entering. The handle is a socket and
  keeps that namespace alive: refresh() again back home. After Table.close() the next rule crashes the process.
- Chain.append_rule() reads every match back by putting a pipe over descriptor 1 of the whole process, which a QEMU or a log line of
  another thread would get: the entry is appended directly.
- iptc.easy drops a match that it cannot set and installs the broader rule without a word: iptc.Rule only.
- One thread at a time (network.py's limiter).
"""

from __future__ import annotations

import errno
import functools
import logging
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import iptc

from node.net.addresses import FLOOR, GATEWAY, GUEST, GUEST_MAC, LINK_PREFIX, Slot, is_box_link
from node.net.link import TAP, VETH, link_names
from node.net.namespace import HOME, inside

CONNECTIONS = 4096  # of one box at a time: the host's connection table is shared
COMMAND_DEADLINE = 10.0
CHAIN = "BOXFLEET"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Option:
    """`--name value` of a match or target. A value is negated by a leading "!"; an empty one is a flag; words are separated by a space."""

    module: str
    name: str
    value: str = ""


@dataclass(frozen=True)
class Rule:
    """One line of iptables. An address is negated by a leading "!". Options of the target name it as their module."""

    table: str
    chain: str
    target: str
    options: tuple[Option, ...] = ()
    came_in: str = ""
    goes_out: str = ""
    source: str = ""
    destination: str = ""
    protocol: str = ""

    def words(self) -> list[str]:
        """As arguments of iptables, without the command and the chain."""
        words: list[str] = []
        fields = (("-i", self.came_in), ("-o", self.goes_out), ("-s", self.source), ("-d", self.destination), ("-p", self.protocol))
        for flag, value in fields:
            words += _negatable(flag, value) if value else []
        matches = [option for option in self.options if option.module != self.target]
        for module, options in groupby(matches, key=lambda option: option.module):
            words += ["-m", module]
            for option in options:
                words += _negatable(f"--{option.name}", option.value)
        words += ["-j", self.target]
        for option in self.options:
            words += _negatable(f"--{option.name}", option.value) if option.module == self.target else []
        return words


def _negatable(flag: str, value: str) -> list[str]:
    return [*(["!"] if value.startswith("!") else []), flag, *value.removeprefix("!").split()]


NEW = Option("conntrack", "ctstate", "NEW")
ANSWERS = Option("conntrack", "ctstate", "RELATED,ESTABLISHED")
RESET = Option("REJECT", "reject-with", "tcp-reset")  # the kernel limits ICMP errors in rate: a burst of tries would wait a second each
PROHIBITED = Option("REJECT", "reject-with", "icmp-net-prohibited")

BOX_POLICIES = {("filter", "INPUT"): "DROP", ("filter", "OUTPUT"): "DROP", ("filter", "FORWARD"): "DROP"}


def box_rules(slot: Slot, allow: Sequence[str] = ()) -> Iterator[Rule]:
    """Of one box's namespace, in order; with BOX_POLICIES everything that no rule accepts is dropped.

    The node's sockets born in the namespace need no exception from the floor: what they send and get passes OUTPUT and INPUT."""
    yield Rule("raw", "PREROUTING", "DROP", came_in=TAP, source=f"!{GUEST}")
    yield Rule("raw", "PREROUTING", "DROP", (Option("mac", "mac-source", f"!{GUEST_MAC}"),), came_in=TAP)

    for protocol in ("udp", "tcp"):
        dns = (Option(protocol, "dport", "53"),)
        yield Rule("filter", "INPUT", "ACCEPT", dns, came_in=TAP, source=GUEST, destination=GATEWAY, protocol=protocol)
    yield Rule("filter", "INPUT", "ACCEPT", (ANSWERS,), came_in=TAP)
    yield Rule("filter", "OUTPUT", "ACCEPT", goes_out=TAP, destination=GUEST)  # QEMU lives in here too: its uid reaches its own guest only

    too_many = (NEW, Option("connlimit", "connlimit-above", str(CONNECTIONS)), Option("connlimit", "connlimit-mask", "0"))
    yield Rule("filter", "FORWARD", "REJECT", (*too_many, RESET), came_in=TAP, protocol="tcp")
    yield Rule("filter", "FORWARD", "DROP", too_many, came_in=TAP)
    for network in allow:
        yield Rule("filter", "FORWARD", "ACCEPT", came_in=TAP, goes_out=VETH, source=GUEST, destination=network)
    for network in FLOOR:
        yield Rule("filter", "FORWARD", "REJECT", (RESET,), came_in=TAP, destination=network, protocol="tcp")
        yield Rule("filter", "FORWARD", "REJECT", (PROHIBITED,), came_in=TAP, destination=network)
    yield Rule("filter", "FORWARD", "ACCEPT", came_in=TAP, goes_out=VETH, source=GUEST)
    yield Rule("filter", "FORWARD", "ACCEPT", (ANSWERS,), came_in=VETH, goes_out=TAP)

    clamp = (Option("tcp", "tcp-flags", "SYN,RST SYN"), Option("TCPMSS", "clamp-mss-to-pmtu"))
    yield Rule("mangle", "FORWARD", "TCPMSS", clamp, protocol="tcp")
    yield Rule("nat", "POSTROUTING", "SNAT", (Option("SNAT", "to-source", slot.inner),), goes_out=VETH)


BOXES = f"{LINK_PREFIX}+"
HOST_CHAIN = (  # FORWARD jumps here for all that boxes send or get
    Rule("filter", CHAIN, "DROP", came_in=BOXES, goes_out=BOXES),  # other boxes, also where `allow` opens the pool
    Rule("filter", CHAIN, "DROP", (Option("conntrack", "ctstate", "DNAT"),), came_in=BOXES),  # ports the host publishes, say Docker's
    Rule("filter", CHAIN, "ACCEPT", came_in=BOXES),
    Rule("filter", CHAIN, "ACCEPT", (ANSWERS,), goes_out=BOXES),
    Rule("filter", CHAIN, "DROP", goes_out=BOXES),
)


def host_anchors(pool: str) -> tuple[Rule, ...]:
    """The rules that lie in chains which are not ours. The host's own addresses, whichever it has today, are shut by the first one."""
    return (
        Rule("filter", "INPUT", "DROP", came_in=BOXES),
        Rule("filter", "FORWARD", CHAIN, came_in=BOXES),
        Rule("filter", "FORWARD", CHAIN, goes_out=BOXES),
        Rule("nat", "POSTROUTING", "MASQUERADE", source=pool, destination=f"!{pool}"),
    )


def restore_script(rules: Iterable[Rule], policies: Mapping[tuple[str, str], str]) -> str:
    """Rules as input of iptables-restore --noflush. Policy "-" declares a chain of our own: it is made, or emptied if it exists."""
    tables: dict[str, list[str]] = {}
    for (table, chain), policy in policies.items():
        tables.setdefault(table, []).append(f":{chain} {policy} [0:0]")
    for rule in rules:
        tables.setdefault(rule.table, []).append(" ".join(["-A", rule.chain, *rule.words()]))
    return "".join(f"*{table}\n{chr(10).join(lines)}\nCOMMIT\n" for table, lines in tables.items())


def install(netns: int, rules: Iterable[Rule]) -> None:
    """Into a namespace that has none yet. Blocking, 6-15 ms; one thread at a time. OSError says what the kernel refused."""
    rules = tuple(rules)
    if _has_legacy_tables():
        _install_legacy(netns, rules)
    else:
        _install_nft(netns, rules)


@functools.cache
def _has_legacy_tables() -> bool:
    try:
        with inside(HOME):
            for name in ("raw", "mangle", "nat", "filter"):
                iptc.Table(name).refresh()
    except iptc.IPTCError:
        return False
    return True


def _install_legacy(netns: int, rules: tuple[Rule, ...]) -> None:
    for name in sorted({rule.table for rule in rules}):
        table = iptc.Table(name, autocommit=False)
        with inside(netns):
            table.refresh()
            try:
                for (where, chain), policy in BOX_POLICIES.items():
                    if where == name:
                        iptc.Chain(table, chain).set_policy(policy)
                for rule in rules:
                    if rule.table == name:
                        _append(table, rule)
                table.commit()
            except (iptc.IPTCError, ValueError, AttributeError) as error:
                raise OSError(errno.EINVAL, f"iptables {name}: {error}") from error
            finally:
                with inside(HOME):
                    table.refresh()


def _install_nft(netns: int, rules: tuple[Rule, ...]) -> None:
    _restore(netns, "iptables-nft-restore", restore_script(rules, BOX_POLICIES))


def _append(table: Any, rule: Rule) -> None:
    entry = iptc.Rule()
    for name, value in (
        ("in_interface", rule.came_in),
        ("out_interface", rule.goes_out),
        ("src", rule.source),
        ("dst", rule.destination),
        ("protocol", rule.protocol),
    ):
        if value:
            setattr(entry, name, value)
    matches = dict.fromkeys(option.module for option in rule.options if option.module != rule.target)
    modules = {name: entry.create_match(name) for name in matches} | {rule.target: entry.create_target(rule.target)}
    for option in rule.options:
        words = option.value.split()
        modules[option.module].set_parameter(option.name, words if len(words) > 1 else option.value)
    for module in modules.values():
        module._final_check()
    table.append_entry(rule.chain, entry.rule)


def _restore(netns: int, program: str, script: str) -> None:
    _iptables(netns, [program, "--noflush", "--wait", "5"], script)


def _iptables(netns: int, argv: list[str], script: str = "") -> None:
    with inside(netns):  # the child is born there
        done = subprocess.run(argv, input=script, text=True, capture_output=True, timeout=COMMAND_DEADLINE, check=False)
    if done.returncode:
        raise OSError(errno.EINVAL, f"{argv[0]}: {done.stderr.strip()}")


def _present(host: int, rule: Rule) -> bool:
    try:
        _iptables(host, ["iptables", "--wait", "5", "-t", rule.table, "-C", rule.chain, *rule.words()])
    except OSError:
        return False
    return True


def ensure_host_rules(pool: str, host: int = HOME) -> None:
    """Forwarding and masquerade for the boxes of `pool`, the host and other boxes shut to them. Idempotent. Blocking, some 30 ms.

    Other instances of boxfleet on the host share the chain; each has a masquerade rule for its pool."""
    with inside(host):
        forwarding = Path("/proc/sys/net/ipv4/ip_forward")
        if forwarding.read_text().strip() != "1":
            forwarding.write_text("1")
            log.warning("switched on net.ipv4.ip_forward: boxes reach the world through this host")
    _restore(host, "iptables-restore", restore_script(HOST_CHAIN, {("filter", CHAIN): "-"}))
    for rule in host_anchors(pool):
        if not _present(host, rule):
            _iptables(host, ["iptables", "--wait", "5", "-t", rule.table, "-I", rule.chain, *rule.words()])


def remove_host_rules(pool: str, host: int = HOME) -> None:
    """Takes away what ensure_host_rules() put in, but for the forwarding sysctl, which others may rely on by now. Safe to repeat.

    Nothing happens while a box, also of another instance, has its link there."""
    with inside(host):
        if any(is_box_link(name) for name in link_names()):
            return
    for rule in host_anchors(pool):
        if _present(host, rule):
            _iptables(host, ["iptables", "--wait", "5", "-t", rule.table, "-D", rule.chain, *rule.words()])
    _restore(host, "iptables-restore", f"*filter\n:{CHAIN} - [0:0]\n-X {CHAIN}\nCOMMIT\n")
