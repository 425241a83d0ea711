"""The tools there are, in the order in which a client lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tools import sandbox_exec, sandbox_feedback, sandbox_list, sandbox_procs, sandbox_say, sandbox_start, sandbox_status, sandbox_stop
from tools.tool import Tool

TOOLS: Final[tuple[Tool[Any], ...]] = (
    sandbox_start.tool,
    sandbox_list.tool,
    sandbox_status.tool,
    sandbox_exec.tool,
    sandbox_procs.tool,
    sandbox_say.tool,
    sandbox_feedback.tool,
    sandbox_stop.tool,
)

BY_NAME: Final[Mapping[str, Tool[Any]]] = {tool.name: tool for tool in TOOLS}
