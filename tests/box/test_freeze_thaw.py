"""A box that is frozen and thawed again and again goes on as if nothing had happened."""

from __future__ import annotations

import time

import trio

from tests.box.fleet import Agent, Fleet

CYCLES = 20
CLOCK_WITHIN = 2.0  # seconds
SERVER = """
import http.server, os

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        log.write(b"asked\\n")
        log.seek(0)
        answer = b"%d\\n" % os.getpid() + log.read()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

log = open("/work/log", "w+b", buffering=0)
http.server.HTTPServer(("127.0.0.1", 3000), Handler).serve_forever()
"""


# report 9, 14, 19, 20, 21
async def test_twenty_freezes_leave_processes_open_files_ports_and_the_clock_as_they_were(fleet: Fleet, box: str, agent: Agent) -> None:
    server = await agent.call("sandbox_exec", id=box, cmd=f"exec python3 -c '{SERVER}'", note="serve", background=True)
    await agent.ready(box, server["bgId"], readyPort=3000)
    for cycle in range(1, CYCLES + 1):
        await agent.run(box, "date --set=@1000000000")  # a clock left to itself would be years old after the thaw
        assert (await trio.to_thread.run_sync(fleet.change, box, "freeze"))["state"] == "frozen"
        before = time.time()
        clock, pid, *log = (await agent.run(box, "date +%s.%N; curl --silent --max-time 60 localhost:3000")).split()
        assert before - CLOCK_WITHIN <= float(clock) <= time.time() + CLOCK_WITHIN
        assert (int(pid), log) == (server["pid"], ["asked"] * cycle)
    known = (await agent.commands(box))[server["bgId"]]
    assert (known["running"], known["pid"]) == (True, server["pid"])
