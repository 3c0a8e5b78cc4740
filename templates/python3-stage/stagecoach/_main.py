"""The main function of a stage's process, which is a zygote, a worker or a replica. The environment
decides."""

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
    """Run this process as the stage, and do not return. The exit status is 0 if the replica was
    drained or its dispatcher has gone, 2 if the process was started by hand, and 1 otherwise."""
    if os.environ.get(ENV_SEALED):
        _linux.seal()
    lines()
    # Idle threads of OpenMP sleep. Spinning threads would take cores from other replicas, and from
    # this one.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if os.environ.get(ENV_ZYGOTE_FD) and os.environ.get(ENV_WORKER):
        from . import _worker  # serves such orders, too; its children are threads

        _worker.run(descriptor(ENV_ZYGOTE_FD))
    if os.environ.get(ENV_ZYGOTE_FD):
        from . import _zygote  # serves fork orders on that descriptor; its children call replica()

        _zygote.run(descriptor(ENV_ZYGOTE_FD))
    if not os.environ.get(ENV_STAGE_FD):
        print(BY_HAND, file=sys.stderr)
        end_process(2)
    try:
        sock = connection(descriptor(ENV_STAGE_FD))
        threads = number(ENV_THREADS)
        if threads:  # the libraries read these variables when they are loaded
            os.environ.update({name: str(threads) for name in _threads.VARIABLES})
        loaded = load()
        if threads:
            _threads.compute_with(threads)
    except StageError as err:
        fail(err)
    run(loaded, sock, loaded.nanos)


def number(name: str) -> int:
    """Read a number of threads from the environment. Return 0 if the variable is not set."""
    text = os.environ.get(name, "")
    if text and (not text.isdigit() or int(text) < 1):
        raise StageError(f'{name}="{text}", want a number from 1 on')
    return int(text or 0)


def replica(loaded: Loaded, fd: int, spot: device.Device | None = None) -> NoReturn:
    """Run this process as a replica on the stage socket ``fd``, and then end the process.
    ``loaded`` comes from the zygote. ``spot`` is the device if this process has prepared it, else
    None. The caller has set the environment, threads and seeds."""
    try:
        sock = connection(fd)
    except StageError as err:
        fail(err)
    run(loaded, sock, 0, spot)


def run(loaded: Loaded, sock: socket.socket, load_ns: int, spot: device.Device | None = None) -> NoReturn:
    """Run this process as a replica on ``sock``, and then end the process. ``load_ns`` is how long
    loading in this process took, in ns."""
    try:
        answer(loaded, sock, load_ns, spot or device.Device(device.name()))
    except (StageError, WireError, OSError) as err:
        fail(err)
    end_process(0)


def answer(
    loaded: Loaded, sock: socket.socket, load_ns: int, spot: device.Device, orders: Orders | None = None
) -> None:
    """Place a stage on the device ``spot`` and answer batches over ``sock``, until the stage is
    drained or its dispatcher has gone. Close ``sock`` at the end. If several stages share this
    process, ``orders`` is set and can end this stage alone, as a signal ends a process."""
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
        if load_ns:  # free what place has not kept; an inherited state is shared
            loaded.state = None
        if orders is None:
            gc.freeze()  # later collections skip the objects that exist now
        serve(sock, hooks, state, me, load_ns, time.monotonic_ns() - begin, timeout, orders)


def connection(fd: int) -> socket.socket:
    """Return the stage socket of the descriptor fd."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError as err:
        raise StageError(f"stage socket {fd}: {err}") from err
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
        raise StageError(f"stage socket {fd} is of {sock.family!r} and {sock.type!r}, want a unix stream socket")
    sock.set_inheritable(False)
    return sock


def slots(own: int, max_inflight: str) -> int:
    """Return the number of batches that run at a time: the environment's max_inflight, or else the
    handler's number."""
    if max_inflight in ("", "0"):
        return own
    if not max_inflight.isdigit() or not 1 <= int(max_inflight) <= 10_000:
        raise StageError(f'max_inflight="{max_inflight}", want 1 to 10000, or 0 for the function\'s own')
    return int(max_inflight)


_UNITS = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration(name: str, value: str) -> float:
    """Read a time in OpenFaaS's notation, and return seconds: "7", "400ms", "1m30s". Empty and 0
    mean none."""
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
    """Print err to stderr and end the process."""
    report(err)
    end_process(1)


def report(err: Exception) -> None:
    """Print on stderr why a stage ends. It is one line, and the last one, because the platform
    reports that line."""
    print("stage:", " ".join(str(err).split()), file=sys.stderr)


def end_process(status: int) -> NoReturn:
    """End the process, whatever threads the handler has started."""
    for flush in (logging.shutdown, lambda: sys.stdout.flush(), lambda: sys.stderr.flush()):
        try:
            flush()
        except Exception:  # stdout is closed, has no reader, or was replaced by the handler
            pass
    os._exit(status)


def lines() -> None:
    """Flush stdout after each line, because the platform reads it from a pipe."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
