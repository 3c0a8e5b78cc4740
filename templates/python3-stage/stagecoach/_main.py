"""What a stage's process does: it is a zygote, or a replica, by the environment that it was started with."""
from __future__ import annotations

import logging
import os
import sys
import time
from typing import NoReturn

from ._stage import Loaded, load, place
from ._types import Replica, StageError

ENV_ZYGOTE_FD = "STAGECOACH_ZYGOTE_FD"
ENV_STAGE_FD = "STAGECOACH_STAGE_FD"
ENV_REPLICA = "STAGECOACH_REPLICA"
ENV_FUNCTION = "STAGECOACH_FUNCTION"
ENV_THREADS = "STAGECOACH_THREADS"
ENV_SEALED = "STAGECOACH_SEALED"

BY_HAND = ("this is a stage of a Stagecoach pipeline, and it was started without a stage socket: "
           "deploy it (faas-cli deploy) and let `stagecoach up` start it")


def main() -> NoReturn:
    """Run this process as the stage, and do not return. It ends with 0 when the replica was drained or its dispatcher is
    gone, with 2 when it was started by hand, else with 1."""
    if os.environ.get(ENV_SEALED):
        seal()
    lines()
    if os.environ.get(ENV_ZYGOTE_FD):
        from ._zygote import run  # serves fork orders on that descriptor; its children call replica()

        run(descriptor(ENV_ZYGOTE_FD))
    if not os.environ.get(ENV_STAGE_FD):
        print(BY_HAND, file=sys.stderr)
        leave(2)
    try:
        fd = descriptor(ENV_STAGE_FD)
        loaded = load()
    except StageError as err:
        fail(err)
    replica(loaded, fd, loaded.nanos)


def replica(loaded: Loaded, fd: int, load_ns: int = 0) -> NoReturn:
    """Run this process as a replica on the stage socket fd, and end it. load_ns: what loading took in this process; 0: it
    is inherited. Environment, threads and seeds are as they are to be."""
    raise NotImplementedError


def descriptor(name: str) -> int:
    """Read a descriptor from the environment."""
    text = os.environ.get(name, "")
    if not text.isdigit() or int(text) < 3:
        raise StageError(f"{name}={text!r}, want a descriptor from 3 on")
    return int(text)


def fail(err: Exception) -> NoReturn:
    """End the process because of err, which is said on stderr."""
    print("stage:", err, file=sys.stderr)
    leave(1)


def leave(status: int) -> NoReturn:
    """End the process, whatever threads the handler has."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed, or nobody reads it
            pass
    os._exit(status)


def lines() -> None:
    """Have what is printed leave line by line: the platform takes it from a pipe."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")


def seal() -> None:
    """Let no other process of the same user look into this one and its children (PR_SET_DUMPABLE)."""
    import ctypes

    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
