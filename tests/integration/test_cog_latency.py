"""Cog's server sends each event of a stream at once: TCP_NODELAY on its real sockets."""

import contextlib
import ctypes
import errno
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support import ROOT, CogServer, started_by, wait_until

PIDFD_GETFD = 438  # a system call on x86-64


def nodelay(pid: int, chosen: Callable[[socket.socket], bool]) -> list[int]:
    """TCP_NODELAY of some of another process's sockets, of which it copies each."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(pid)
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            if not os.readlink(link).startswith("socket:"):
                continue
        fd = libc.syscall(PIDFD_GETFD, pidfd, int(link.name), 0)
        if fd < 0 and ctypes.get_errno() != errno.EBADF:
            pytest.skip(f"pidfd_getfd: {os.strerror(ctypes.get_errno())}")
        if fd >= 0:
            # Without a peer, or no socket any more.
            with contextlib.suppress(OSError), socket.socket(fileno=fd) as copy:
                if copy.family == socket.AF_INET and chosen(copy):
                    found.append(copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
    os.close(pidfd)
    return found


def listens_on(port: int) -> Callable[[socket.socket], bool]:
    def listens(found: socket.socket) -> bool:
        listening = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return bool(listening and found.getsockname()[1] == port)

    return listens


def test_connections_to_the_served_predictor_send_at_once(cog_server: CogServer) -> None:
    (cog,) = started_by(cog_server.process.pid, "cog_triton.api.cog.server")
    assert nodelay(cog, listens_on(cog_server.port)) == [1]
    with socket.create_connection(("127.0.0.1", cog_server.port)) as client:
        ours = client.getsockname()
        accepted = wait_until(lambda: nodelay(cog, lambda s: s.getpeername() == ours), 60, "it")
        assert accepted == [1]


def test_cogs_own_command_does_in_an_image(tmp_path: Path) -> None:
    """In a Python that has the line which cog.yaml puts into a .pth file."""
    (command,) = yaml.safe_load((ROOT / "cog.yaml").read_text())["build"]["run"]
    text = command.partition("write_text('")[2].rpartition("')\"")[0]
    path, line = eval(f"'{text}'").splitlines()
    assert path == "/src"
    # Python runs this module at the same moment, and no package is installed for the test.
    (tmp_path / "sitecustomize.py").write_text(line)
    given = {"PYTHONPATH": str(tmp_path), "COG_PREDICT_TYPE_STUB": "nothing.py:Predictor"}
    server = CogServer(given, tmp_path / "log")
    server.command = [sys.executable, "-m", "cog.server.http", "--host", "127.0.0.1"]
    server.directory = tmp_path
    with server:
        listening = listens_on(server.port)
        wait_until(lambda: nodelay(server.process.pid, listening) == [1], 30, "TCP_NODELAY")
