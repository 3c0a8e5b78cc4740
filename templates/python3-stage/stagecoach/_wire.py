"""Encodes and decodes the stage protocol: frames over a socket, and their payloads. The Go package
wire defines the protocol; this module has the part that a replica needs. Decoding checks every
length before it is used. An error is a :class:`WireError`, which ends the connection.

Decoding a batch is the hot path: it is one pass over the bytes, without helpers for the parts of
each call.
"""

from __future__ import annotations

import struct
from typing import Any, Callable, NamedTuple, Sequence

from ._types import Call, Item, Key, Part, Tensor

OLDEST_VERSION, VERSION = 1, 2
MAX_FRAME = 64 << 20  # bytes per payload
MAX_FILES = 64  # descriptors per frame
INLINE_LIMIT = 64 << 10  # bytes per item; larger ones are sent in files
MAX_DETACHED = 1 << 30  # bytes in files per part of an input

HELLO, WELCOME, BATCH, RESULT, ERROR, CHUNK, CREDIT, CANCEL, DRAIN, THREADS = range(1, 11)
NAMES = ("0", "Hello", "Welcome", "Batch", "Result", "Error", "Chunk", "Credit", "Cancel", "Drain", "Threads")
CANCEL_ALL = 0x7FFFFFFF  # the index of a Cancel for the whole batch

# The outcomes of a call.
BAD_INPUT, FAILED, REPLICA_LOST, EXPIRED, CANCELED, OUT_OF_MEMORY = 1, 2, 3, 4, 6, 9

HEADER = struct.Struct("<IBBBBQ")  # length, type, flags, descriptors, version, batch
FILE_OWNER = b"fd:"  # owner of a reference to a file that is sent with the frame


class WireError(Exception):
    """The other side broke the protocol: which thing, what was got, what was wanted."""


class Frame(NamedTuple):
    """One message on a replica's socket."""

    kind: int
    batch: int  # 0: the frame belongs to no batch
    payload: bytes
    files: list[int]  # descriptors; the receiver closes them


def name_of(kind: int) -> str:
    """Return the name of a frame's type."""
    return NAMES[kind] if 0 < kind < len(NAMES) else f"type {kind}"


def decode_header(head: bytes | memoryview, at: int = 0) -> tuple[int, int, int, int, bool]:
    """Decode the 16 bytes in front of a payload. Return its length, type, descriptors and batch,
    and whether the frame must be skipped, because only a later version knows its type."""
    length, kind, flags, files, version, batch = HEADER.unpack_from(head, at)
    if version < OLDEST_VERSION:
        raise WireError(f"frame of version {version}, want {OLDEST_VERSION} or later")
    if length > MAX_FRAME:
        raise WireError(f"frame {name_of(kind)} of {length} bytes, want at most {MAX_FRAME}")
    if files > MAX_FILES or (flags & 1 != 0) != (files > 0):
        what = f"frame {name_of(kind)} with flags {flags:#x} and {files} descriptors"
        raise WireError(f"{what}, want at most {MAX_FILES} and bit 0 set when there are any")
    known = HELLO <= kind <= THREADS
    if not known and version <= VERSION:
        raise WireError(f"frame of type {kind} in version {version}, want {HELLO} to {THREADS}")
    return length, kind, files, batch, not known


def uvarint(v: int) -> bytes:
    """Encode an unsigned varint."""
    if v < 0x80:
        return bytes((v,))
    out = bytearray()
    while v >= 0x80:
        out.append(v & 0x7F | 0x80)
        v >>= 7
    out.append(v)
    return bytes(out)


def varint(v: int) -> bytes:
    """Encode a signed varint (zigzag)."""
    return uvarint((v << 1) ^ (v >> 63))


def string(s: str) -> bytes:
    """Encode a string. Bytes that were received as invalid UTF-8 are sent unchanged."""
    b = s.encode("utf-8", "surrogateescape")
    return uvarint(len(b)) + b


class Fault(Exception):
    """An error in a payload. Its arguments are the offset and the text. Package-private."""


_SHIFTS = range(0, 70, 7)


def read_uvarint(b: bytes | bytearray, i: int) -> tuple[int, int]:
    """Decode an unsigned varint at b[i]. Return the number and the offset after it."""
    v = 0
    for shift, c in zip(_SHIFTS, b[i : i + 10]):
        if c < 0x80:
            v |= c << shift
            if v > 0xFFFFFFFFFFFFFFFF:
                break
            return v, i + shift // 7 + 1
        v |= (c & 0x7F) << shift
    raise Fault(i, "no varint, want one of at most 10 bytes")


def _count(b: bytes | bytearray, i: int, size: int) -> tuple[int, int]:
    """Decode the number of elements that follow, each of at least size bytes."""
    n = b[i]
    i += 1
    if n > 127:
        n, i = read_uvarint(b, i - 1)
    if n > (len(b) - i) // size:
        raise Fault(i, f"{n} elements of at least {size} bytes, want no more than the {len(b) - i} bytes left can hold")
    return n, i


def _bytes(b: bytes, i: int) -> tuple[bytes, int]:
    n, i = _count(b, i, 1)
    return b[i : i + n], i + n


def _text(b: bytes | bytearray, i: int) -> tuple[str, int]:
    n, i = _count(b, i, 1)
    return b[i : i + n].decode("utf-8", "surrogateescape"), i + n


def _small(b: bytes, i: int) -> tuple[int, int]:
    v, i = read_uvarint(b, i)
    if v > 0x7FFFFFFF:
        raise Fault(i, f"number {v}, want at most {0x7FFFFFFF}")
    return v, i


def _end(b: bytes, i: int) -> None:
    if i != len(b):
        raise Fault(i, f"{len(b) - i} bytes left over, want the end")


def _decode(what: str, b: bytes, read: Callable[[bytes], Any]) -> Any:
    try:
        return read(b)
    except Fault as err:
        at, text = err.args
        raise WireError(f"{what}: at byte {at} of {len(b)}: {text}") from None
    except IndexError:
        raise WireError(f"{what}: at byte {len(b)} of {len(b)}: more bytes wanted, none left") from None


def hello(
    pid: int, function: str, replica: str, slots: int, max_batch: int, threads: int, load: int, place: int
) -> bytes:
    """Encode a Hello. load and place are in ns."""
    who = (bytes((OLDEST_VERSION, VERSION)), uvarint(pid), string(function), string(replica))
    return b"".join((*who, *map(uvarint, (slots, max_batch, threads)), varint(load), varint(place)))


def decode_welcome(b: bytes) -> tuple[int, int]:
    """Decode a Welcome. Return the version that both sides speak, and the bytes of chunks that may
    be sent."""

    def read(b: bytes) -> tuple[int, int]:
        version = b[0]
        credit, i = read_uvarint(b, 1)
        _end(b, i)
        return version, credit

    return _decode("welcome", b, read)


def decode_number(what: str, b: bytes) -> int:
    """Decode a Credit."""

    def read(b: bytes) -> tuple[int]:
        v, i = read_uvarint(b, 0)
        _end(b, i)
        return (v,)

    return _decode(what, b, read)[0]


def decode_cancel(b: bytes) -> int:
    """Decode a Cancel: the call's index, or CANCEL_ALL."""

    def read(b: bytes) -> tuple[int]:
        v, i = _small(b, 0)
        _end(b, i)
        return (v,)

    return _decode("cancel", b, read)[0]


def decode_threads(b: bytes) -> int:
    """Decode a Threads."""
    if len(b) != 2:
        raise WireError(f"threads: {len(b)} bytes, want 2")
    return b[0] | b[1] << 8


_make = tuple.__new__  # of a NamedTuple; three times as fast as calling its class
Detach = Callable[[bytes, bytes, int], Item]  # arguments: owner, blob and size of a reference


def decode_batch(b: bytes, detach: Detach) -> list[Call]:
    """Decode a Batch. detach reads the items that are in files."""
    return _decode("batch", b, lambda b: _read_batch(b, detach))


def _read_batch(b: bytes, detach: Detach) -> list[Call]:
    size = len(b)
    count, i = _count(b, 0, 7)
    if count == 0:
        raise Fault(i, "no calls, want at least one")
    calls = []
    for index in range(count):
        n = b[i]
        i += 1
        if n > 127:
            n, i = read_uvarint(b, i - 1)
        j = i + n
        if j > size:
            raise Fault(i, f"a request's name of {n} bytes, {size - i} left")
        request = b[i:j].decode("utf-8", "surrogateescape")
        task = b[j]
        i = j + 1
        if task > 127:
            task, i = read_uvarint(b, j)
            if task > 0xFFFFFFFF:
                raise Fault(i, f"task {task} of request {request!r}, want at most {0xFFFFFFFF}")
        attempt = b[i]
        i += 1
        n = b[i]
        i += 1
        if n > 127:
            n, i = read_uvarint(b, i - 1)
        deadline = ((n >> 1) ^ -(n & 1)) / 1e9 if n else None
        n = b[i]
        i += 1
        if n > 127:
            n, i = read_uvarint(b, i - 1)
        j = i + n
        if j > size:
            raise Fault(i, f"a traceparent of {n} bytes, {size - i} left")
        traceparent = b[i:j].decode("utf-8", "surrogateescape")
        i = j
        header, i = _read_header(b, i)
        parts, i = _read_input(b, i, index, detach)
        calls.append(Call(parts, header, deadline, _make(Key, (request, task, attempt)), traceparent))
    _end(b, i)
    return calls


def _read_header(b: bytes, i: int) -> tuple[list[tuple[str, str]], int]:
    n = b[i]
    if n == 0:
        return [], i + 1
    size = len(b)
    n, i = _count(b, i, 2)
    header = []
    for _ in range(n):
        k = b[i]
        i += 1
        if k > 127:
            k, i = read_uvarint(b, i - 1)
        m = i + k
        v = b[m]
        j = m + 1
        if v > 127:
            v, j = read_uvarint(b, m)
        e = j + v
        if e > size:
            raise Fault(i, f"a header field of {k} and {v} bytes, {size - i} left")
        header.append((b[i:m].decode("utf-8", "surrogateescape"), b[j:e].decode("utf-8", "surrogateescape")))
        i = e
    return header, i


def _read_input(b: bytes, i: int, call: int, detach: Detach) -> tuple[list[Part], int]:
    n, i = _count(b, i, 2)
    parts = []
    for _ in range(n):
        source = ""
        if b[i] == 0:
            i += 1
        else:
            source, i = _text(b, i)
        items, i = _read_activation(b, i, call, detach)
        parts.append(_make(Part, (source, items)))
    return parts, i


def _read_activation(b: bytes, i: int, call: int, detach: Detach) -> tuple[list[Item], int]:
    n, i = _count(b, i, 2)
    items = []
    left = MAX_DETACHED
    for k in range(n):
        if b[i] != 2:
            it, i = read_item(b, i)
            items.append(it)
            continue
        owner, i = _bytes(b, i + 1)
        blob, i = _bytes(b, i)
        size, i = read_uvarint(b, i)
        left -= size
        if left < 0:
            raise WireError(f"call {call}: item {k}: {size} bytes in a file, want at most {MAX_DETACHED} in all")
        try:
            items.append(detach(owner, blob, size))
        except WireError as err:
            raise WireError(f"call {call}: item {k}: {err}") from None
    return items, i


def read_item(b: bytes | bytearray, i: int) -> tuple[Item, int]:
    """Decode an item that is no reference. Return the item and the offset after it."""
    kind = b[i]
    i += 1
    if kind == 0:
        n = b[i]
        i += 1
        if n > 127:
            n, i = read_uvarint(b, i - 1)
        j = i + n
        m = b[j]
        k = j + 1
        if m > 127:
            m, k = read_uvarint(b, j)
        e = k + m
        if e > len(b):
            raise Fault(i, f"an item of {n} and {m} bytes, {len(b) - i} left")
        return Item.received(bytes(b[k:e]), b[i:j].decode("utf-8", "surrogateescape"), None), e
    if kind == 1:
        n, i = _count(b, i, 4)
        wire = []
        for _ in range(n):
            t, i = _read_tensor(b, i)
            wire.append(t)
        return Item.received(b"", "", wire), i
    raise Fault(i - 1, f"item of kind {kind}, want 0, 1 or 2")


def _read_tensor(b: bytes | bytearray, i: int) -> tuple[Tensor, int]:
    name, i = _text(b, i)
    datatype, i = _text(b, i)
    rank, i = _count(b, i, 1)
    shape = []
    for _ in range(rank):
        d, i = read_uvarint(b, i)
        shape.append(d & 0x7FFFFFFFFFFFFFFF)
    n, i = _count(b, i, 1)
    return Tensor(name, datatype, tuple(shape), memoryview(b)[i : i + n]), i + n


def item_size(it: Item) -> int:
    """Return the approximate size of an item in a message, in bytes."""
    if it._wire is None:
        return len(it._body)
    return sum(len(t.data) + len(t.name) + 8 * len(t.shape) for t in it._wire)


def item(it: Item) -> list[bytes]:
    """Encode an item as a list of pieces, so that large data is not copied."""
    if it._wire is None:
        return [b"\0", string(it.content_type), uvarint(len(it._body)), it._body]
    out = [b"\1", uvarint(len(it._wire))]
    for t in it._wire:
        shape = map(uvarint, (len(t.shape), *t.shape))
        out += (string(t.name), string(t.datatype), *shape, uvarint(len(t.data)), t.data)
    return out


def reference(blob: int, size: int) -> bytes:
    """Encode a reference to the file with this number that is sent with the frame."""
    b = b"%d" % blob
    return b"\2" + uvarint(len(FILE_OWNER)) + FILE_OWNER + uvarint(len(b)) + b + uvarint(size)


def result(index: int, service: int, header: Sequence[tuple[str, str]], items: Sequence[list[bytes]]) -> bytes:
    """Encode a Result. service is in ns; the items are already encoded."""
    out = [uvarint(index), uvarint(service << 1), uvarint(len(header))]
    for name, value in header:
        out += (string(name), string(value))
    out.append(uvarint(len(items)))
    for pieces in items:
        out += pieces
    return b"".join(out)


def error(index: int, service: int, code: int, message: str) -> bytes:
    """Encode an Error. service is in ns."""
    text = message.encode("utf-8", "backslashreplace")
    return b"".join((uvarint(index), uvarint(service << 1), bytes((code,)), uvarint(len(text)), text))


def chunk(index: int, data: bytes | memoryview) -> bytes:
    """Encode a Chunk."""
    return b"".join((uvarint(index), uvarint(len(data)), data))
