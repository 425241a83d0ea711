"""`make bench`: figures of one run on this host, for people on stdout, for programs in results/latest.json, progress on stderr.

    figures.py                       what is measured, what it must reach, how it is told
    lives.py > bare.py               one box, each step in turn with the same done barely
    crowds.py                        many boxes, and what the daemons weigh
    calls.py > servers.py            calls where no guest runs
    first_exec.py                    from `make up` to the first exec

Nothing is asserted about time: a missed limit is told, and only what could not be measured makes the run fail. Run as root.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import trio

from tests.bench.calls import coordinator_added, mcp_calls
from tests.bench.crowds import HEARD, eight_at_once, frozen_50, idle
from tests.bench.figures import ROWS, Figure, save, table
from tests.bench.first_exec import first_exec
from tests.bench.lives import cold, lives
from tests.box.fleet import Fleet, running_fleet

RESULTS = Path(__file__).parent / "results" / "latest.json"
ROUNDS = 20
UNIT = 512 << 20  # bytes

Figures = dict[str, Figure]
ON_FLEET: tuple[tuple[Callable[[Fleet, int], Awaitable[Figures]], tuple[str, ...]], ...] = (
    (idle, ("rss_node", "rss_coordinator")),  # first: what frozen_50 adds is told there
    (lives, ("start_vs_bare", "freeze_vs_bare", "thaw_vs_bare", "exec_vs_direct")),
    (cold, ("cold_vs_start",)),
    (eight_at_once, ("eight_at_once",)),
    (frozen_50, ("frozen_50",)),
)
ALONE: tuple[tuple[Callable[[int], Figures], tuple[str, ...]], ...] = (
    (coordinator_added, ("coordinator_added_ms",)),
    (mcp_calls, ("mcp_calls_vs_bare",)),
    (first_exec, ("up_cached", "up_not_cached")),
)
SLOW = {"up_cached", "up_not_cached"}


class Run:
    """One run of the wanted rows; a fleet is there once something needs it."""

    def __init__(self, wanted: set[str], rounds: int, stack: ExitStack) -> None:
        self.wanted, self.rounds, self._stack = wanted, rounds, stack
        self.figures: Figures = {}
        self.failed: list[str] = []

    @cached_property
    def fleet(self) -> Fleet:
        print("bench: starting a fleet", file=sys.stderr)
        return self._stack.enter_context(running_fleet(unit_memory=UNIT))

    def measure(self, names: tuple[str, ...], work: Callable[[], Figures]) -> None:
        """One that fails does not keep the others from being measured."""
        if not self.wanted.intersection(names):
            return
        try:
            self.figures |= {name: figure for name, figure in work().items() if name in self.wanted}
        except Exception:
            traceback.print_exc()
            self.failed.extend(self.wanted.intersection(names))

    def on_fleet(self, work: Callable[[Fleet, int], Awaitable[Figures]]) -> Figures:
        """Leaves no box to the next."""
        try:
            return trio.run(work, self.fleet, self.rounds)
        finally:
            self.fleet.destroy_all()
            time.sleep(HEARD)

    def all(self) -> None:
        for alone, names in ALONE:
            self.measure(names, lambda alone=alone: alone(self.rounds))  # type: ignore[misc]
        for on_fleet, names in ON_FLEET:
            self.measure(names, lambda on_fleet=on_fleet: self.on_fleet(on_fleet))  # type: ignore[misc]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Figures of boxfleet on this host; as root.")
    parser.add_argument("--only", default="", metavar="NAME,...", help=f"some of: {', '.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="lives of a box, each beside a bare one (default %(default)s)")
    parser.add_argument("--up", action="store_true", help="also from `make up` to the first exec: minutes")
    options = parser.parse_args()
    wanted = set(options.only.split(",")) if options.only else set(ROWS) - SLOW
    if unknown := wanted - set(ROWS):
        parser.error(f"no such rows: {', '.join(sorted(unknown))}")
    began = time.monotonic()
    with ExitStack() as stack:
        run = Run(wanted | (SLOW if options.up else set()), options.rounds, stack)
        run.all()
    figures = {name: run.figures[name] for name in ROWS if name in run.figures}
    save(RESULTS, figures)
    load = " ".join(f"{load:.1f}" for load in os.getloadavg())
    print(f"{table(figures)}\n{os.cpu_count()} CPUs, load {load}, {time.monotonic() - began:.0f} s, raw figures in {RESULTS}")
    if run.failed:
        print(f"not measured, see above: {', '.join(run.failed)}")
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
