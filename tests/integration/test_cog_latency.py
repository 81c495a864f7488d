"""Cog's server sends each event of a stream at once: TCP_NODELAY on its real sockets."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.support import ROOT, CogServer, children, free_port, wait_until

PIDFD_OPEN, PIDFD_GETFD = 434, 438  # system calls on x86-64


def sockets(pid: int) -> Iterator[socket.socket]:
    """Copies of another process's sockets."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = libc.syscall(PIDFD_OPEN, pid, 0)
    assert pidfd >= 0
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if not is_socket(link):
                continue
            fd = libc.syscall(PIDFD_GETFD, pidfd, int(link.name), 0)
            if fd < 0 and ctypes.get_errno() == errno.EBADF:  # closed since
                continue
            if fd < 0:
                pytest.skip(f"pidfd_getfd: {os.strerror(ctypes.get_errno())}")
            with socket.socket(fileno=fd) as found:
                yield found
    finally:
        os.close(pidfd)


def is_socket(link: Path) -> bool:
    try:
        return os.readlink(link).startswith("socket:")
    except FileNotFoundError:  # closed since
        return False


def peer(connection: socket.socket) -> object:
    try:
        return connection.getpeername()
    except OSError:  # it listens, or its peer has gone
        return None


def listeners_nodelay(pid: int, port: int) -> list[int]:
    return [
        found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        for found in sockets(pid)
        if found.family == socket.AF_INET
        and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        and found.getsockname()[1] == port
    ]


def test_connections_to_the_served_predictor_send_at_once(cog_server: CogServer) -> None:
    (cog,) = [
        pid
        for pid in children(cog_server.process.pid)
        if b"cog_triton.faces.cog.server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert listeners_nodelay(cog, cog_server.port) == [1]
    with socket.create_connection(("127.0.0.1", cog_server.port)) as client:

        def accepted() -> list[int]:
            return [
                found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                for found in sockets(cog)
                if found.family == socket.AF_INET and peer(found) == client.getsockname()
            ]

        assert wait_until(accepted, 10, "the connection") == [1]


@contextmanager
def cog_of_an_image(directory: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Cog's own command, in a Python that has the line which cog.yaml puts into a .pth file."""
    (command,) = yaml.safe_load((ROOT / "cog.yaml").read_text())["build"]["run"]
    text = command.partition("write_text('")[2].rpartition("')\"")[0]
    path, line = eval(f"'{text}'").splitlines()
    assert path == "/src"
    # Python runs this module at the same moment, and no package is installed for the test.
    (directory / "sitecustomize.py").write_text(line)
    server = subprocess.Popen(
        [sys.executable, "-m", "cog.server.http", "--host", "127.0.0.1"],
        cwd=directory,
        env={
            **os.environ,
            "PYTHONPATH": str(directory),
            "PORT": str(port),
            "COG_PREDICT_TYPE_STUB": "nothing.py:Predictor",
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield server
    finally:
        server.terminate()
        server.wait()


def test_cogs_own_command_does_in_an_image(tmp_path: Path) -> None:
    port = free_port()
    with cog_of_an_image(tmp_path, port) as server:
        wait_until(lambda: listeners_nodelay(server.pid, port) == [1], 30, "TCP_NODELAY")
