"""Frames over a unix stream socket, with the descriptors that come with them (SCM_RIGHTS)."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import stat
import threading
from typing import Any, Sequence

from . import _wire
from ._types import Item
from ._wire import MAX_FILES, Frame, WireError

COPY_LIMIT = 64 << 10  # bytes up to which frames are joined for one system call
_BUFFER = 256 << 10  # bytes
_ANCILLARY = socket.CMSG_SPACE(4 * MAX_FILES)
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_FLAGS = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Conn:
    """Sends and receives frames. One thread reads at a time; any thread may write. After an error
    of the socket, every write raises it, because the other side may have received half a frame."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buf = memoryview(bytearray(_BUFFER))
        self._at = self._end = 0  # begin and end of the bytes that were read and not yet consumed
        self._files: list[int] = []  # received and not yet claimed by a frame
        self._lock = threading.Lock()  # protects writes
        self._error: OSError | None = None

    def read(self) -> Frame | None:
        """Return the next frame; the caller closes its descriptors. Return None if the other side
        has closed between two frames, or if shut_reads was called."""
        while True:
            if self._end - self._at < 16 and not self._fill(16):
                if self._end > self._at:
                    raise WireError("frame header: unexpected end")
                return None
            length, kind, files, batch, skip = _wire.decode_header(self._buf, self._at)
            self._at += 16
            payload = self._payload(kind, length)
            if len(self._files) < files:
                raise WireError(
                    f"frame {_wire.name_of(kind)} came with {len(self._files)} descriptors, its header says {files}"
                )
            mine, self._files = self._files[:files], self._files[files:]
            if not skip:
                return Frame(kind, batch, payload, mine)
            close_all(mine)

    def _payload(self, kind: int, length: int) -> bytes:
        if length <= _BUFFER:
            if self._end - self._at < length and not self._fill(length):
                raise WireError(f"frame {_wire.name_of(kind)} of {length} bytes: unexpected end")
            payload = bytes(self._buf[self._at : self._at + length])
            self._at += length
            return payload
        pieces = [bytes(self._buf[self._at : self._end])]
        left = length - len(pieces[0])
        self._at = self._end = 0
        while left > 0:
            n = self._receive(self._buf[: min(left, _BUFFER)])
            if n == 0:
                raise WireError(f"frame {_wire.name_of(kind)} of {length} bytes: unexpected end")
            pieces.append(bytes(self._buf[:n]))
            left -= n
        return b"".join(pieces)

    def _fill(self, want: int) -> bool:
        """Read until this many bytes are in the buffer. Return False at the end."""
        if self._at == self._end:
            self._at = self._end = 0
        elif _BUFFER - self._at < want:
            rest = bytes(self._buf[self._at : self._end])
            self._buf[: len(rest)] = rest
            self._at, self._end = 0, len(rest)
        while self._end - self._at < want:
            n = self._receive(self._buf[self._end :])
            if n == 0:
                return False
            self._end += n
        return True

    def _receive(self, into: memoryview) -> int:
        """Receive at least a byte, and keep the received descriptors. Return 0 at the end."""
        n, ancillary, flags, _ = self._sock.recvmsg_into([into], _ANCILLARY, _FLAGS)
        if ancillary:
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                    self._files += fds
            if len(self._files) > 2 * MAX_FILES:
                raise WireError(
                    f"{len(self._files)} descriptors that no frame has claimed, want at most {2 * MAX_FILES}"
                )
        if flags & socket.MSG_CTRUNC:
            raise WireError(f"more than {MAX_FILES} descriptors at a time")
        return n

    def write(self, kind: int, batch: int, payload: bytes, files: Sequence[int] = ()) -> None:
        """Send a frame. The kernel duplicates the descriptors; the caller still closes them."""
        self.send(frame(kind, batch, payload, len(files)), files)

    def send(self, data: bytes, files: Sequence[int] = ()) -> None:
        """Send frames, with descriptors that belong to the first of them."""
        with self._lock:
            if self._error is not None:
                raise self._error
            try:
                if files:
                    n = self._sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
                    self._sock.sendall(memoryview(data)[n:])
                else:
                    self._sock.sendall(data)
            except OSError as err:
                self._error = err
                raise

    def timeout(self, seconds: float | None) -> None:
        """Bound each read and write from now on. None removes the bound."""
        self._sock.settimeout(seconds)

    def shut_reads(self) -> None:
        """Make the reader stop once it has read the bytes that are already there."""
        self._shut(socket.SHUT_RD)

    def shut(self) -> None:
        """End reads and writes, also those that block."""
        self._shut(socket.SHUT_RDWR)

    def _shut(self, how: int) -> None:
        try:
            self._sock.shutdown(how)
        except OSError:  # the other side has closed it
            pass

    def close(self) -> None:
        """Close the socket, and descriptors that no frame has claimed. No thread may read or write
        any more."""
        close_all(self._files)
        self._files = []
        self._sock.close()


def frame(kind: int, batch: int, payload: bytes, files: int = 0) -> bytes:
    """Encode a frame."""
    return _wire.HEADER.pack(len(payload), kind, 1 if files else 0, files, _wire.VERSION, batch) + payload


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        try:
            os.close(fd)
        except OSError:  # nothing was written through it
            pass


def detach(files: list[int], owner: bytes, blob: bytes, size: int) -> Item:
    """Read an item of size bytes from the file that came with its frame. The item is a copy, so
    that a sender cannot change it later by writing to the file."""
    if owner != _wire.FILE_OWNER or not blob.isdigit() or len(blob) > 3 or int(blob) >= len(files):
        raise WireError(
            f"reference to {blob!r} of {owner!r}, want a file that came with the frame, which has {len(files)}"
        )
    fd = files[int(blob)]
    info = os.fstat(fd)
    # Reading any other kind of file could block forever.
    if not stat.S_ISREG(info.st_mode) or info.st_size < size:
        raise WireError(f"a file {stat.filemode(info.st_mode)} of {info.st_size} bytes, want a regular one of {size}")
    try:
        head = os.pread(fd, min(size, 512), 0)
        if head[:1] == b"\0":
            return _detach_body(fd, size, head)
        data = _read(fd, size, 0, bytearray(size))
        it, end = _wire.read_item(data, 0)
        if end != size:
            raise _wire.Fault(end, f"{size - end} bytes left over, want the end")
    except IndexError:
        raise WireError(f"a file of {size} bytes: more bytes wanted, none left") from None
    except _wire.Fault as err:
        raise WireError(f"a file: at byte {err.args[0]} of {size}: {err.args[1]}") from None
    return it


def _detach_body(fd: int, size: int, head: bytes) -> Item:
    """Read an item of bytes directly into the memory that the handler gets."""
    n, i = _wire.read_uvarint(head, 1)
    if i + n + 10 > len(head):  # the content type is this long
        head = os.pread(fd, min(size, i + n + 10), 0)
    content_type = head[i : i + n].decode("utf-8", "surrogateescape")
    m, i = _wire.read_uvarint(head, i + n)
    if i + m != size:
        raise _wire.Fault(i, f"an item of {m} bytes with {size - i} left")
    body = os.pread(fd, m, i)
    if len(body) < m:
        body = bytes(_read(fd, m, i, bytearray(m)))
    return Item.received(body, content_type, None)


def _read(fd: int, size: int, offset: int, into: bytearray) -> bytearray:
    view, at = memoryview(into), 0
    while at < size:
        n = os.preadv(fd, [view[at:]], offset + at)
        if n == 0:
            raise WireError(f"a file of {offset + at} bytes, want {offset + size}")
        at += n
    return into


def attach(items: Sequence[Item]) -> tuple[list[list[bytes]], list[int]]:
    """Encode items. Large items go into sealed files that are sent with the frame. The caller
    closes these files."""
    out: list[list[bytes]] = []
    files: list[int] = []
    left = _wire.MAX_DETACHED
    try:
        for it in items:
            pieces: list[Any] = _wire.item(it)
            if len(files) < MAX_FILES and _wire.item_size(it) > _wire.INLINE_LIMIT:
                size = sum(map(len, pieces))
                left -= size
                if left < 0:
                    raise ValueError(f"{_wire.MAX_DETACHED - left} bytes, want at most {_wire.MAX_DETACHED} in all")
                files.append(_sealed(pieces))
                pieces = [_wire.reference(len(files) - 1, size)]
            out.append(pieces)
    except BaseException:
        close_all(files)
        raise
    return out, files


def _sealed(pieces: list[Any]) -> int:
    """Make a memfd of the pieces that no process can change any more."""
    fd = os.memfd_create("stagecoach-item", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for piece in pieces:
            view = memoryview(piece)
            while len(view):
                view = view[os.write(fd, view) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd
