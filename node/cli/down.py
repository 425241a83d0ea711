"""`boxctl down`: ends the daemons in peace. Running boxes are frozen first, so that nothing in them is lost."""

from __future__ import annotations

from node.cli import show
from node.cli.api import Api
from node.cli.daemons import Daemon
from node.cli.failure import Failure, NotRunning
from node.config import Places

PATIENCE = {"node": 60.0, "coordinator": 20.0}  # seconds; the node freezes what still runs


def down() -> None:
    """Freeze what runs and stop the daemons. Boxes go on with `boxctl up` and their next use."""
    places = Places.from_environment()
    freeze_boxes(places)
    for name, patience in PATIENCE.items():
        daemon = Daemon(name, places)
        pid = daemon.pid()
        if pid is None:
            show.say(f"{name}: not running")
        elif daemon.stop(pid, deadline=patience):
            show.say(f"{name}: stopped")
        else:
            show.warn(f"{name}: had to be killed after {patience:.0f} s; its log: {daemon.log}")


def freeze_boxes(places: Places) -> None:
    """Freezes each running box and says how it went; a box that cannot be frozen does not keep the others from it."""
    api = Api.on_socket("node", places.node_socket)
    try:
        boxes = api.ask("GET", "/v1/boxes")["boxes"]
    except NotRunning:
        return
    except Failure as failure:
        show.warn(f"boxes could not be frozen: {failure}")
        return
    for box in (box for box in boxes if box["state"] == "ready"):
        label = f"box {box['id']} {box['name']}".strip()
        try:
            with show.progress(label) as report:
                api.operate("POST", f"/v1/boxes/{box['id']}/freeze", report=report)
            show.say(f"{label}: frozen")
        except Failure as failure:
            show.warn(f"{label}: not frozen: {failure}")
