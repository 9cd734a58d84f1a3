"""Shut port: once all have connected, nobody else does; those that have go on."""

import socket

import pytest

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
