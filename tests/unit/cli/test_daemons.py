"""What boxctl asks of the coordinator, and how it starts, finds and ends daemons."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from image.build import current_digest
from image.recipe import Settings
from node.cli.connect import recipes
from node.cli.coordinator import Coordinator, write_secret
from node.cli.daemons import LONGEST_LOG, Daemon
from node.cli.failure import Failure
from node.config import Places

STATUS = {"pid": 1, "url": "http://127.0.0.1:7080", "mcpUrl": "http://127.0.0.1:7080/mcp", "apiUrl": "http://127.0.0.1:7080", "ok": True}
NODE = {"id": "n1", "pid": 2, "ready": True, "problem": None, "accel": "tcg", "capacity": {"memoryTotal": 8 << 30}}


def places(host: Any) -> Places:
    return Places(host.state / "config.toml", host.state / "lib", host.state / "run")


def test_with_nothing_running_status_says_so_and_is_no_failure(host: Any) -> None:
    shown = host.boxctl("status", "--json")
    assert (shown.exit_code, json.loads(shown.stdout)) == (0, {"coordinator": None, "node": None, "boxes": []})


def test_status_tells_pids_urls_and_boxes(host: Any) -> None:
    host.node().routes["GET", "/v1/node"] = (200, NODE | {"boxes": [host.view()]})
    host.coordinator().routes["GET", "/v1/status"] = (200, STATUS)
    told = json.loads(host.boxctl("status", "--json").stdout)
    assert told["coordinator"]["mcpUrl"] == STATUS["mcpUrl"]
    assert told["node"]["accel"] == "tcg"
    assert told["coordinator"]["pid"] == told["node"]["pid"] == os.getpid()  # who listens, not what is said
    assert [box["id"] for box in told["boxes"]] == ["abcdefghij12"]
    assert "abcdefghij12" in host.boxctl("status").stdout


def test_a_daemon_that_runs_but_fails_to_answer_is_shown_with_its_problem(host: Any) -> None:
    host.coordinator().routes["GET", "/v1/status"] = (500, {"error": "broken", "code": "coordinator_error", "hop": "coordinator"})
    told = json.loads(host.boxctl("status", "--json").stdout)
    assert told["coordinator"]["problem"]["message"] == "broken"


def test_connect_gives_urls_and_the_local_key(host: Any) -> None:
    host.coordinator().routes["GET", "/v1/status"] = (200, STATUS)
    write_secret(places(host).local_key, "psbx_secret\n")
    told = json.loads(host.boxctl("connect", "--json").stdout)
    assert told == {"mcpUrl": STATUS["mcpUrl"], "apiUrl": STATUS["apiUrl"], "apiKey": "psbx_secret"}
    assert "claude mcp add --transport http boxfleet" in host.boxctl("connect").stdout


def test_connect_before_the_first_up_says_what_to_do(host: Any) -> None:
    shown = host.boxctl("connect")
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert "what to do: `boxctl up` makes one." in shown.stderr


def test_the_generic_recipe_is_json_that_a_client_reads() -> None:
    (_, generic) = recipes("http://h/mcp", "psbx_k")[-1]
    server = json.loads(generic)["mcpServers"]["boxfleet"]
    assert server["headers"] == {"Authorization": "Bearer psbx_k"}


def test_secrets_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    write_secret(tmp_path / "a" / "key", "x")
    assert stat.S_IMODE((tmp_path / "a" / "key").stat().st_mode) == 0o600


def test_a_key_is_printed_once_alone_on_stdout(host: Any) -> None:
    host.coordinator().routes["POST", "/v1/keys"] = lambda body: (200, {"key": "psbx_new", **body, "account": "main"})
    assert host.boxctl("key", "create", "ci").stdout == "psbx_new\n"


def test_keys_are_listed_with_what_became_of_them(host: Any) -> None:
    key = {"id": "k", "name": "ci", "account": "main", "createdAt": "2020-01-01T00:00:00.000Z", "lastUsedAt": None, "revokedAt": None}
    host.coordinator().routes["GET", "/v1/keys"] = (200, {"keys": [key, key | {"name": "old", "revokedAt": key["createdAt"]}]})
    lines = host.boxctl("key", "list").stdout.splitlines()
    assert lines[1].split()[0] == "ci"
    assert lines[1].endswith("works")
    assert lines[2].endswith("revoked")


def test_revoking_a_key_that_is_not_there_is_4(host: Any) -> None:
    refusal = {"error": "There is no key 'x y' in force", "code": "key_not_found", "cause": "", "remedy": "List them.", "hop": "agent"}
    host.coordinator().routes["DELETE", "/v1/keys/x%20y"] = (404, refusal)
    shown = host.boxctl("key", "revoke", "x y")
    assert shown.exit_code == 4
    assert shown.stderr.splitlines()[0] == "error: There is no key 'x y' in force"


ORDER = {"token": "t", "fleetCa": "PEM", "coordinator": "https://h:7081", "name": "b", "expiresAt": "2030-01-01T00:00:00.000Z"}


def test_a_node_token_is_the_file_that_a_new_host_needs_and_says_where_it_goes(host: Any) -> None:
    coordinator = host.coordinator()
    coordinator.routes["POST", "/v1/nodes/tokens"] = (200, ORDER)
    shown = host.boxctl("node", "token", "--name", "b")
    assert json.loads(shown.stdout) == ORDER
    assert coordinator.asked[-1][2] == {"name": "b", "here": False}
    assert "/var/lib/boxfleet/node/enrol.token (0600)" in shown.stderr  # the new host's, not this one's
    assert "only this host" not in shown.stderr


@pytest.mark.parametrize("door", ["https://127.0.0.1:7081", "https://[::1]:7081"])
def test_a_node_token_that_leads_no_other_host_here_says_so(host: Any, door: str) -> None:
    host.coordinator().routes["POST", "/v1/nodes/tokens"] = (200, ORDER | {"coordinator": door})
    shown = host.boxctl("node", "token", "--json")
    assert json.loads(shown.stdout)["coordinator"] == door
    assert f"only this host can reach {door}" in shown.stderr


def have_image(host: Any, digest: str, built_at: float) -> str:
    folder = places(host).images / f"core-{digest}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"flavour": "core", "digest": digest, "built_at": built_at}))
    return digest


def further_node(host: Any, **differing: Any) -> Any:
    """`up --node-only`, as root, where a node runs and the image is there."""
    host.node().routes["GET", "/v1/node"] = (200, NODE | differing)
    have_image(host, current_digest("core", Settings()), built_at=2.0)
    return host.boxctl("up", "--node-only", "--flavour", "core")


def test_a_further_node_without_a_token_waits_and_says_for_what(host: Any) -> None:
    shown = further_node(host, id="")
    assert shown.exit_code == 0
    assert f"put what it prints into {places(host).enrol_token} here" in shown.stderr


def test_a_further_node_with_a_token_joins_without_a_coordinator_here(host: Any) -> None:
    write_secret(places(host).enrol_token, "{}")
    shown = further_node(host)
    assert shown.exit_code == 0
    assert "has joined its fleet" in shown.stderr


def test_nodes_are_listed_also_those_never_heard(host: Any) -> None:
    node = {"id": "n1", "name": "a", "address": "h:1", "state": "unreachable", "enrolledAt": "2020-01-01T00:00:00.000Z", "heardAt": None}
    host.coordinator().routes["GET", "/v1/nodes"] = (200, {"nodes": [node]})
    assert "unreachable" in host.boxctl("node", "list").stdout
    assert "unreachable" in host.boxctl("node", "show", "a").stdout
    assert host.boxctl("node", "show", "b").exit_code == 4


def test_a_local_key_that_does_not_work_is_revoked_and_made_anew(host: Any) -> None:
    class Told(Coordinator):
        def key_works(self) -> bool:
            return self.key == "psbx_new"

    routes = host.coordinator().routes
    routes["GET", "/v1/keys"] = (200, {"keys": [{"name": "local", "revokedAt": None}]})
    routes["DELETE", "/v1/keys/local"] = (200, {"revoked": 1})
    routes["POST", "/v1/keys"] = (200, {"key": "psbx_new", "name": "local"})
    write_secret(places(host).local_key, "psbx_revoked\n")
    coordinator = Told(places(host), "psbx_revoked")
    assert coordinator.keep_local_key()
    assert places(host).local_key.read_text() == "psbx_new\n"
    assert not coordinator.keep_local_key()


@pytest.mark.parametrize("words", [("bogus",), ("box", "exec"), ("box", "start", "--name", "a", "--size", "3"), ("image", "build", "odd")])
def test_wrong_usage_is_2_and_said_on_stderr(host: Any, words: tuple[str, ...]) -> None:
    shown = host.boxctl(*words)
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert shown.stderr


def test_a_broken_configuration_is_an_error_with_a_remedy(host: Any) -> None:
    (host.state / "config.toml").write_text("[image]\nbogus = 1\n")
    shown = host.boxctl("image", "build", "core")
    assert shown.exit_code == 1
    assert "image.bogus is not a setting" in shown.stderr


def test_the_image_list_is_empty_json_without_images(host: Any) -> None:
    assert json.loads(host.boxctl("image", "list", "--json").stdout) == []
    assert host.boxctl("image", "show", "core").exit_code == 4


def test_the_current_recipes_image_is_taken_as_it_is_and_without_a_word_when_it_is_the_newest(host: Any) -> None:
    have_image(host, "aaaaaaaaaaaa", built_at=1.0)
    current = have_image(host, current_digest("core", Settings()), built_at=2.0)
    shown = host.boxctl("image", "build", "core")
    assert (shown.exit_code, shown.stdout) == (0, f"{current}\n")
    assert "are made of" not in shown.stderr


def test_when_the_recipe_has_gone_back_up_says_of_what_new_boxes_are_made(host: Any) -> None:
    have_image(host, current_digest("core", Settings()), built_at=1.0)
    have_image(host, "aaaaaaaaaaaa", built_at=2.0)
    shown = host.boxctl("image", "build", "core")
    assert shown.exit_code == 0
    assert "new boxes of core are made of image aaaaaaaaaaaa" in shown.stderr


class Sleeper(Daemon):
    """A daemon of the tests: a Python module that `up` can start like any other."""

    module = "sleeper"


@pytest.fixture
def sleeper(host: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Sleeper:
    (tmp_path / "sleeper.py").write_text("import os, time\nprint('started', flush=True)\ntime.sleep(float(os.environ.get('NAP', 60)))")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Sleeper("node", places(host))


def test_a_daemon_is_started_detached_found_again_and_ended(sleeper: Sleeper) -> None:
    pid = sleeper.start()
    sleeper.wait_until(lambda: "started" in sleeper.last_words(), deadline=20)
    assert sleeper.pid() == pid
    assert os.getsid(pid) == pid
    assert sleeper.stop(pid, deadline=10)
    assert sleeper.pid() is None
    os.waitpid(pid, 0)


def test_a_long_log_begins_anew_at_a_start_and_one_of_before_is_kept(sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAP", "0")
    sleeper.log.parent.mkdir(parents=True)
    kept = sleeper.log.with_name("node.log.1")
    kept.write_text("of long ago")
    with sleeper.log.open("wb") as log:
        log.truncate(LONGEST_LOG)
    os.waitpid(sleeper.start(), 0)
    assert kept.read_text() == "of long ago"
    os.waitpid(sleeper.start(), 0)
    assert kept.stat().st_size == LONGEST_LOG + len("started\n")
    assert sleeper.log.read_text() == "started\n"


def test_what_the_http_server_says_of_itself_stays_out_of_the_nodes_log(caplog: pytest.LogCaptureFixture) -> None:
    from hypercorn.config import Config
    from hypercorn.logging import Logger

    from node.daemon import harden, log_plain_lines

    log_plain_lines()
    harden(config := Config())
    trio.run(Logger(config).info, "Running on %s", "http://unix:/x (CTRL + C to quit)")
    assert not caplog.records
    trio.run(Logger(config).error, "it broke")
    assert [record.message for record in caplog.records] == ["it broke"]


def test_a_daemon_that_ends_while_it_starts_is_told_with_its_last_words(sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAP", "0")
    pid = sleeper.start()
    with pytest.raises(Failure) as told:
        sleeper.wait_until(lambda: False, deadline=20)
    assert str(told.value) == "the node ended"
    assert told.value.cause == "started"
    os.waitpid(pid, 0)


def test_a_pid_that_belongs_to_another_program_by_now_is_not_our_daemon(host: Any) -> None:
    daemon = Daemon("node", places(host))
    daemon.places.run.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        daemon.pid_file.write_text(str(other.pid))
        assert daemon.pid() is None
        other.communicate(b"\n")


def test_down_freezes_what_runs_and_says_so(host: Any) -> None:
    from node.cli.down import freeze_boxes

    node = host.node(host.view(), host.view(id="bbbbbbbbbbbb", state="frozen"), host.view(id="cccccccccccc", name="stuck"))
    node.routes["POST", "/v1/boxes/abcdefghij12/freeze"] = (200, [{"type": "result", "result": host.view(state="frozen")}])
    problem = {"code": "vm_failed", "message": "no"}
    node.routes["POST", "/v1/boxes/cccccccccccc/freeze"] = (200, [{"type": "error", "error": problem}])
    freeze_boxes(places(host))
    asked = [path for method, path, _ in node.asked if method == "POST"]
    assert asked == ["/v1/boxes/abcdefghij12/freeze", "/v1/boxes/cccccccccccc/freeze"]


def test_down_with_nothing_running_is_done_already(host: Any) -> None:
    shown = host.boxctl("down")
    assert (shown.exit_code, shown.stdout) == (0, "")
    assert shown.stderr.splitlines() == ["node: not running", "coordinator: not running"]


def test_help_is_quick_because_heavy_imports_are_late() -> None:
    heavy = ("trio", "trio_websocket", "image.build", "pyroute2", "iptc")
    code = f"import sys, node.cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
