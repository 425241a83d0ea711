"""From `make up` to the first command in the first box, in a state folder of its own. It takes minutes, so it is asked for with --up."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.figures import Figure, Stopwatch
from tests.box.fleet import Fleet, leftovers

HERE = Path(__file__).parents[2]


def first_exec(rounds: int) -> dict[str, Figure]:
    """`make up` ends when the first box has answered a command."""
    watch = Stopwatch()
    fleet = Fleet(Path(tempfile.mkdtemp(prefix="bf-", dir="/var/tmp")))
    try:
        fleet.configure(unit_memory=0)
        for state in ("nothing", "image", "template"):
            print(f"bench: make up, cached: {state}", file=sys.stderr)
            with watch.time(state):
                subprocess.run(["make", "up", "FLAVOUR=core"], cwd=HERE, env=fleet.environment, stdout=sys.stderr, check=True)
            fleet.destroy_all()
            fleet.down()
            if state == "nothing":  # the image stays, what the node made of it goes
                shutil.rmtree(fleet.state / "lib/node/templates")
    finally:
        fleet.boxctl("down", check=False)
        left = leftovers(fleet.state)
        shutil.rmtree(fleet.state)
    assert not left, left
    detail = {"template_cached_too_s": round(watch["template"][0], 1)}
    return {"up_cached": Figure(watch["image"][0], detail), "up_not_cached": Figure(watch["nothing"][0])}
