"""Runs ./stage as a worker with one stage, which looks like a separate process to the test."""

from __future__ import annotations

import array
import os
import signal
import socket
import struct
import subprocess
import sys

VERSION = 3
HEAD = struct.Struct("<cBHI")

control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
gate, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
stage = int(os.environ.pop("STAGECOACH_STAGE_FD"))
env = {**os.environ, "STAGECOACH_ZYGOTE_FD": str(theirs.fileno()), "STAGECOACH_WORKER": "1"}
worker = subprocess.Popen([sys.executable, "./stage"], env=env, pass_fds=[theirs.fileno()])
theirs.close()


def want(kind: bytes) -> bytes:
    message = control.recv(4096)
    if message[:1] != kind:
        sys.exit(f"the worker says {message!r}, want {kind!r}")
    return message


def tell(sock: socket.socket, message: bytes, *fds: int) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([message], rights)


signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until the handler for it exists
want(b"R")
tell(control, HEAD.pack(b"F", VERSION, 0, 7), child.fileno())
tid = struct.unpack_from("<I", want(b"C"), 8)[0]
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda n, _: tell(control, HEAD.pack(b"K", VERSION, n, tid)))
mine = {**os.environ, "STAGECOACH_STAGE_ROOT": os.getcwd()}
told = b"".join(os.fsencode(f"{k}={v}") + b"\0" for k, v in mine.items())
tell(gate, HEAD.pack(b"B", VERSION, int(mine.get("STAGECOACH_THREADS", "1")), 0) + told, stage, 1, 2)
os.close(stage)
os.close(1)
os.close(2)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
message = control.recv(4096)
control.close()
worker.wait()
status = struct.unpack_from("<I", message, 8)[0] if message[:1] == b"X" else 0x200
os._exit(status >> 8)
