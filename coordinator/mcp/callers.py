"""Who calls, from headers alone. There is no session state: a session id is a name that the client carries, so none is ever unknown
(CONTRACT 0.1, report 54)."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from coordinator.conversations import AGENT, client_label, identify
from coordinator.store.keys import Key
from tools.context import Caller

LONGEST_WAIT: Final = 1800.0
DEFAULT_WAIT: Final = 25.0
LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


def new_session(client: str | None) -> str:
    """A session id that carries the client's name, which a client tells only once, at `initialize`."""
    label = re.sub(r"[^A-Za-z0-9._/+-]", "_", client or "")[:60]
    return secrets.token_hex(16) + (f".{label}" if label else "")


def caller(headers: Mapping[str, str], key: Key, client: str | None) -> Caller:
    """`client` is what the request itself says. Every header is the client's word and no more than a label."""
    session = headers.get("mcp-session-id", "")
    spoken = headers.get("x-psbx-client") or client or session.partition(".")[2]
    client = client_label(spoken)
    agent = headers.get("x-psbx-agent", "")
    conversation = identify(
        agent=agent
        if AGENT.fullmatch(agent)
        else None,  # a name that nobody could have given is none; refusing it would look like a broken link
        session=session.partition(".")[0],
        key_name=key.name,
        client=client,
    )
    return Caller(key.account, key.name, conversation, client, _wait(headers.get("x-psbx-tool-wait-sec")))


def _wait(header: str | None) -> float:
    try:
        seconds = float(header) if header is not None else DEFAULT_WAIT
    except ValueError:
        return DEFAULT_WAIT
    return min(max(seconds, 0.0), LONGEST_WAIT) if math.isfinite(seconds) else DEFAULT_WAIT


def may_come_from(origin: str | None, public_url: str) -> bool:
    """Whether a browser's page of that Origin may call: our own and those of this machine. No Origin: no browser.
    A page that rebinds its name to our address still shows its own Origin."""
    if origin is None:
        return True
    try:
        host = urlsplit(origin).hostname
    except ValueError:
        return False
    return host is not None and (host in LOOPBACK or host == urlsplit(public_url).hostname)
