"""`python3 -m boxd`: the daemon of a box, started by systemd. Its secrets come from fw_cfg and requests, never by environment or argv."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from .identity import Guest, System
from .protocol import FIRST_TOKEN_FW_CFG, PORT
from .server import Boxd

TOKEN_FILE = Path("/sys/firmware/qemu_fw_cfg/by_name") / FIRST_TOKEN_FW_CFG / "raw"


def main(argv: list[str] | None = None, system: System | None = None) -> None:
    """`system` is the guest's own unless a test, which runs on a host, brings another."""
    parser = argparse.ArgumentParser(prog="boxd", description="The daemon inside a boxfleet box.")
    parser.add_argument("--host", default="0.0.0.0")  # noqa: S104 - the guest's only network is its link to the node
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--state", type=Path, default=Path("/var/lib/boxd"))
    parser.add_argument("--authority", type=Path, default=Path("/run/boxd/Xauthority"))
    parser.add_argument("--token-file", type=Path, default=TOKEN_FILE)
    parser.add_argument("--no-desktop", action="store_true")
    options = parser.parse_args(argv)

    async def serve() -> None:
        daemon = Boxd(
            state=options.state,
            authority=options.authority,
            first_token=options.token_file.read_text().strip(),
            system=system or Guest(),
            desktop=not options.no_desktop,
        )
        await daemon.run(options.host, options.port, lambda address: print(*address, flush=True))

    asyncio.run(serve())


if __name__ == "__main__":
    main()
