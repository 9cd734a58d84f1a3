"""Encrypted: lines between members inside TLS, where a run asks for it.

The token of such a run begins with a mark, so whoever has the token knows it.  From the token all
members make one key on the curve P-256, and one certificate that it has signed.  Each end of a line
shows that certificate, and takes no other.  So nobody has to be handed a second secret or a file,
and who does not know the token gets no further than the handshake.  Inside, members prove the token
and seal their messages as on any line (proof.py): keys of a session are those of that line alone,
and who learns the token later reads nothing of what was said before.

Source:   SEC 1 (curves, signatures), RFC 5280 (certificates), RFC 8446 (TLS 1.3).
"""

import base64
import hashlib
import hmac
import secrets
import ssl
import tempfile
import threading
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, TypeAlias, final

from penstock.members.words import WireError

MARK = b"TLS\0"
MOST_UNKNOWN_BYTES = 2**12  # that a peer may send before its handshake is over
_TOKEN_BYTES = 32
_READ_BYTES = 2**16

# P-256: the points of y^2 = x^3 - 3 x + b modulo _P; _ORDER of them, multiples of (_X, _Y)
_P = 2**256 - 2**224 + 2**192 + 2**96 - 1
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_X = 0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296
_Y = 0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5
_Point: TypeAlias = tuple[int, int] | None  # None: the point at infinity

_NAMES_CURVE = bytes.fromhex("06082a8648ce3d030107")
_NAMES_KEY = bytes.fromhex("06072a8648ce3d0201")
_NAMES_SIGNATURE = bytes.fromhex("06082a8648ce3d040302")  # ecdsa-with-SHA256
_NAMES_COMMON_NAME = bytes.fromhex("0603550403")
_FROM, _TO = b"20000101000000Z", b"99991231235959Z"  # clocks of hosts may say anything


def new_token(*, is_encrypted: bool) -> bytes:
    """Return a token that nobody knows yet."""
    while (token := secrets.token_bytes(_TOKEN_BYTES)).startswith(MARK):
        pass
    return MARK + token if is_encrypted else token


def is_encrypted(token: bytes) -> bool:
    """Return whether the lines of a run with this token are inside TLS."""
    return token.startswith(MARK)


# -- the key and the certificate ------------------------------------------------------------------


class Identity(NamedTuple):
    """What each member shows: a key and the certificate that it has signed, as DER."""

    key: bytes
    certificate: bytes

    @property
    def pem(self) -> str:
        """Return both as text."""
        return _pem("EC PRIVATE KEY", self.key) + _pem("CERTIFICATE", self.certificate)


def identity_of(token: bytes) -> Identity:
    """Return the identity that a token makes; the same for all who have it."""
    secret = _number(token, b"key")
    point = _times(secret, (_X, _Y))
    assert point is not None, "the number is less than the order of the curve"
    public = b"\4" + b"".join(number.to_bytes(32) for number in point)
    key = _der(
        0x30,
        _integer(1),
        _der(0x04, secret.to_bytes(32)),
        _der(0xA0, _NAMES_CURVE),
        _der(0xA1, _der(0x03, b"\0" + public)),
    )
    signed_by = _der(0x30, _NAMES_SIGNATURE)
    name = _der(0x30, _der(0x31, _der(0x30, _NAMES_COMMON_NAME, _der(0x0C, b"penstock"))))
    content = _der(
        0x30,
        _integer(_number(token, b"serial") >> 128),
        signed_by,
        name,
        _der(0x30, _der(0x18, _FROM), _der(0x18, _TO)),
        name,
        _der(0x30, _der(0x30, _NAMES_KEY, _NAMES_CURVE), _der(0x03, b"\0" + public)),
    )
    signature = _signature(secret, _number(token, b"once"), content)
    return Identity(key, _der(0x30, content, signed_by, _der(0x03, b"\0" + signature)))


def _number(token: bytes, what: bytes) -> int:
    """Return a number from 1 to the order of the curve less 1 that only the token tells."""
    digest = hmac.digest(token, b"penstock tls " + what, "sha512")
    return 1 + int.from_bytes(digest) % (_ORDER - 1)


def _signature(secret: int, once: int, content: bytes) -> bytes:
    """Return the signature of a certificate; `once` signs nothing else."""
    point = _times(once, (_X, _Y))
    assert point is not None, "the number is less than the order of the curve"
    first = point[0] % _ORDER
    digest = int.from_bytes(hashlib.sha256(content).digest())
    second = pow(once, -1, _ORDER) * (digest + first * secret) % _ORDER
    return _der(0x30, _integer(first), _integer(second))


def _times(number: int, point: _Point) -> _Point:
    """Return a multiple of a point of the curve."""
    total: _Point = None
    while number:
        if number & 1:
            total = _plus(total, point)
        point = _plus(point, point)
        number >>= 1
    return total


def _plus(one: _Point, other: _Point) -> _Point:
    if one is None or other is None:
        return one or other
    (x, y), (x_other, y_other) = one, other
    if x == x_other and (y + y_other) % _P == 0:
        return None
    if one == other:
        slope = (3 * x * x - 3) * pow(2 * y, -1, _P) % _P
    else:
        slope = (y_other - y) * pow(x_other - x, -1, _P) % _P
    x_sum = (slope * slope - x - x_other) % _P
    return x_sum, (slope * (x - x_sum) - y) % _P


def _der(tag: int, *parts: bytes) -> bytes:
    """Return a value as DER: its tag, its length, its content."""
    content = b"".join(parts)
    size = len(content)
    length = size.to_bytes((size.bit_length() + 7) // 8 or 1)
    head = bytes([tag, size]) if size < 128 else bytes([tag, 128 + len(length)]) + length
    return head + content


def _integer(number: int) -> bytes:
    return _der(0x02, number.to_bytes(number.bit_length() // 8 + 1))


def _pem(what: str, der: bytes) -> str:
    text = base64.encodebytes(der).decode()
    return f"-----BEGIN {what}-----\n{text}-----END {what}-----\n"


# -- lines ----------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _contexts(token: bytes) -> tuple[bytes, ssl.SSLContext, ssl.SSLContext]:
    """Return the certificate of a run, and how those that call and those that are called speak."""
    own = identity_of(token)
    contexts = [ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)]
    with tempfile.NamedTemporaryFile("w", prefix="penstock-") as file:  # its owner alone reads it
        file.write(own.pem)
        file.flush()
        for context in contexts:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # members are not known by their names
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=own.certificate)
            context.load_cert_chain(file.name)
    contexts[1].num_tickets = 0
    return own.certificate, contexts[0], contexts[1]


@final
@dataclass(eq=False)
class EncryptedLine:
    """One end of a line inside TLS: what comes and goes as bytes of the line, and what they mean.

    room:     bytes that may still come before the handshake is over.
    """

    token: bytes
    is_caller: bool
    is_open: bool = False
    room: int = MOST_UNKNOWN_BYTES
    _waiting: bytes = b""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._certificate, caller, called = _contexts(self.token)
        self._comes, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = caller if self.is_caller else called
        self._tls = context.wrap_bio(self._comes, self._goes, server_side=not self.is_caller)

    def said(self, data: bytes = b"") -> bytes:
        """Return the bytes by which the line says `data`, and what it owed before.

        Raises:   WireError: the other end does not know the token.
        """
        with self._lock:
            self._waiting += data
            self._advance()
            if self.is_open and self._waiting:
                self._tls.write(self._waiting)
                self._waiting = b""
            return self._goes.read()

    def heard(self, data: bytes) -> bytes:
        """Return what is said by bytes that have come; what is to be answered goes with `said`.

        Raises:   WireError: the other end does not know the token, or speaks otherwise.
        """
        with self._lock:
            if not self.is_open:
                self.room -= len(data)
            self._comes.write(data)
            self._advance()
            if not self.is_open and self.room <= 0:
                raise WireError("a peer that does not end its handshake")
            found = b""
            try:
                while self.is_open and (part := self._tls.read(_READ_BYTES)):
                    found += part
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as problem:
                raise WireError(f"a peer that speaks otherwise: {problem.reason}") from None
            return found

    def _advance(self) -> None:
        """Go on with the handshake, as far as what has come leads."""
        if self.is_open:
            return
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as problem:
            raise WireError(f"a peer that does not know the token: {problem.reason}") from None
        if self._tls.getpeercert(binary_form=True) != self._certificate:
            raise WireError("a peer that does not know the token: another certificate")
        self.is_open = True
