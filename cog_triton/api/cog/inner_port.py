"""The port of Cog's server behind the front, which nothing but the front can reach.

It is a free port of 127.0.0.1, without the front's checks: a web page that tries all ports could otherwise
end the server by it. So the front comes from a loopback address that is drawn at random, and the kernel
drops what comes from any other.
"""

import asyncio
import ctypes
import secrets
import socket
import struct
from ipaddress import IPv4Address

# Options of Linux's sockets, for which Python has no names.
_SO_ATTACH_FILTER = 26
_IP_BIND_ADDRESS_NO_PORT = 24
# Instructions of classic BPF, and their arguments.
_LOAD_WORD = 0x20
_JUMP_IF_EQUAL = 0x15
_RETURN = 0x06
# SKF_NET_OFF, and where IPv4's header has it.
_SOURCE_ADDRESS = 0xFFF00000 + 12
_ALL_BYTES = 0xFFFFFFFF
_NO_BYTES = 0


def random_source() -> str:
    """Return a loopback address that no browser connects from."""
    return f"127.{1 + secrets.randbelow(254)}.{secrets.randbelow(256)}.{1 + secrets.randbelow(254)}"


def accept_only_from(listener: socket.socket, source: str) -> None:
    """Drop what reaches a socket of IPv4 from other addresses, or raise OSError if the system cannot."""
    program = [
        (_LOAD_WORD, 0, 0, _SOURCE_ADDRESS),
        (_JUMP_IF_EQUAL, 0, 1, int(IPv4Address(source))),
        (_RETURN, 0, 0, _ALL_BYTES),
        (_RETURN, 0, 0, _NO_BYTES),
    ]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    description = struct.pack("HP", len(program), ctypes.addressof(buffer))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, description)


async def connect(source: str, port: int) -> socket.socket:
    """Return a connection to a port of 127.0.0.1 from a loopback address, or raise OSError."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The port is drawn as the connection is made: otherwise it could not be used again for a minute.
        connection.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
        connection.bind((source, 0))
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    except BaseException:
        connection.close()
        raise
    return connection
