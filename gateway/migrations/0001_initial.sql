CREATE TABLE sessions (
    id           TEXT PRIMARY KEY,
    token_sha256 TEXT NOT NULL UNIQUE,
    opened_by    TEXT NOT NULL,
    profile      TEXT NOT NULL,
    state        TEXT NOT NULL,
    request      TEXT NOT NULL,
    created      REAL NOT NULL,
    last_used    REAL NOT NULL,
    expires      REAL NOT NULL,
    ended        REAL,
    close_report TEXT,
    url_generation INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE calls (
    session_id          TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    id                  TEXT NOT NULL,
    sequence            INTEGER NOT NULL,
    call_id             TEXT,
    turn_id             TEXT,
    tool                TEXT NOT NULL,
    requested_tool      TEXT NOT NULL,
    source              TEXT,
    accepted            REAL NOT NULL,
    original_arguments  TEXT NOT NULL,
    idempotency_key     TEXT,
    request_sha256      TEXT,
    finished            REAL,
    status              TEXT,
    arguments           TEXT,
    exit_code           INTEGER,
    error               TEXT,
    raw_digest          TEXT,
    final_digest        TEXT,
    decisions           TEXT,
    answer              TEXT,
    PRIMARY KEY (session_id, id)
) STRICT, WITHOUT ROWID;

CREATE UNIQUE INDEX calls_by_key ON calls (session_id, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX calls_unfinished ON calls (finished) WHERE finished IS NULL;

CREATE TABLE turns (
    session_id TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    id         TEXT NOT NULL,
    ended      REAL,
    record     TEXT NOT NULL,
    PRIMARY KEY (session_id, id)
) STRICT, WITHOUT ROWID;

CREATE TABLE turn_decisions (
    session_id TEXT NOT NULL,
    turn_id    TEXT NOT NULL,
    decision   TEXT NOT NULL,
    FOREIGN KEY (session_id, turn_id) REFERENCES turns (session_id, id) ON DELETE CASCADE
) STRICT;

CREATE INDEX turn_decisions_of ON turn_decisions (session_id, turn_id);

CREATE TABLE results (
    session_id TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    key        TEXT NOT NULL,
    call_id    TEXT,
    stream     TEXT NOT NULL,
    bytes      INTEGER NOT NULL,
    media_type TEXT NOT NULL,
    sha256     TEXT NOT NULL,
    created    REAL NOT NULL,
    expires    REAL NOT NULL,
    deleted    REAL,
    withheld   INTEGER NOT NULL DEFAULT 0,
    line_index BLOB NOT NULL DEFAULT x'',
    PRIMARY KEY (session_id, key)
) STRICT, WITHOUT ROWID;

CREATE INDEX results_by_age ON results (created) WHERE deleted IS NULL;
CREATE INDEX results_by_end ON results (expires) WHERE deleted IS NULL;

CREATE TABLE approvals (
    number             INTEGER PRIMARY KEY AUTOINCREMENT,
    session_id         TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    call_id            TEXT NOT NULL,
    tool               TEXT NOT NULL,
    digest             TEXT NOT NULL,
    arguments          TEXT NOT NULL,
    original_arguments TEXT NOT NULL,
    questions          TEXT NOT NULL,
    state              TEXT NOT NULL DEFAULT 'waiting',
    scope              TEXT NOT NULL DEFAULT 'once',
    edited_arguments   TEXT NOT NULL DEFAULT 'null',
    reason             TEXT NOT NULL DEFAULT '',
    created            REAL NOT NULL,
    expires            REAL NOT NULL,
    decided            REAL,
    used               REAL,
    revision           INTEGER NOT NULL
) STRICT;

CREATE INDEX approvals_by_call ON approvals (session_id, tool, digest);
CREATE INDEX approvals_by_revision ON approvals (revision);
CREATE INDEX approvals_waiting ON approvals (expires) WHERE state = 'waiting';

CREATE TABLE upstreams (
    name     TEXT PRIMARY KEY,
    config   TEXT NOT NULL,
    accepted TEXT NOT NULL,
    offered  TEXT
) STRICT;
