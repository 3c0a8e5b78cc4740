"""Decodes batches of the stage protocol, so that package conformance can compare the results with
Go's. It reads a length of 4 bytes and a payload from stdin. It writes a byte that says which kind
of answer follows, a length, and a description or an error to stdout.
"""

from __future__ import annotations

import struct
import sys

sys.path.insert(0, sys.argv[1])

from stagecoach import _wire  # noqa: E402
from stagecoach._types import Item  # noqa: E402


def main() -> None:
    while True:
        head = sys.stdin.buffer.read(4)
        if len(head) < 4:
            return
        payload = sys.stdin.buffer.read(struct.unpack("<I", head)[0])
        try:
            ok, out = 1, describe(payload)
        except _wire.WireError as err:
            ok, out = 0, str(err).encode(errors="replace")
        sys.stdout.buffer.write(struct.pack("<IB", len(out), ok) + out)
        sys.stdout.buffer.flush()


def describe(payload: bytes) -> bytes:
    out = []
    refs: dict[int, tuple] = {}

    def detach(owner: bytes, blob: bytes, size: int) -> Item:
        it = Item.received(b"", "", None)
        refs[id(it)] = (it, b"ref %s %s %d" % (owner, blob, size))
        return it

    def field(text: str) -> bytes:
        return text.encode("utf-8", "surrogateescape")

    for call in _wire.decode_batch(payload, detach):
        at = 0 if call.deadline is None else round(call.deadline)
        out.append(
            b"call %s %d %d %d %s"
            % (field(call.key.request), call.key.task, call.key.attempt, at, field(call.traceparent))
        )
        for name, value in call.header:
            out.append(b"header %s %s" % (field(name), field(value)))
        for source, items in call.parts:
            out.append(b"part %s" % field(source))
            for it in items:
                if id(it) in refs:
                    out.append(refs[id(it)][1])
                elif it.has_tensors:
                    for t in it._wired():
                        shape = b" ".join(b"%d" % d for d in t.shape)
                        out.append(b"tensor %s %s [%s] %s" % (field(t.name), field(t.datatype), shape, bytes(t.data)))
                else:
                    out.append(b"bytes %s %s" % (field(it.content_type), it.body))
    return b"\n".join(out)


main()
