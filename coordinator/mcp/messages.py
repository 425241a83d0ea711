"""JSON-RPC as MCP uses it: a request's body made into one of three messages, and the errors that may answer it.

Two eras at one endpoint. Up to 2025-11-25 a client shakes hands (`initialize`) and then names its version in a header. From 2026-07-28
every request carries its version, client and capabilities in `_meta` and repeats them in headers; the SDK's ladder checks that they agree.
No message of an error here may hold the words that a client reads as a broken link: "network", "fetch failed", "terminated", "ECONNRESET"
(CONTRACT 0.6).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcp.shared.inbound import ERROR_CODE_HTTP_STATUS, InboundLadderRejection, classify_inbound_request
from mcp_types import CLIENT_INFO_META_KEY, DEFAULT_NEGOTIATED_VERSION, INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND, PARSE_ERROR
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

RequestId = int | str

REQUEST_CANCELLED = -32800  # as in the Language Server Protocol; MCP names none


class RpcError(Exception):
    """A JSON-RPC error; `status` is the HTTP status that carries it (never 404 in the handshake era: CONTRACT 0.1)."""

    def __init__(self, code: int, message: str, *, request: RequestId | None = None, status: int = 200, data: Any = None) -> None:
        super().__init__(message)
        self.code, self.message, self.request, self.status, self.data = code, message, request, status, data

    def body(self) -> dict[str, Any]:
        error = {"code": self.code, "message": self.message} | ({} if self.data is None else {"data": self.data})
        return {"jsonrpc": "2.0", "id": self.request, "error": error}


@dataclass(frozen=True)
class Request:
    id: RequestId
    method: str
    params: Mapping[str, Any]
    version: str
    modern: bool  # 2026-07-28 or later
    client: str | None  # "name/version" where the request itself says it

    @property
    def meta(self) -> Mapping[str, Any]:
        meta = self.params.get("_meta")
        return meta if isinstance(meta, dict) else {}

    @property
    def progress_token(self) -> RequestId | None:
        token = self.meta.get("progressToken")
        return token if isinstance(token, int | str) and not isinstance(token, bool) else None

    def unknown(self) -> RpcError:
        return RpcError(METHOD_NOT_FOUND, f"Method not found: {self.method[:100]}", request=self.id, status=404 if self.modern else 200)

    def invalid(self, message: str) -> RpcError:
        return RpcError(INVALID_PARAMS, message, request=self.id, status=400 if self.modern else 200)


@dataclass(frozen=True)
class Notification:
    method: str
    params: Mapping[str, Any]
    modern: bool


@dataclass(frozen=True)
class Reply:
    """A client's answer to a request of ours. We send none, so it is taken and dropped."""


def parse(body: bytes, headers: Mapping[str, str]) -> Request | Notification | Reply:
    """The message in a POST's body. Raises RpcError for anything that is not one message of a version spoken here."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        raise RpcError(PARSE_ERROR, "The body is not JSON", status=400) from None
    if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
        raise RpcError(INVALID_REQUEST, "The body must be one JSON-RPC 2.0 message (batches are not part of MCP)", status=400)
    method, params = message.get("method"), message.get("params")
    if method is None and ("result" in message or "error" in message):
        return Reply()
    if not isinstance(method, str) or not isinstance(params, dict | None):
        raise RpcError(INVALID_REQUEST, "method must be a string and params an object", status=400)
    # A first handshake is one whatever the header says; a header that names no handshake version belongs to the newer era's ladder.
    modern = method != "initialize" and headers.get("mcp-protocol-version", DEFAULT_NEGOTIATED_VERSION) not in HANDSHAKE_PROTOCOL_VERSIONS
    if "id" not in message:
        return Notification(method, params or {}, modern)
    request = message["id"]
    if not isinstance(request, int | str) or isinstance(request, bool):
        raise RpcError(INVALID_REQUEST, "id must be a string or an integer", status=400)
    if modern:
        return _modern(message, request, method, params or {}, headers)
    version = headers.get("mcp-protocol-version", DEFAULT_NEGOTIATED_VERSION)
    return Request(request, method, params or {}, version, modern=False, client=None)


def _modern(message: dict[str, Any], request: RequestId, method: str, params: dict[str, Any], headers: Mapping[str, str]) -> Request:
    verdict = classify_inbound_request(message, headers=headers)
    if isinstance(verdict, InboundLadderRejection):
        status = ERROR_CODE_HTTP_STATUS.get(verdict.code, 400)
        raise RpcError(verdict.code, verdict.message, request=request, status=status, data=verdict.data)
    return Request(
        request, method, params, verdict.protocol_version, modern=True, client=client_name(params["_meta"].get(CLIENT_INFO_META_KEY))
    )


def client_name(info: object) -> str | None:
    """ "name/version" of a clientInfo object, None for anything else."""
    if not isinstance(info, dict) or not isinstance(info.get("name"), str):
        return None
    version = info.get("version")
    return f"{info['name']}/{version}" if isinstance(version, str) else info["name"]


def encode(value: object) -> bytes:
    """JSON for the wire. A lone surrogate, which UTF-8 cannot carry, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
