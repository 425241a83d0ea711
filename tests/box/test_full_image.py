"""What only the full image can do: Docker and Chromium, as an agent uses them through MCP. Nothing is fetched from anywhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from image.store import ImageStore
from tests.box.fleet import Agent, Fleet, images_folder, running_fleet

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(ImageStore(images_folder()).find("full") is None, reason="no full image: boxctl image build full"),
]

ENGINE_ID = "/var/lib/docker/engine-id"
IMAGE = """
    mkdir -p root/bin root/www && cp "$(command -v busybox)" root/bin/ && ln -s busybox root/bin/sh && echo served > root/www/index.html
    tar -C root -c . | docker import - local/busybox
"""
COMPOSE = """\
services:
  web:
    image: local/busybox
    command: busybox httpd -f -p 80 -h /www
  client:
    image: local/busybox
    command: sh -c 'until busybox wget -q -O - http://web; do busybox sleep 0.2; done'
    depends_on: [web]
"""
PAGE = """\
<!doctype html><title>local</title><p id="told">nothing</p>
<script>document.getElementById("told").textContent = `sum ${40 + 2}`; fetch("/asked-by-the-script")</script>
"""
ASKED_AT_MOST = 300  # seconds; under emulation on a busy host Chromium alone takes a minute


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with running_fleet(unit_memory=2 << 30) as running:
        yield running


@pytest.fixture(scope="module")
def box(fleet: Fleet) -> Iterator[str]:
    """With a Docker image that was made in it, from a tar."""
    started = fleet.start("full", flavour="full")
    fleet.boxctl("box", "exec", started, "--", "bash", "-ec", IMAGE)
    yield started
    fleet.destroy(started)


async def test_the_languages_and_tools_of_the_flavour_are_there(agent: Agent, box: str) -> None:
    named = "docker git node npm go php python3 pip3 gcc make ffmpeg chromium xdotool openbox rg jq sqlite3 Xvfb"
    assert await agent.run(box, f"for name in {named}; do command -v $name > /dev/null || echo $name is missing; done") == ""
    assert await agent.run(box, "docker compose version --short && docker buildx version | wc -l && fc-list :lang=ja | wc -l") != ""


@pytest.mark.parametrize(
    ("backend", "prepare"),
    [
        ("nft", "true"),  # Debian's default
        ("legacy", "nft flush ruleset; update-alternatives --set iptables /usr/sbin/iptables-legacy; systemctl restart docker"),
    ],
)
async def test_docker_publishes_a_containers_port(agent: Agent, box: str, backend: str, prepare: str) -> None:  # report 47
    await agent.run(box, prepare, timeoutSec=ASKED_AT_MOST)
    await agent.run(box, "docker run --detach --name web --publish 8080:80 local/busybox busybox httpd -f -p 80 -h /www")
    # Not by 127.0.0.1: that would be the proxy's work, not the rules'.
    assert await agent.run(box, "curl --silent --retry 20 --retry-connrefused --retry-delay 1 http://10.111.0.2:8080/") == "served"
    assert "--to-destination" in await agent.run(box, f"iptables-{backend} --table nat --list-rules DOCKER")
    await agent.run(box, "docker rm --force web")


async def test_services_of_a_compose_file_find_each_other_by_name(agent: Agent, box: str) -> None:  # report 47
    await agent.run(box, f"mkdir -p two && cat > two/compose.yaml <<'END'\n{COMPOSE}END")
    ran = await agent.run(box, "docker compose run --rm --no-TTY client && docker compose down", cwd="/work/two", timeoutSec=ASKED_AT_MOST)
    assert ran == "served"


async def test_docker_is_another_engine_in_each_box_of_a_template(fleet: Fleet, agent: Agent, box: str) -> None:
    other = fleet.start("full too", flavour="full")
    engines = [await agent.run(one, "docker info --format '{{.ID}}'", timeoutSec=ASKED_AT_MOST) for one in (box, other)]
    assert len(list((fleet.state / "lib/node/templates").glob("full-*"))) == 1
    assert len(set(engines)) == 2
    for one in (box, other):  # a template that had one would have given its own birth time to all
        assert float(await agent.run(one, f"stat --format %W {ENGINE_ID}")) >= fleet.view(one)["createdAt"] - 1
    fleet.destroy(other)


async def test_chromium_opens_a_local_page_and_runs_its_script(agent: Agent, box: str) -> None:
    await agent.run(box, f"mkdir site && cat > site/index.html <<'END'\n{PAGE}END")
    served = await agent.call(
        "sandbox_exec", id=box, cmd="exec python3 -m http.server 8000 2>&1", cwd="/work/site", note="serve", background=True
    )
    await agent.call("sandbox_procs", id=box, action="wait", bgId=served["bgId"], readyPort=8000)
    page = await agent.run(
        box, "chromium --headless --dump-dom http://localhost:8000/", user="tester", cwd="/home/tester", timeoutSec=ASKED_AT_MOST
    )
    assert '<p id="told">sum 42</p>' in page
    assert "GET /asked-by-the-script" in await agent.run(box, f"cat {served['log']}")
