"""The test stage of package conformance. program_test.go has the same stage in Go."""

from __future__ import annotations

import os

import stagecoach as sc

PROGRAM = os.environ.get("CONFORMANCE_PROGRAM", "")
INLINE_LIMIT = 64 << 10
MAX_BATCH = 64 if PROGRAM == "noop" else 4


def load(model: sc.Model) -> dict:
    return {}


def place(state: dict, replica: sc.Replica) -> dict:
    if PROGRAM == "unplaced":
        raise ValueError("no device of 3 GiB, want one")
    if PROGRAM == "crowded":
        raise sc.OutOfMemory("want 3 GiB, 1 GiB is free")
    return state


def each(state: dict, call: sc.Call) -> object:
    first = call.items[0]
    if first.has_tensors:
        return sc.Item(tensors=first.tensors)
    text = first.text()
    if text == "bad":
        raise sc.BadInput("got bad, want good")
    if text == "fail":
        raise OSError("broken")
    if text == "crowded":
        raise sc.OutOfMemory("want 2 GiB, 1 GiB is free")
    if text == "panic":
        raise RuntimeError("ouch")
    if text == "large":
        return sc.Output(sc.Item(b"L" * (1 << 20), "x/y"), b"small")
    if text == "many":
        return sc.Output(*(bytes([i]) * (INLINE_LIMIT + 1) for i in range(70)))
    if text == "flood":  # inline, and more than a socket's buffer holds
        return sc.Output(*[bytes(INLINE_LIMIT)] * 200)
    if text == "wait":
        call.wait()
        call.check()
    if text == "nothing":
        return None
    if text == "stream":
        return call.send("0123456789")
    if text == "pour":
        return call.send(bytes(1 << 20))
    if text == "keep":
        state["kept"] = call
        return None
    if text == "late":
        try:
            state["kept"].send(b"late")
        except sc.Cancelled:
            return b"canceled"
    if text == "sizes":
        return "".join(f"{it.content_type} {len(it.body)} " for it in call.items)
    if text == "show":
        return show(call)
    if text.startswith("env "):
        return os.environ.get(text[4:], "")
    return text.upper()


def show(call: sc.Call) -> str:
    out = f"{call.key.request} {call.key.task} {call.key.attempt}|{call.traceparent}|"
    if call.deadline is not None:
        out += str(round(call.deadline * 1000))
    for name, value in call.header:
        out += f"|{name}={value}"
    for source, items in call.parts:
        kinds = sorted(
            f"{it.content_type}0 {len(it.tensors)}" if it.has_tensors else f"{it.content_type}{len(it.body)} 0"
            for it in items
        )
        out += f"|{source}:{','.join(kinds)}"
    return out


def broken(state: dict, calls: list[sc.Call]) -> list:
    if any(c.items[0].text() == "b" for c in calls):
        raise RuntimeError("ouch")
    return noop(state, calls)


def noop(state: dict, calls: list[sc.Call]) -> list:
    return [sc.Output(*c.items) for c in calls]


if PROGRAM != "hookless":
    infer = {"each": sc.each(each), "few": lambda state, calls: [None], "broken": broken}.get(PROGRAM, noop)
