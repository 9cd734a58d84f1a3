"""Shut port: once all have connected, nobody else does; those that have go on."""

import os
import socket

import pytest

from penstock.transport import shut_port
from penstock.transport.shut_port import shut_when_made


def test_a_port_takes_nobody_once_it_is_made_and_keeps_those_that_are_there() -> None:
    def made() -> tuple[socket.socket, socket.socket, socket.socket]:
        listener = socket.create_server(("127.0.0.1", 0))
        near = socket.create_connection(listener.getsockname())
        return listener, near, listener.accept()[0]

    with socket.create_server(("127.0.0.1", 0)) as older:
        listener, near, far = shut_when_made(made)
        with listener, near, far:
            with pytest.raises(TimeoutError):
                socket.create_connection(listener.getsockname(), timeout=0.1)
            near.sendall(b"still")
            assert far.recv(5) == b"still"
            with socket.create_connection(older.getsockname(), timeout=60.0):
                pass


def test_a_file_that_another_thread_closes_meanwhile_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where its number is that of another socket by then."""
    look, made = shut_port._is_listening, list[socket.socket]()

    def looked(file: int) -> bool:
        found = look(file)
        if made and file == made[0].fileno():
            made[0].close()
        elif made and file == made[1].fileno():
            os.dup2(kept.fileno(), file)
        return found

    def call() -> None:
        made.extend(socket.create_server(("127.0.0.1", 0)) for _ in range(2))

    monkeypatch.setattr(shut_port, "_is_listening", looked)
    with socket.create_server(("127.0.0.1", 0)) as kept:
        shut_when_made(call)
        with made[1], socket.create_connection(kept.getsockname(), timeout=60.0):
            assert made[0].fileno() == -1
