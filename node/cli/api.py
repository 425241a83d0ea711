"""One daemon over HTTP, on its local socket; with an API key where the daemon asks for one.

Every failure comes out as a Failure: no daemon -> NotRunning, a typed error of the daemon -> what it says.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from node.cli.failure import Failure, NotRunning, from_problem
from node.cli.show import Report

ANSWER = 60.0  # seconds for a plain answer; an observation never waits for a guest, a wake does
SILENCE = 30.0  # seconds without a line during an operation: `alive` comes every 5
LONGEST_LINE = 8 << 20
UNKEPT = httpx2.Limits(max_keepalive_connections=0)


class Api:
    """A daemon called `name`. A connection lives as long as its request: nothing is to be closed."""

    def __init__(self, name: str, client: httpx2.Client, path: Path) -> None:
        self._name = name
        self._client = client
        self._path = path

    @classmethod
    def on_socket(cls, name: str, path: Path, *, below: str = "", key: str = "") -> Api:
        """What the daemon serves below a path, "" being all."""
        transport = httpx2.HTTPTransport(uds=str(path), limits=UNKEPT, verify=False)  # no TLS there: loading the host's CAs costs 0.2 s
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"http://local{below}"
        return cls(name, httpx2.Client(transport=transport, base_url=url, headers=headers, trust_env=False, timeout=ANSWER), path)

    def ask(self, method: str, path: str, body: Any = None, *, timeout: float = ANSWER) -> dict[str, Any]:
        """One request, one JSON object."""
        with self._failures():
            answer = self._client.request(method, path, json=body, timeout=timeout)
            self._refuse(answer)
            return self._object(answer.content)

    def accepts(self, path: str) -> bool:
        """Whether our key is good there."""
        with self._failures():
            return self._client.get(path).status_code not in (401, 403)

    def operate(self, method: str, path: str, body: Any = None, *, report: Report) -> dict[str, Any]:
        """An operation (NDJSON events): progress goes to `report`, the result comes back. Interrupting it stops the wait, not the work."""
        with self._failures(), self._client.stream(method, path, json=body, timeout=httpx2.Timeout(ANSWER, read=SILENCE)) as answer:
            if answer.is_error:
                answer.read()
            self._refuse(answer)
            for line in answer.iter_lines():
                event = self._object(line)
                if event.get("type") == "progress":
                    report(str(event.get("message", "")), event.get("fraction"))
                elif event.get("type") == "error":
                    raise from_problem(event.get("error") or {})
                elif event.get("type") == "result":
                    return dict(event.get("result") or {})
        raise Failure(f"the {self._name} ended its answer without a result", remedy="Ask for the state of things: `boxctl status`.")

    def read(self, path: str, **query: int) -> Iterator[bytes]:
        """The bytes of an answer as they come, without end if the daemon follows something."""
        with self._failures(), self._client.stream("GET", path, params=query, timeout=httpx2.Timeout(ANSWER, read=None)) as answer:
            if answer.is_error:
                answer.read()
            self._refuse(answer)
            yield from answer.iter_raw()

    def _refuse(self, answer: httpx2.Response) -> None:
        if not answer.is_error:
            return
        try:
            told = json.loads(answer.content)
            problem = told["error"]
        except (ValueError, KeyError, TypeError):
            problem = None
        if isinstance(problem, dict):  # the node's form
            raise from_problem(problem)
        if isinstance(problem, str):  # the coordinator's, which agents' adapters expect (CONTRACT 2.4)
            raise from_problem({"hop": "coordinator", **told, "message": problem})
        raise Failure(f"the {self._name} answered HTTP {answer.status_code}", remedy="`boxctl status` says where its log is.")

    def _object(self, data: str | bytes) -> dict[str, Any]:
        try:
            value = json.loads(data) if len(data) <= LONGEST_LINE else None
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise Failure(f"the {self._name} did not answer with a JSON object", remedy="Restart it: `boxctl down && boxctl up`.")
        return value

    @contextmanager
    def _failures(self) -> Iterator[None]:
        self._knock()
        try:
            yield
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise self._not_running(error) from error
        except httpx2.TimeoutException as error:
            raise Failure(f"the {self._name} did not answer in time", remedy="See how it is: `boxctl status`, `boxctl doctor`.") from error
        except httpx2.TransportError as error:
            remedy = "The work goes on if the daemon does: `boxctl status`."
            raise Failure(f"the link to the {self._name} broke", cause=str(error), remedy=remedy) from error

    def _knock(self) -> None:
        """Tells apart, by the kernel's own error, why nobody answers; httpx2 has only words for it."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(ANSWER)
            try:
                client.connect(str(self._path))
            except PermissionError as error:
                raise Failure(f"you may not ask the {self._name}", cause=str(self._path), remedy="Run boxctl as root.") from error
            except OSError as error:
                raise self._not_running(error) from error

    def _not_running(self, error: Exception) -> NotRunning:
        return NotRunning(f"the {self._name} is not running", cause=str(error), remedy="Start it: `boxctl up`.")
