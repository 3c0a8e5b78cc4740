"""The zygote: loads the handler and its parameters once, then forks one replica per order.

It is the twin of stage/zygote/zygote.c, with the same messages (package wire, order.go) and
refusals.

A process can be forked only if it has one thread: a child would lack the other threads, and locks
that they held would stay locked. So libraries are told to start no threads before the handler is
imported. The zygote reports that it cannot be forked if a library has started threads nevertheless,
or if the handler has used CUDA.

From the first order on, no code of the handler runs in the zygote, and no garbage is collected.
Both would change reference counts, and each child would then need its own copies of these pages.

A child inherits the descriptors that the handler has left open, but not those of the zygote.
"""
from __future__ import annotations

import gc
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from typing import Any, NoReturn

from . import _compiled, _forkable, _linux, _main, _move, _ring, _stage, _threads, device
from ._orders import (
    BEGIN_FDS,
    FAILED,
    HEADER,
    NO_ID,
    UNFORKABLE,
    VERSION,
    Begin,
    Control,
    Received,
    adopt,
    close,
    environment,
    error,
    give_up,
    receive,
    threads_of,
)
from ._types import StageError

ENV_THREADS = "STAGECOACH_THREADS"
PIECE = 16 << 20  # bytes, which are touched in a millisecond
# seconds that a spare child stays idle: its sibling has just begun, and needs the processors for
# its first call
QUIET = 1.0

# Settings that keep libraries from starting threads or using CUDA while the handler is imported and
# loads. ONNX Runtime from 1.29 on has a thread that sends telemetry.
SINGLE = {**{name: "1" for name in _threads.VARIABLES}, "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "",
          "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "ORT_DISABLE_TELEMETRY": "1",
          "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def run(fd: int) -> NoReturn:
    """Run a zygote on the control socket fd until that closes. In its children, run a replica."""
    begin = time.monotonic_ns()
    control = adopt(fd)
    before = {name: os.environ.get(name) for name in SINGLE}
    os.environ.update(SINGLE)
    try:
        loaded, mapped, shared = _load()
    except StageError as err:
        give_up(control, FAILED, str(err))
    except _forkable.Unforkable as err:
        give_up(control, UNFORKABLE, str(err))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # otherwise, each child would print it again
    zygote = Zygote(control, mapped)
    zygote.tell(struct.pack("<cBHIQII", b"R", VERSION, 0, os.getpid(), time.monotonic_ns() - begin, shared, 0))
    told = zygote.serve()
    try:
        _become_replica(told, before)
    except Exception as err:
        _end_child(str(err))
    _main.replica(loaded, told.fd, told.spot)


def _load() -> tuple[_stage.Loaded, list[tuple[int, int]], bool]:
    """Load what replicas share, and read its parameters into memory. Return the loaded stage,
    the addresses at which the model's files are mapped, and whether the parameters are in these
    mappings and not in the heap."""
    compiled, watch = _compiled.prepare(), _forkable.Watch()
    with watch.on():
        _stage._handler()
        _forkable.end_threads()
        _forkable.check(watch)  # before the model is loaded, which takes long
        before = _heap()
        if hasattr(sys.modules.get("torch"), "compile"):
            _threads.load_with(_main.number(ENV_THREADS) or 1)
        loaded = _stage.load()
    _forkable.end_threads()
    _threads.compute_with(1)
    _forkable.check(watch)
    _compiled.keep(compiled)
    gc.collect()
    gc.disable()
    gc.freeze()
    _linux.trim()  # each fork would copy the page tables of unused memory
    mapped = _mapped(loaded.model.path)
    for start, end in mapped:  # otherwise, the replicas would read them at the first access
        _linux.populate(start, end)
    _forkable.check(watch)
    _ring.remember_mappings()
    return loaded, mapped, _shares(loaded.state, mapped, before)


def _shares(state: Any, mapped: list[tuple[int, int]], before: int) -> bool:
    """Return whether a state's parameters are in the mapped files and not in the heap. If
    PyTorch's tensors make up the state, compare their addresses with the mappings. For any other
    state, the heap must have grown by less than half the size of the files; ``before`` is the
    heap's earlier size in bytes."""
    size = sum(end - start for start, end in mapped)
    torch = sys.modules.get("torch")
    tensors = list(_move.State(torch, state).tensors.values()) if hasattr(torch, "nn") else []
    dense = [t for t in tensors if t.device.type == "cpu" and t.layout == torch.strided]
    there = {t.data_ptr(): t.numel() * t.element_size() for t in dense}
    if 2 * sum(there.values()) >= size > 0:
        inside = sum(n for at, n in there.items() if any(start <= at < end for start, end in mapped))
        return 2 * inside >= sum(there.values())
    return size > 0 and _heap() - before < size / 2


def _heap() -> int:
    """Return the size of this process's private memory in bytes."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as f:
        return next((int(line.split()[1]) << 10 for line in f if line.startswith("RssAnon:")), 0)


def _mapped(path: str) -> list[tuple[int, int]]:
    """Return the addresses at which the model's files are mapped."""
    path = os.path.realpath(path) if path else ""
    mappings = _threads.mappings() if path else []
    return [(start, end) for start, end, file in mappings if file == path or file.startswith(path + "/")]


class Zygote(Control):
    """Serves fork orders on its control socket."""

    def __init__(self, control: socket.socket, mapped: list[tuple[int, int]]) -> None:
        super().__init__(control)
        self._mapped = mapped
        # If the signal were ignored, ends would be lost.
        self._handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        self._ends = _linux.signalfd(signal.SIGCHLD)
        self._name = _linux.name()

    def serve(self) -> Begin:
        """Carry out orders until the control socket closes, which ends the process. It returns only
        in children, with their begin order."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._ends, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if self._ends in ready:
                self._reap()
            if self._control.fileno() in ready:
                told = self._receive()
                if told is not None:
                    return told

    def _reap(self) -> None:
        """Wait for every child that has ended, and report each."""
        try:
            while os.read(self._ends, 4096):
                pass
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._children.pop(pid, None) is not None:
                self.tell(struct.pack("<cBHII", b"X", VERSION, 0, pid, status))

    def _fork(self, order: int, r: Received) -> Begin | None:
        begin = time.monotonic_ns()
        me = os.getpid()
        # The child has this name from its first instant until its begin order.
        _linux.rename(b"spare")
        try:
            pid = os.fork()
            if pid == 0:
                return self._run_child(me, r.fds[0])
        except OSError as err:
            return self._refuse(order, f"fork: {err.strerror}")
        finally:
            if os.getpid() == me:
                _linux.rename(self._name)
        self._children[pid] = order
        self.tell(struct.pack("<cBHIIIQ", b"C", VERSION, 0, order, pid, 0, time.monotonic_ns() - begin))
        return None

    def _kill(self, pid: int, number: int) -> None:
        """Signal a child that has not been reaped, whose pid is therefore still valid. Ignore other
        pids, because the end of their processes has been reported."""
        if pid in self._children:
            try:
                os.kill(pid, number)
            except OSError as err:
                self._refuse(NO_ID, f"kill {pid} with signal {number}: {err.strerror}")

    def _run_child(self, zygote: int, gate: int) -> Begin:
        """Run a new child until its begin order. An exception must not reach the zygote's loop."""
        try:
            self._leave_zygote(zygote, gate)
            _seed()
            told = self._wait_begin()
            _linux.rename(self._name)
            return told
        except BaseException as err:
            _end_child(str(err))

    def _leave_zygote(self, zygote: int, gate: int) -> None:
        """Prepare a new child, which ends with its zygote. Its gate gets the descriptor of the
        control socket."""
        _linux.end_with_parent()
        if os.getppid() != zygote:  # the zygote ended before the signal was set
            os._exit(1)
        os.dup2(gate, self._control.fileno(), inheritable=False)
        close([gate, self._ends])
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _wait_begin(self) -> Begin:
        """Wait at the gate for the begin order."""
        self._touch()
        r, spot, env = self._at_gate(), None, []
        if r.data[:1] == b"P" and not r.fds:
            env = environment(r.data)
            spot = self._park(env)
            r = self._at_gate()
        if r.data[:1] != b"B" or len(r.fds) != BEGIN_FDS:
            raise OSError("invalid begin order: " + os.strerror(71))
        env += environment(r.data)
        fd = self._control.detach()
        os.dup2(r.fds[1], 1)
        os.dup2(r.fds[2], 2)
        os.dup2(r.fds[0], fd, inheritable=False)
        close(r.fds)
        if self._handler is not None and self._handler is not signal.SIG_DFL:
            signal.signal(signal.SIGCHLD, self._handler)
        return Begin(fd, threads_of(r.data), env, spot)

    def _touch(self) -> None:
        """While the child waits, map the parameters into its page tables, which a fork leaves
        empty. Otherwise, the first call would take the page faults, up to 65 ms for 1 GB."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        if not self._mapped or poll.poll(QUIET * 1000):
            return
        for start, end in self._mapped:
            for at in range(start, end, PIECE):
                if poll.poll(0):
                    return
                _linux.populate(at, min(end, at + PIECE))

    def _at_gate(self) -> Received:
        """Receive a message at the gate. A closed gate means that the child is not needed."""
        r = receive(self._control, self._buffer)
        if not r.data:
            os._exit(0)
        if r.cut or len(r.data) < HEADER or r.data[1] != VERSION:
            raise OSError("invalid begin order: " + os.strerror(71))
        return r

    def _park(self, env: list[str]) -> device.Device:
        """Prepare the device of a parked child before its begin order."""
        begin = time.monotonic_ns()
        os.environ.update(kv.partition("=")[::2] for kv in env)
        try:
            spot = device.Device(device.name())
            spot.ready()
            told = struct.pack("<cBHIQ", b"D", VERSION, 0, 0, time.monotonic_ns() - begin)
        except Exception as err:
            self._control.send(error(0, FAILED, str(err) or type(err).__name__), socket.MSG_NOSIGNAL)
            raise
        try:
            self._control.send(told, socket.MSG_NOSIGNAL)
        except OSError:  # the manager no longer needs it
            os._exit(0)
        return spot


def _become_replica(told: Begin, before: dict[str, str | None]) -> None:
    """Make a child the replica of its begin order: set its environment and its threads.

    ``before`` is the environment that the zygote had before it was changed for a single thread."""
    threads = told.threads
    for name, value in before.items():
        if value is None and name in _threads.VARIABLES:
            value = str(threads)  # for libraries that are loaded later
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    for kv in told.env:
        name, _, value = kv.partition("=")
        os.environ[name] = value
    os.environ[ENV_THREADS] = str(threads)
    _threads.compute_with(threads)
    gc.enable()


def _seed() -> None:
    """Give this process its own random seeds. A spare child does so before its begin order, when it
    has the time."""
    random.seed()
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()
    if torch is not None:
        torch.seed()


def _end_child(what: str) -> NoReturn:
    os.write(2, f"zygote: new replica: {what}\n".encode(errors="replace"))
    os._exit(1)
