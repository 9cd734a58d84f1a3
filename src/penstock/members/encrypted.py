"""Encrypted: lines between members inside TLS, where a run asks for it.

The token of such a run begins with a mark, so whoever has the token knows it.  From the token all
members make one Ed25519 key, and one certificate that it has signed: such a signature has no random
part, so all make the same.  Each end of a line shows that certificate, and takes no other.  So
nobody has to be handed a second secret or a file, and who does not know the token gets no further
than the handshake.  Inside, members prove the token and seal their messages as on any line
(token_proof.py): keys of a session are those of that line alone, and who learns the token later
reads nothing of what was said before.

Source:   RFC 5280 (certificates), RFC 8032 (Ed25519), RFC 8446 (TLS 1.3).
"""

import hmac
import importlib.util
import secrets
import ssl
import tempfile
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple, final

from penstock.errors import PlanError
from penstock.members.words import WireError

MARK = b"TLS\0"
MOST_UNKNOWN_BYTES = 2**12  # that a peer may send before its handshake is over
_TOKEN_BYTES = 32
_READ_BYTES = 2**16
_FROM, _TO = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)  # any clock's


def check_installed() -> None:
    """Raise where nothing makes certificates.

    Raises:   PlanError.
    """
    if importlib.util.find_spec("cryptography") is None:
        message = "lines inside TLS need the package cryptography, which is not installed"
        raise PlanError(message, hint='install it on every host: pip install "penstock[tls]"')


def new_token(*, is_encrypted: bool) -> bytes:
    """Return a token that nobody knows yet."""
    while (token := secrets.token_bytes(_TOKEN_BYTES)).startswith(MARK):
        pass
    return MARK + token if is_encrypted else token


def is_encrypted(token: bytes) -> bool:
    """Return whether the lines of a run with this token are inside TLS."""
    return token.startswith(MARK)


class Identity(NamedTuple):
    """What each member shows: its certificate as DER; and that as PEM, behind the key."""

    certificate: bytes
    pem: bytes


def identity_of(token: bytes) -> Identity:
    """Return the identity that a token makes; the same for all who have it."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    key = Ed25519PrivateKey.from_private_bytes(hmac.digest(token, b"penstock tls key", "sha256"))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "penstock")])
    unsigned = x509.CertificateBuilder().subject_name(name).issuer_name(name)
    unsigned = unsigned.public_key(key.public_key()).serial_number(1)
    made = unsigned.not_valid_before(_FROM).not_valid_after(_TO).sign(key, None)
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Identity(made.public_bytes(Encoding.DER), secret + made.public_bytes(Encoding.PEM))


# -- lines ----------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _contexts(token: bytes) -> tuple[bytes, ssl.SSLContext, ssl.SSLContext]:
    """Return the certificate of a run, and how those that call and those that are called speak."""
    own = identity_of(token)
    contexts = [ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)]
    with tempfile.NamedTemporaryFile(prefix="penstock-") as file:  # its owner alone reads it
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
