"""`boxctl up`: from nothing, or from a crash, to a running box. Every step looks first whether it is done, so a second `up` is quick and an
interrupted one goes on where it was."""

from __future__ import annotations

import fcntl
import json as encoder
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from node.cli import show
from node.cli.api import Api
from node.cli.connect import recipes
from node.cli.coordinator import Coordinator, write_secret
from node.cli.daemons import Daemon
from node.cli.failure import Failure, from_problem
from node.cli.images import ensure_image
from node.config import Places

HEALTHY = 60.0  # seconds for a daemon to answer; the node's first start tries KVM
ENROLLED = 30.0
FIRST_BOX = "first box"
GREETING = 'echo "hello from $(hostname): $(. /etc/os-release; echo $PRETTY_NAME), $(nproc) CPUs"'


def up(
    flavour: Annotated[str, typer.Option(help="Image of the first box: full, or core for a quick look.")] = "full",
    box: Annotated[bool, typer.Option(help="Start a first box.")] = True,
    node_only: Annotated[bool, typer.Option("--node-only", help="A further host: its coordinator runs elsewhere.")] = False,
) -> None:
    """Start what is not running, down to a first box."""
    places, began = Places.from_environment(), time.monotonic()
    if os.geteuid() != 0:
        raise Failure("boxes need root: namespaces, taps, images", remedy="sudo boxctl up")
    with only_one(places):
        if node_only:
            start_further_node(places, flavour)
            return
        coordinator = start_coordinator(places)
        have_image(places, flavour)
        start_node(places, coordinator)
        if box:
            first_box(places, coordinator, flavour)
    show.say(f"up after {show.duration(time.monotonic() - began)}. To connect an agent (again: `boxctl connect`):\n")
    for title, text in recipes(str(coordinator.status()["mcpUrl"]), coordinator.key):
        show.say(f"# {title}\n{text}\n")


@contextmanager
def only_one(places: Places) -> Iterator[None]:
    """Two `up` at once would start everything twice."""
    places.run.mkdir(parents=True, exist_ok=True)
    with (places.run / "up.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Failure("another `boxctl up` is at work", remedy="Wait for it, or end it with Ctrl-C where it runs.") from error
        yield


def start_coordinator(places: Places) -> Coordinator:
    """Running, healthy, and with a local key that works."""
    daemon, coordinator = Daemon("coordinator", places), Coordinator(places)
    ensure_running(daemon, lambda: bool(coordinator.status()))
    if places.local_key.exists():
        coordinator.key = places.local_key.read_text().strip()
    if coordinator.keep_local_key():
        show.say(f"made an API key for this host: {places.local_key}")
    return coordinator


def have_image(places: Places, flavour: str) -> None:
    image = ensure_image(places, flavour)
    show.say(f"image {flavour} {image.digest}: there")


def start_node(places: Places, coordinator: Coordinator) -> None:
    """Running, enrolled and ready."""
    if not enrolled(places):
        order = coordinator.create_node_token(os.uname().nodename, here=True)
        write_secret(places.enrol_token, encoder.dumps({key: order[key] for key in ("token", "fleetCa", "coordinator")}))
    api = run_node(places)

    def known() -> bool:
        mine = api.ask("GET", "/v1/node")["id"]
        return bool(mine) and any(node["id"] == mine and node["state"] == "ready" for node in coordinator.nodes())

    wait_to_join(places, known)
    refuse_unready(api)


def start_further_node(places: Places, flavour: str) -> None:
    """Running, with an image, and enrolled if there is a token; else the node waits for one as long as it takes."""
    api = run_node(places)
    have_image(places, flavour)
    if enrolled(places) or places.enrol_token.exists():
        wait_to_join(places, lambda: bool(api.ask("GET", "/v1/node")["id"]))
        show.say("node: has joined its fleet; see it on the coordinator's host: `boxctl node list`")
    else:
        show.say(
            "node: waits for its token. On the coordinator's host: `boxctl node token --name "
            f"{os.uname().nodename}`; put what it prints into {places.enrol_token} here (0600). It joins within seconds."
        )
    refuse_unready(api)


def enrolled(places: Places) -> bool:
    return (places.node / "identity" / "node.json").exists()


def run_node(places: Places) -> Api:
    api = Api.on_socket("node", places.node_socket)
    ensure_running(Daemon("node", places), lambda: bool(api.ask("GET", "/v1/node", timeout=5)))
    return api


def wait_to_join(places: Places, joined: Callable[[], bool]) -> None:
    with show.progress("node") as report:
        report("joining the fleet", None)
        Daemon("node", places).wait_until(joined, deadline=ENROLLED)


def refuse_unready(api: Api) -> None:
    view = api.ask("GET", "/v1/node")
    if not view["ready"]:
        raise from_problem(view.get("problem") or {"code": "node_not_ready", "message": "the node is not ready"})


def ensure_running(daemon: Daemon, answers: Callable[[], bool]) -> None:
    """Healthy, started if it was not; waits for one that is starting."""

    def healthy() -> bool:
        try:
            return answers()
        except Failure:
            return False

    if healthy():
        show.say(f"{daemon.name}: runs")
        return
    if daemon.pid() is None:
        daemon.start()
    with show.progress(daemon.name) as report:
        report("starting", None)
        daemon.wait_until(healthy, deadline=HEALTHY)
    show.say(f"{daemon.name}: started, pid {daemon.pid()}, log {daemon.log}")


def first_box(places: Places, coordinator: Coordinator, flavour: str) -> None:
    """A box called "first box", the one of before if there is one, and a command in it."""
    import trio

    from node.cli.terminal import run_quietly
    from node.protocol import AttachBox

    boxes = Api.on_socket("node", places.node_socket).ask("GET", "/v1/boxes")["boxes"]
    mine = [box for box in boxes if box["name"] == FIRST_BOX and box["state"] in ("starting", "ready", "frozen")]
    if not mine:
        show.say("starting a first box; the first one of an image boots it once, about a minute without KVM")
        with show.progress(FIRST_BOX) as report:
            mine = [dict(coordinator.start_box(FIRST_BOX, "see that boxes start here", flavour, 1, report))]
    code, said = trio.run(run_quietly, places.node_socket, mine[0]["id"], AttachBox(cmd=GREETING))
    if code:
        raise Failure(f"a command in box {mine[0]['id']} ended with {code}", cause=said, remedy="boxctl box console, boxctl doctor")
    show.say(f"box {mine[0]['id']}: {said.strip()}")
