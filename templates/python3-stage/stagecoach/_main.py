"""What a stage's process does: it is a zygote, or a replica, by the environment that it was started with."""

from __future__ import annotations

import gc
import logging
import os
import re
import socket
import sys
import time
from dataclasses import replace
from typing import NoReturn

from . import _linux, _threads, device
from ._serve import Orders, serve
from ._stage import Loaded, load, place
from ._types import Replica, StageError
from ._wire import WireError

ENV_ZYGOTE_FD = "STAGECOACH_ZYGOTE_FD"
ENV_WORKER = "STAGECOACH_WORKER"
ENV_STAGE_FD = "STAGECOACH_STAGE_FD"
ENV_REPLICA = "STAGECOACH_REPLICA"
ENV_FUNCTION = "STAGECOACH_FUNCTION"
ENV_THREADS = "STAGECOACH_THREADS"
ENV_SEALED = "STAGECOACH_SEALED"

BY_HAND = (
    "this is a stage of a Stagecoach pipeline, and it was started without a stage socket: "
    "deploy it (faas-cli deploy) and let `stagecoach up` start it"
)


def main() -> NoReturn:
    """Run this process as the stage, and do not return. It ends with 0 when the replica was drained or its dispatcher
    is gone, with 2 when it was started by hand, else with 1."""
    if os.environ.get(ENV_SEALED):
        _linux.seal()
    lines()
    # Threads that wait for the next piece of work sleep: ones that spin take cores of other replicas, and of their own.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if os.environ.get(ENV_ZYGOTE_FD) and os.environ.get(ENV_WORKER):
        from . import _worker  # serves such orders too, with threads in place of children

        _worker.run(descriptor(ENV_ZYGOTE_FD))
    if os.environ.get(ENV_ZYGOTE_FD):
        from . import _zygote  # serves fork orders on that descriptor; its children call replica()

        _zygote.run(descriptor(ENV_ZYGOTE_FD))
    if not os.environ.get(ENV_STAGE_FD):
        print(BY_HAND, file=sys.stderr)
        leave(2)
    try:
        sock = connection(descriptor(ENV_STAGE_FD))
        threads = number(ENV_THREADS)
        if threads:  # the libraries read these when they are loaded
            os.environ.update({name: str(threads) for name in _threads.VARIABLES})
        loaded = load()
        if threads:
            _threads.compute_with(threads)
    except StageError as err:
        fail(err)
    run(loaded, sock, loaded.nanos)


def number(name: str) -> int:
    """Read a number of threads from the environment; not there: 0."""
    text = os.environ.get(name, "")
    if text and (not text.isdigit() or int(text) < 1):
        raise StageError(f'{name}="{text}", want a number from 1 on')
    return int(text or 0)


def replica(loaded: Loaded, fd: int, spot: device.Device | None = None) -> NoReturn:
    """Run this process as a replica on the stage socket fd, and end it. What was loaded is inherited; spot is the
    device, if it is ready. Environment, threads and seeds are as they are to be."""
    try:
        sock = connection(fd)
    except StageError as err:
        fail(err)
    run(loaded, sock, 0, spot)


def run(loaded: Loaded, sock: socket.socket, load_ns: int, spot: device.Device | None = None) -> NoReturn:
    """Run this process as a replica on sock, and end it. load_ns is what loading took in this process."""
    try:
        answer(loaded, sock, load_ns, spot or device.Device(device.name()))
    except (StageError, WireError, OSError) as err:
        fail(err)
    leave(0)


def answer(
    loaded: Loaded, sock: socket.socket, load_ns: int, spot: device.Device, orders: Orders | None = None
) -> None:
    """Place a stage on the device spot and answer batches over sock, which it closes, until the stage is drained or its
    dispatcher gone. orders is what it is told by in place of signals: it is one of several in this process."""
    with sock:
        hooks = replace(loaded.hooks, slots=slots(loaded.hooks.slots, os.environ.get("max_inflight", "")))
        timeout = duration("exec_timeout", os.environ.get("exec_timeout", ""))
        threads = number(ENV_THREADS) or len(os.sched_getaffinity(0))
        me = Replica(
            os.environ.get(ENV_REPLICA, ""), os.environ.get(ENV_FUNCTION, ""), spot.name, threads, spot.place
        )
        begin = time.monotonic_ns()
        state = place(loaded, me)
        spot.placed()
        if load_ns:  # what place has not kept can go; an inherited state is shared
            loaded.state = None
        if orders is None:
            gc.freeze()  # what is there by now stays: no collection has to look at it
        serve(sock, hooks, state, me, load_ns, time.monotonic_ns() - begin, timeout, orders)


def connection(fd: int) -> socket.socket:
    """Take the stage socket over."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError as err:
        raise StageError(f"stage socket {fd}: {err}") from err
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
        raise StageError(f"stage socket {fd} is of {sock.family!r} and {sock.type!r}, want a unix stream socket")
    sock.set_inheritable(False)
    return sock


def slots(own: int, max_inflight: str) -> int:
    """How many batches run at a time: the handler's number, or the environment's max_inflight."""
    if max_inflight in ("", "0"):
        return own
    if not max_inflight.isdigit() or not 1 <= int(max_inflight) <= 10_000:
        raise StageError(f'max_inflight="{max_inflight}", want 1 to 10000, or 0 for the function\'s own')
    return int(max_inflight)


_UNITS = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration(name: str, value: str) -> float:
    """Read a time as OpenFaaS has it, in seconds: "7", "400ms", "1m30s". Empty and 0: none."""
    parts = re.findall(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|\u00b5s|ms|s|m|h)", value)
    if value.isdigit():
        return float(value)
    if value and "".join(map("".join, parts)) != value:
        raise StageError(f'{name}="{value}", want seconds or a duration such as 400ms')
    return sum(float(n) * _UNITS[unit] for n, unit in parts)


def descriptor(name: str) -> int:
    """Read a descriptor from the environment."""
    text = os.environ.get(name, "")
    if not text.isdigit() or int(text) < 3:
        raise StageError(f'{name}="{text}", want a descriptor from 3 on')
    return int(text)


def fail(err: Exception) -> NoReturn:
    """End the process because of err, which is said on stderr."""
    say(err)
    leave(1)


def say(err: Exception) -> None:
    """Say on stderr why a stage ends: one line, the last, which the platform tells."""
    print("stage:", " ".join(str(err).split()), file=sys.stderr)


def leave(status: int) -> NoReturn:
    """End the process, whatever threads the handler has."""
    for flush in (logging.shutdown, lambda: sys.stdout.flush(), lambda: sys.stderr.flush()):
        try:
            flush()
        except Exception:  # closed, nobody reads it, or the handler has put something else there
            pass
    os._exit(status)


def lines() -> None:
    """Have what is printed leave line by line: the platform takes it from a pipe."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
