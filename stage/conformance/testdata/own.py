"""A test stage for features that only the Python SDK has; see python_test.go."""

from __future__ import annotations

import logging
import socket
import sys
import threading

import numpy

import stagecoach as sc

MAX_BATCH = 4
SLOTS = 2
logging.info("while it is imported")
socket.setdefaulttimeout(0.001)  # applies to the handler's own connections
closed: list[str] = []


class Mute(Exception):
    def __str__(self) -> str:
        raise AttributeError("code")


def load(model: sc.Model) -> list[int]:
    print("loading")
    return [threading.get_ident()]


def place(state: list[int], replica: sc.Replica) -> list[int]:
    print("placing", replica.name, replica.function, replica.device, replica.threads > 0)
    return [*state, threading.get_ident()]


def infer(state: list[int], calls: list[sc.Call]) -> object:
    text = calls[0].input.text()
    if text == "exit":
        sys.exit("enough")
    if text == "str":
        return "one for all"
    if text == "none":
        return None
    if text == "generator":
        return (c.input.text().upper() for c in calls)
    if text == "raise late":
        return (c.input.json() for c in calls)
    if text == "thread":
        return [all(t == threading.get_ident() for t in state) for _ in calls]
    if text == "log":
        calls[0].log.info("hello %s", "log")
        calls[0].log.debug("not this")
        print("hello print")
        return [None]
    if text == "closed":
        return [",".join(closed)]
    if text == "mute":
        raise Mute
    if text == "huge":
        return [bytes(1 << 30)]
    if text == "pieces":
        return [(piece for piece in [{"token": 1}])]
    if text == "long":
        raise ValueError("x" * 1_000_000)
    if text == "remaining":
        return [[calls[0].remaining() is None, calls[0].wait(0.001), calls[0].cancelled()]]
    if text == "unserialisable":
        mixed = {"label": "cat", "scores": numpy.zeros(2)}
        return [mixed, {1, 2}, sc.Output(b"fine", header={"X-Fine": "yes"}), float("nan")]
    return [stream(c) for c in calls]


def stream(call: sc.Call):
    try:
        for i in range(call.input.json()):
            yield f"{call.index}:{i}"
        if call.header_value("x-fail"):
            raise sc.BadInput("after all")
    finally:
        closed.append(call.key.request)
    return {"pieces": i + 1}
