"""Encrypted: who has the token speaks inside TLS, and who has it not gets no further than that."""

import shutil
import ssl
import subprocess
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.members.encrypted import (
    MARK,
    MOST_UNKNOWN_BYTES,
    EncryptedLine,
    check_installed,
    identity_of,
    is_encrypted,
    new_token,
)
from penstock.members.mesh import Mesh, listening, where_of
from penstock.members.token_proof import GREETING
from penstock.members.words import Ask, Welcome, Where, WireError
from tests.members import runs
from tests.members.test_gate import connected, proved, relay, said_until_the_end
from tests.members.test_kills import check
from tests.members.test_mesh import LIMIT_S

TOKEN = MARK + bytes(range(32))
WELCOME = Welcome({}, "graph", "about")
OPENSSL = shutil.which("openssl")


def test_a_token_says_whether_lines_are_encrypted() -> None:
    one, other = new_token(is_encrypted=True), new_token(is_encrypted=False)
    assert (is_encrypted(one), is_encrypted(other)) == (True, False)
    assert len(one) == len(MARK) + len(other)
    assert new_token(is_encrypted=True) != one


@pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed")
@settings(max_examples=10)
@given(token=st.binary(min_size=1))
def test_openssl_takes_key_certificate_and_signature(token: bytes, tmp_path_factory) -> None:
    folder, own = tmp_path_factory.mktemp("tls"), identity_of(token)
    assert identity_of(token) == own

    def said(*words: str) -> str:
        about = {
            "cwd": folder,
            "text": True,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
        }
        return subprocess.run([str(OPENSSL), *words], check=True, **about).stdout

    (folder / "both").write_bytes(own.pem)
    strict = "verify", "-check_ss_sig", "-CAfile", "both", "both"
    assert said(*strict) == "both: OK\n"
    said("pkey", "-in", "both", "-pubout", "-out", "public")
    assert (folder / "public").read_text() == said("x509", "-in", "both", "-pubkey", "-noout")


def test_a_host_without_the_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PlanError, match="need the package cryptography") as caught:
        check_installed()
    assert 'pip install "penstock[tls]"' in caught.value.hint


def pair(one: bytes, other: bytes) -> tuple[EncryptedLine, EncryptedLine]:
    """Return both ends of a line, whose handshake is over.

    Raises:   WireError: they do not take each other.
    """
    ends = EncryptedLine(one, is_caller=True), EncryptedLine(other, is_caller=False)
    data, turn = ends[0].said(b"first"), 1
    while data:
        assert ends[turn].heard(data) in (b"", b"first")
        data, turn = ends[turn].said(), 1 - turn
    return ends


@settings(max_examples=25)
@given(st.lists(st.binary(max_size=40_000), max_size=5), st.integers(1, 30_000))
def test_what_is_said_comes_back_however_it_is_cut(said: list[bytes], size: int) -> None:
    for here, there in (pair(TOKEN, TOKEN), pair(TOKEN, TOKEN)[::-1]):
        wire, came = b"".join(map(here.said, said)), b""
        assert not any(len(part) > 20 and part in wire for part in said)
        for at in range(0, len(wire), size):
            came += there.heard(wire[at : at + size])
        assert came == b"".join(said)


def test_who_has_another_token_is_not_taken() -> None:
    with pytest.raises(WireError, match="does not know the token"):
        pair(TOKEN, TOKEN + b"other")


def test_who_never_ends_the_handshake_may_send_so_many_bytes() -> None:
    hello = EncryptedLine(TOKEN, is_caller=True).said()
    end = EncryptedLine(TOKEN, is_caller=False)
    assert len(hello) < MOST_UNKNOWN_BYTES / 2
    parts = [b"\x16\x03\x01\x40\x00", *[hello[:1]] * MOST_UNKNOWN_BYTES]
    with pytest.raises(WireError):
        deque(map(end.heard, parts))


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=600), max_size=12), st.booleans(), st.integers(0, 300))
def test_a_stranger_can_send_what_it_likes(sent: list[bytes], begins: bool, at: int) -> None:
    """Whatever comes, nothing is heard of it, and no error but one leaves."""
    end = EncryptedLine(TOKEN, is_caller=False)
    hello = EncryptedLine(TOKEN, is_caller=True).said() if begins else b""
    with suppress(WireError):
        assert end.heard(hello[:at]) == b""
        for data in sent:
            assert end.heard(data) == b""
            end.said()
    assert not end.is_open


@settings(max_examples=60)
@given(st.binary(min_size=1, max_size=200), st.integers(0, 250), st.integers(1, 255))
def test_a_byte_that_is_changed_is_told(said: bytes, at: int, change: int) -> None:
    here, there = pair(TOKEN, TOKEN)
    wire = bytearray(here.said(said))
    wire[at % len(wire)] ^= change
    heard = b""
    with suppress(WireError):
        heard = there.heard(bytes(wire) + here.said(said))
    assert heard == b""


# -- members --------------------------------------------------------------------------------------


def mesh_of(number: int, token: bytes = TOKEN) -> tuple[Mesh, Where]:
    listener = listening()
    own = Mesh(number, listener, token)
    own.greets = lambda: WELCOME
    own.start()
    return own, where_of(listener, "")


@pytest.fixture
def member():
    own, where = mesh_of(0)
    yield own, where
    own.close()


def test_a_newcomer_with_the_token_is_welcomed_inside_tls(member) -> None:
    _, where = member
    heard = bytearray()

    def noted(data: bytes, is_call: bool) -> bytes:
        heard.extend(data)
        return data

    caller, own = mesh_of(9)
    with relay(where, noted) as between:
        assert caller.call(between, Ask(own, "graph", ())) == WELCOME
        caller.close()
    assert b"PENSTOCK" not in heard
    assert b"about" not in heard
    assert heard[:1] == b"\x16"  # a handshake of TLS


@pytest.mark.parametrize("token", [TOKEN[:-1], TOKEN.removeprefix(MARK)])
def test_one_with_another_token_or_none_of_tls_is_not(token: bytes, member) -> None:
    _, where = member
    caller, own = mesh_of(9, token)
    with pytest.raises(WireError, match="does not take it in"):
        caller.call(where, Ask(own, "graph", ()), limit_s=3.0)
    caller.close()


def test_what_a_relay_changes_ends_the_line(member) -> None:
    _, where = member
    sizes: list[int] = []

    def change(data: bytes, is_call: bool) -> bytes:
        sizes.append(len(data))
        return data if len(sizes) < 4 else data[:-1] + bytes([data[-1] ^ 1])

    caller, own = mesh_of(9)
    with relay(where, change) as between:
        with pytest.raises(WireError, match="does not take it in"):
            caller.call(between, Ask(own, "graph", ()), limit_s=3.0)
        caller.close()


@pytest.mark.parametrize(
    "says", [b"", GREETING, b"\x16\x03\x01\x02\x00\x01", b"\x00" * 5000, b"GET / HTTP/1.0\r\n\r\n"]
)
def test_a_stranger_is_shut_out_whatever_it_says(says: bytes, member) -> None:
    own, where = member
    with connected(where) as end:
        with suppress(ConnectionResetError, BrokenPipeError):
            end.sendall(says)
        said_until_the_end(end)
    assert own.members == {0}
    caller, place = mesh_of(9)
    assert caller.call(where, Ask(place, "graph", ())) == WELCOME
    caller.close()


def test_a_stranger_that_speaks_tls_without_the_key_is_shut_out(member) -> None:
    _, where = member
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    heard = b""
    with suppress(ssl.SSLError, ConnectionError), context.wrap_socket(connected(where)) as line:
        line.sendall(GREETING + b'[1,"a"]\n')  # it is looked for its certificate behind it
        heard = line.recv(4096)
    assert heard == b""


def test_lines_carry_words_of_any_size_both_ways_from_any_thread() -> None:
    (one, where), (other, place) = mesh_of(0), mesh_of(1)
    other.connect({0: where, 1: place})
    assert one.wait(lambda: 1 in one.members, LIMIT_S)
    text = "x" * 300_000

    def puts(own: Mesh, name: str) -> None:
        for count in range(20):
            own.put(1, f"{name} {count}", text[: 15_000 * count])

    by = ((one, "a"), (one, "b"), (other, "c"), (other, "d"))  # so that each is known to have come
    threads = [threading.Thread(target=puts, args=pair) for pair in by]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    keys = [f"{name} {count}" for name in "abcd" for count in range(20)]
    for own in (one, other):
        assert own.wait(lambda own=own: all(own.found(1, key) is not None for key in keys), LIMIT_S)
        assert own.found(1, "a 19") == text[: 15_000 * 19]
    other.close()
    assert one.wait(lambda: one.lost == {1: "left"}, LIMIT_S)
    one.close()


def test_without_tls_lines_are_as_they_were() -> None:
    (own, where) = mesh_of(0, b"token")
    end, line = proved(where)
    with end:
        assert line.is_over
    own.close()


def test_nothing_of_a_key_stays_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pair(MARK + b"one that nobody had", MARK + b"one that nobody had")
    assert not [*tmp_path.iterdir()]


def test_a_run_inside_tls_goes_on_when_a_rank_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.mortal(monkeypatch)
    ways = runs.ways_of("gpt", "adamw", 3)
    plans = {3: runs.plan_for(ways, 1, 3), 2: runs.plan_for(ways, 1, 2)}
    told = runs.run(ways, plans, 3, tmp_path, runs.doomed(1, 2, 3), token=TOKEN)
    check(told, "gpt", killed=1)
    assert [event.what for event in told.events] == ["begins", "lost"]
