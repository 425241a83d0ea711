"""What lies on disk: the database and its migrations, keys, links, certificates, the configuration file."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trio
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from coordinator.certificates import Authority, needs_renewal, node_name
from coordinator.config import load_config
from coordinator.errors import BadInput
from coordinator.keys import Keys, bearer
from coordinator.links import OutputLinks
from coordinator.store.database import DatabaseTooNew, open_database
from coordinator.store.migrations import MIGRATIONS
from coordinator.views import cut, decode
from tests.unit.fleets import csr, places


async def test_a_transaction_that_raises_leaves_nothing_behind(tmp_path: Path) -> None:
    def half(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO conversations (account, id) VALUES ('a', 'b')")
        raise ValueError

    async with open_database(tmp_path / "db") as database:
        with pytest.raises(ValueError):
            await database.run(half)
        assert await database.run(lambda connection: connection.execute("SELECT count(*) FROM conversations").fetchone()[0]) == 0


async def test_a_cancelled_transaction_is_whole_or_was_never_begun(tmp_path: Path) -> None:
    def write(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO conversations (account, id) VALUES ('a', 'b')")

    async with open_database(tmp_path / "db") as database:
        with trio.CancelScope() as scope:
            scope.cancel()
            await database.run(write)
        assert await database.run(lambda connection: connection.execute("SELECT count(*) FROM conversations").fetchone()[0]) == 0


async def test_a_newer_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    async with open_database(tmp_path / "db") as database:
        await database.run(lambda connection: connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}"))
    with pytest.raises(DatabaseTooNew):
        async with open_database(tmp_path / "db"):
            pass


async def test_a_key_works_until_it_is_revoked_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    async with open_database(tmp_path / "db") as database:
        keys = Keys(database, lambda: 1000.0)
        secret, made = await keys.create("laptop")
        found = await keys.verify(secret)
        assert found
        assert (found.id, found.account) == (made.id, "main")
        assert await keys.verify(secret + "x") is None
        assert await keys.verify("other") is None
        assert await keys.revoke("laptop") == 1
        assert await keys.verify(secret) is None
    assert secret.encode() not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


@pytest.mark.parametrize(("header", "token"), [("Bearer a", "a"), ("bearer  a ", "a"), ("Basic a", ""), (None, ""), ("Bearer", "")])
def test_a_bearer_token_is_taken_from_its_header(header: str | None, token: str) -> None:
    assert bearer(header) == token


def test_a_link_opens_one_stream_of_one_command_for_an_hour(tmp_path: Path) -> None:
    now = [1000.0]
    links = OutputLinks.load(tmp_path / "key", public_url="http://x", valid=3600.0, clock=lambda: now[0])
    query = links.url("box", "exec", "stdout").partition("?")[2]
    expires, sig = (part.partition("=")[2] for part in query.split("&"))
    again = OutputLinks.load(tmp_path / "key", public_url="http://x", valid=3600.0, clock=lambda: now[0])
    assert again.opens("box", "exec", "stdout", expires, sig), "also after a restart"
    assert not links.opens("box", "exec", "stderr", expires, sig)
    assert not links.opens("other", "exec", "stdout", expires, sig)
    assert not links.opens("box", "exec", "stdout", str(int(expires) + 1), sig)
    now[0] += 3601
    assert not links.opens("box", "exec", "stdout", expires, sig)


@given(st.text(), st.text())
def test_no_invented_link_opens(expires: str, sig: str) -> None:
    links = OutputLinks(b"k" * 32, "http://x", 3600.0, lambda: 0.0)
    assert not links.opens("box", "exec", "stdout", expires, sig)


def test_a_nodes_certificate_holds_names_that_we_chose(tmp_path: Path) -> None:
    authority = Authority.load(tmp_path, ["localhost"])
    certificate = x509.load_pem_x509_certificate(authority.sign_node("node-1", csr()).encode())
    assert certificate.subject.rfc4514_string() == f"CN={node_name('node-1')}"
    assert certificate.not_valid_before_utc < datetime.now(UTC) - timedelta(minutes=4)
    assert not needs_renewal(certificate, datetime.now(UTC))
    assert needs_renewal(certificate, datetime.now(UTC) + timedelta(days=61))
    assert authority.renewed_node("node-1", authority.sign_node("node-1", csr())) is None


def test_an_authority_is_the_same_after_a_restart_and_takes_up_new_names(tmp_path: Path) -> None:
    first, again = Authority.load(tmp_path, ["localhost"]), Authority.load(tmp_path, ["localhost", "192.0.2.1"])
    assert first.coordinator.pem == again.coordinator.pem
    door = x509.load_pem_x509_certificate((tmp_path / "fleet-door.pem").read_bytes())
    names = door.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name) for name in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.1"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[coordinator]\nlisten_at = 'x'", "coordinator.listen_at is not a setting"),
        ("[coordinator]\ndevelopment = 'yes'", "coordinator.development must be a bool, not 'yes'"),
        ("[coordinator.presence]\nsilence = 1", "coordinator.presence.silence is not a setting"),
        ("[coordinator", "config.toml is not valid TOML"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(tmp_path: Path, text: str, told: str) -> None:
    where = places(tmp_path)
    where.config.write_text(text)
    with pytest.raises(BadInput) as caught:
        load_config(where)
    assert told in caught.value.message


def test_settings_are_read_and_other_tables_left_alone(tmp_path: Path) -> None:
    where = places(tmp_path)
    where.config.write_text("[coordinator]\nurl_valid = 60\nfleet_names = ['a']\npresence = {silent = 5}\n[node]\naccel = 'tcg'")
    config = load_config(where)
    assert (config.url_valid, config.fleet_names, config.presence.silent) == (60.0, ("a",), 5.0)


@given(st.text(max_size=40), st.integers(0, 3))
def test_text_cut_by_our_window_is_still_text(text: str, lost: int) -> None:  # report 10
    data = text.encode()
    shown, exact = decode(data[lost:], cut_before=True, more_to_come=False)
    if len(data) > lost:
        assert exact
        assert text.endswith(shown)


@given(st.binary(max_size=64))
def test_bytes_that_the_text_does_not_say_exactly_are_told_as_such(data: bytes) -> None:  # report 10
    text, exact = decode(data, cut_before=False, more_to_come=False)
    assert exact == (text.encode() == data)


@given(st.text())
def test_names_are_cut_as_the_client_cuts_them(text: str) -> None:
    kept = cut(text, 60)
    assert len(kept) <= 60
    assert not set(kept) & {"\n", "\t", "\r"}
    assert cut(kept, 60) == kept
