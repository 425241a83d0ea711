"""The schema as an ordered table of scripts: number N takes a database from version N-1 to N. A published script is never changed."""

from __future__ import annotations

FIRST = """
CREATE TABLE keys (
    id INTEGER PRIMARY KEY,
    digest TEXT NOT NULL UNIQUE,        -- SHA-256 of the key, hex; the key itself is nowhere
    name TEXT NOT NULL,
    account TEXT NOT NULL,
    created_at REAL NOT NULL,
    last_used_at REAL,
    revoked_at REAL
);

CREATE TABLE enrolment_tokens (
    digest TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    used_at REAL
);

CREATE TABLE nodes (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    digest TEXT NOT NULL UNIQUE,        -- of the node's bearer token
    address TEXT NOT NULL,              -- host:port of its API
    certificate TEXT NOT NULL,          -- PEM, the one last given
    enrolled_at REAL NOT NULL,
    seen_at REAL NOT NULL
);

CREATE TABLE boxes (
    id TEXT PRIMARY KEY,
    account TEXT NOT NULL,
    conversation TEXT NOT NULL,         -- the one that used it last
    client TEXT,
    name TEXT NOT NULL,
    goal TEXT NOT NULL,
    flavour TEXT NOT NULL,
    size INTEGER NOT NULL,
    created_at REAL NOT NULL,
    node TEXT,                          -- NULL until placed
    stage TEXT NOT NULL,                -- claimed | starting | live | failed | stopped
    stage_at REAL NOT NULL,
    node_state TEXT,                    -- what the node last said of it
    deletes_at REAL,                    -- when the node's clock will delete it, if archived
    problem TEXT,                       -- JSON, of a failed start
    said TEXT,                          -- the last sandbox_say
    said_at REAL,
    stop_answer TEXT,                   -- JSON, for a repeated stop
    stop_delete INTEGER,
    stop_at REAL
);
CREATE INDEX boxes_by_account ON boxes (account, created_at);
CREATE INDEX boxes_by_node ON boxes (node);

CREATE TABLE steps (
    id INTEGER PRIMARY KEY,
    box TEXT NOT NULL REFERENCES boxes (id) ON DELETE CASCADE,
    at REAL NOT NULL,
    conversation TEXT NOT NULL,
    tool TEXT NOT NULL,
    cmd TEXT,
    dir TEXT,
    note TEXT,
    exec_id TEXT,
    exit_code INTEGER,
    signal TEXT,
    timed_out INTEGER,
    error TEXT
);
CREATE INDEX steps_by_box ON steps (box, id);

CREATE TABLE conversations (
    account TEXT NOT NULL,
    id TEXT NOT NULL,
    client TEXT,
    last_call_at REAL,
    heartbeat_at REAL,
    left_at REAL,
    PRIMARY KEY (account, id)
);

CREATE TABLE feedback (
    id INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    account TEXT NOT NULL,
    conversation TEXT NOT NULL,
    client TEXT,
    box TEXT,
    task TEXT NOT NULL,
    usage TEXT NOT NULL,
    problems TEXT NOT NULL,
    suggestions TEXT NOT NULL
);

CREATE TABLE calls (
    id TEXT PRIMARY KEY,                -- also the name of its event stream
    account TEXT NOT NULL,
    session TEXT NOT NULL,
    tool TEXT NOT NULL,
    request TEXT NOT NULL,              -- JSON, what it takes to run it again; emptied when it has ended
    started_at REAL NOT NULL,
    seq INTEGER,                        -- the answer's event
    answer TEXT                         -- the JSON-RPC response
);
CREATE INDEX calls_by_age ON calls (started_at);
"""

MIGRATIONS: tuple[str, ...] = (FIRST,)
