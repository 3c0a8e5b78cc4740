"""The messages between a manager and a zygote or worker (package wire, order.go), and a loop that
handles them."""

from __future__ import annotations

import array
import os
import socket
import struct
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from . import _main

if TYPE_CHECKING:
    from . import device

VERSION = 3
HEADER = 8  # bytes of an order before its environment
MAX_MESSAGE = 64 << 10  # bytes of an order
MAX_CHILDREN = 1024
BEGIN_FDS = 3  # stage socket, stdout, stderr
MAX_FDS = 16  # accepted with one order, which is refused if it has too many
NO_ID = 0xFFFFFFFF  # the id of an error without a fork order
MAX_ERROR = 2000  # bytes of an error's text
FAILED, UNFORKABLE = 0, 1  # reasons of an error


class Begin(NamedTuple):
    """The content of a begin order, with the descriptor of its stage socket."""

    fd: int
    threads: int
    env: list[str]
    spot: device.Device | None  # ready device of a parked child


class Received(NamedTuple):
    """A message from a socket, and the descriptors that came with it."""

    data: bytes
    cut: bool  # a part of the message was lost
    fds: list[int]


class Control:
    """Handles the orders that come over a control socket."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._buffer = bytearray(MAX_MESSAGE)
        # Id of its fork order by pid; children that are not yet reaped.
        self._children: dict[int, int] = {}

    def tell(self, message: bytes) -> None:
        """Send one message. If the manager has gone, end the zygote, and with it its children."""
        try:
            self._control.send(message, socket.MSG_NOSIGNAL)
        except OSError:
            os._exit(0)

    def _receive(self) -> Begin | None:
        """Handle one order. In a new child, return its begin order."""
        try:
            r = receive(self._control, self._buffer)
        except OSError:
            os._exit(0)
        if not r.data:
            os._exit(0)
        told = self._handle_order(r)
        if told is None:
            close(r.fds)
        return told

    def _handle_order(self, r: Received) -> Begin | None:
        kind, n = r.data[:1], len(r.data)
        order = NO_ID
        if n >= HEADER and kind == b"F":
            order = word(r.data)
        if r.cut:
            self._refuse(order, f"order: above {MAX_MESSAGE} bytes or {MAX_FDS} descriptors, want less")
        elif n < HEADER:
            self._refuse(order, f"order: {n} bytes, want at least {HEADER}")
        elif r.data[1] != VERSION:
            self._refuse(order, f"order: version {r.data[1]}, want {VERSION}")
        elif kind == b"F" and len(r.fds) != 1:
            self._refuse(order, f"fork: {len(r.fds)} descriptors, want 1: the gate")
        elif kind == b"F" and n != HEADER:
            self._refuse(order, f"fork: {n} bytes, want {HEADER}")
        elif kind == b"F" and len(self._children) == MAX_CHILDREN:
            self._refuse(order, f"fork: {MAX_CHILDREN} replicas live, want fewer")
        elif kind == b"F":
            return self._fork(order, r)
        elif kind == b"K" and n == HEADER:
            self._kill(word(r.data), r.data[2] | r.data[3] << 8)
        elif kind == b"L" and n == HEADER:
            self._list(r.data[4:8])
        else:
            self._refuse(order, f"order: kind {kind[0]} of {n} bytes, want F, K or L")
        return None

    def _refuse(self, order: int, text: str) -> None:
        """Report why an order is not carried out."""
        self.tell(error(order, FAILED, text))

    def _fork(self, order: int, r: Received) -> Begin | None:
        """Start a child. In the child, return its begin order."""
        raise NotImplementedError

    def _kill(self, pid: int, number: int) -> None:
        """End a child by a signal."""
        raise NotImplementedError

    def _list(self, order: bytes) -> None:
        """Report every child that has not been reaped."""
        for pid, fork in self._children.items():
            self.tell(struct.pack("<cBHII", b"A", VERSION, 0, fork, pid))
        self.tell(struct.pack("<cBH", b"L", VERSION, 0) + order)


def adopt(fd: int) -> socket.socket:
    """Adopt the control socket, once."""
    os.environ.pop(_main.ENV_ZYGOTE_FD, None)
    try:
        os.set_blocking(fd, True)
        os.set_inheritable(fd, False)
        return socket.socket(fileno=fd)
    except OSError as err:
        raise SystemExit(f"zygote: {_main.ENV_ZYGOTE_FD}={fd}: {err}, want the number of an open SOCK_SEQPACKET socket")


def give_up(control: socket.socket, why: int, text: str) -> NoReturn:
    """End the zygote, which could not load."""
    try:
        control.send(error(0, why, text), socket.MSG_NOSIGNAL)
    except OSError:  # the manager has gone
        pass
    _main.end_process(1)


def error(order: int, why: int, text: str) -> bytes:
    encoded = text.encode(errors="replace")[:MAX_ERROR].decode(errors="ignore").encode()
    return struct.pack("<cBHI", b"E", VERSION, why, order) + encoded


def receive(sock: socket.socket, buffer: bytearray) -> Received:
    n, ancillary, flags, _ = sock.recvmsg_into([buffer], socket.CMSG_SPACE(4 * MAX_FDS), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return Received(bytes(buffer[:n]), bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)), list(fds))


def environment(data: bytes) -> list[str]:
    """Return the environment in an order."""
    if len(data) > HEADER and data[-1] != 0:
        raise OSError("environment, whose last string has no end")
    return [os.fsdecode(kv) for kv in data[HEADER:].split(b"\0") if kv]


def threads_of(data: bytes) -> int:
    """Return the number of threads in a begin order."""
    return max(1, data[2] | data[3] << 8)


def word(data: bytes) -> int:
    return int.from_bytes(data[4:8], "little")


def close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
