"""A replica's side of the stage protocol: it says hello, then answers batches until it is drained, told to end, or
alone.

Threads: the main one runs infer, as it has run load and place, so that what belongs to a thread stays there; a reader
takes what the dispatcher sends; a finisher waits for the end (a Drain, SIGTERM) and sees that what was taken is
answered. With more slots than one there are more workers, started when they are needed.
"""

from __future__ import annotations

import contextvars
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from typing import Any, Callable

from . import _conn, _ends, _threads, _wire, device
from ._stage import Hooks
from ._types import Call, Cancelled, Output, Replica, StageError
from ._wire import WireError

WELCOME_TIMEOUT = 30.0  # seconds
MAX_CHUNK = 64 << 10  # bytes of a stream in one frame
LOST = "the replica was told to end"

_DRAIN, _END = b"\0", b"\xff"  # what the finisher is told; other bytes are numbers of signals
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Orders:
    """How a stage is told to end that has no process of its own, and so no signals."""

    def __init__(self) -> None:
        self.theirs, self.ours = socket.socketpair()
        self.theirs.settimeout(None)  # whatever the handler has made the default
        self.ours.setblocking(False)

    def send(self, what: bytes) -> None:
        """Tell it a signal's number."""
        try:
            self.ours.send(what)
        except OSError:  # full of what says the same, or over
            pass

    def close(self) -> None:
        """Nobody is told anything any more."""
        self.theirs.close()
        self.ours.close()


def serve(
    sock: socket.socket,
    hooks: Hooks,
    state: Any,
    replica: Replica,
    load: int = 0,
    place: int = 0,
    timeout: float = 0,
    orders: Orders | None = None,
) -> None:
    """Answer batches with ``hooks.infer(state, calls)`` over sock, which it closes.

    load and place are how many ns these have taken; timeout is how many seconds a call may run besides its deadline, 0:
    as many as it likes. It returns when the dispatcher has drained the replica or is gone, or after SIGTERM when what
    was taken is answered; a dispatcher that breaks the protocol is a :class:`WireError`. To be called in the main
    thread, or else with orders, which take the place of signals.
    """
    hello = _wire.hello(
        os.getpid(), replica.function, replica.name, hooks.slots, hooks.max_batch, replica.threads, load, place
    )
    server = _Server(_conn.Conn(sock), hooks, state, replica.threads, timeout)
    try:
        if orders is None:
            server.serve_signalled(hello)
        else:
            server.serve(hello, orders)
    finally:
        server.conn.close()


class _Server:
    """The replica; a :class:`Link` of its calls."""

    def __init__(self, conn: _conn.Conn, hooks: Hooks, state: Any, threads: int, timeout: float) -> None:
        self.conn = conn
        self.hooks = hooks
        self.infer = hooks.infer
        self.state = state
        self.timeout = timeout
        self.log = logging.getLogger("stagecoach")
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()  # at most slots batches
        self.workers: list[threading.Thread] = []  # beside the main thread

        self.lock = threading.Lock()  # of all below
        self.change = threading.Condition(self.lock)
        self.batches: dict[int, list[Call]] = {}  # not yet answered
        self.running = 0  # batches whose last answer has not left
        self.credit = 0  # bytes of chunks that the dispatcher takes
        self.threads = threads  # that compute
        self.greeted = False
        self.leaving = False  # nothing new is begun
        self.finished = False  # what was taken is answered
        self.closed = False  # nobody is left to answer
        self.fault: Exception | None = None  # why the reader has ended; None: the other side has closed

    def serve_signalled(self, hello: bytes) -> None:
        """Greet and answer, with the signals' handlers set."""
        orders = Orders()  # wakes the finisher

        def handler(number: int, _: Any) -> None:
            orders.send(bytes((number,)))  # when something of the handler's took the descriptor for wake-ups

        old = {s: signal.signal(s, handler) for s in _SIGNALS}
        fd = signal.set_wakeup_fd(orders.ours.fileno(), warn_on_full_buffer=False)
        try:
            self.serve(hello, orders)
        finally:
            signal.set_wakeup_fd(fd)
            for s, h in old.items():
                signal.signal(s, h)
            orders.close()

    def serve(self, hello: bytes, orders: Orders) -> None:
        """Greet and answer."""
        self.orders = orders
        finisher = self._thread(self._finish, (orders.theirs,), "stagecoach-finish")
        finisher.start()
        try:
            if self._greet(hello):
                self._answer_all()
        finally:
            orders.send(_END)
            finisher.join()
        if self.fault is not None and not self.finished:
            raise self.fault

    def _thread(self, target: Callable[..., None], args: tuple, name: str) -> threading.Thread:
        """A thread that belongs to the stage which this one belongs to."""
        run = contextvars.copy_context().run
        return threading.Thread(target=run, args=(target, *args), name=name, daemon=True)

    def _greet(self, hello: bytes) -> bool:
        """Say hello and wait for the welcome; False when the replica was told to end meanwhile."""
        self.conn.timeout(WELCOME_TIMEOUT)
        try:
            self.conn.write(_wire.HELLO, 0, hello)
            frame = self.conn.read()
            with self.lock:
                if self.leaving:
                    return False
            if frame is None:
                raise WireError("welcome: the dispatcher has closed")
            _conn.close_all(frame.files)
            if frame.kind != _wire.WELCOME:
                raise WireError(f"frame {_wire.name_of(frame.kind)}, want Welcome")
            version, credit = _wire.decode_welcome(frame.payload)
            if not _wire.OLDEST_VERSION <= version <= _wire.VERSION:
                raise WireError(
                    f"welcome to version {version} of the stage protocol, want {_wire.OLDEST_VERSION} to "
                    f"{_wire.VERSION}"
                )
        except socket.timeout as err:
            raise WireError(f"welcome: none within {WELCOME_TIMEOUT:g} s") from err
        except OSError as err:
            if self.leaving:
                return False
            raise WireError(f"welcome: {err}") from err
        self.conn.timeout(None)
        with self.lock:
            self.credit += credit
            self.greeted = True
            return not self.leaving

    def _answer_all(self) -> None:
        reader = self._thread(self._read_all, (), "stagecoach-read")
        threads = self.threads  # before the reader is told of more
        reader.start()
        self._work(threads)
        reader.join()
        for worker in self.workers:
            worker.join()

    def _finish(self, wake: socket.socket) -> None:
        """Wait until the replica is to leave, answer what it has taken, and then end the reader, which until then
        brings cancels and credits."""
        told = 0
        while True:
            what = wake.recv(1)
            if what in (b"", _END):
                return
            if what == _DRAIN or what[0] in _SIGNALS:
                told = what[0]
                break
        with self.lock:
            self.leaving = True
            greeted = self.greeted
        if not greeted:
            self.conn.shut()
            return
        if told:  # our wish, so the dispatcher does not know it; if it cannot be told, the reader sees why
            try:
                self.conn.write(_wire.CREDIT, 0, _wire.uvarint(0))
            except OSError:
                pass
        with self.change:
            while self.running and not self.closed:
                self.change.wait()
            if self.closed:
                return
            self.finished = True
        self.conn.shut_reads()

    # What the dispatcher sends.

    def _read_all(self) -> None:
        try:
            self._read()
        except ConnectionResetError:  # closed, with answers unread
            pass
        except Exception as err:  # whatever it is, the replica ends with it
            self.fault = self.fault or (
                err if isinstance(err, WireError) else WireError(f"{type(err).__name__}: {err}")
            )
        self.conn.shut()  # what still runs can stop, and no write waits
        with self.change:
            self.closed = True
            for calls in self.batches.values():
                for call in calls:
                    call._cancelled = True
            self.change.notify_all()
        for _ in range(len(self.workers) + 1):
            self.jobs.put(None)

    def _read(self) -> None:
        read = self.conn.read
        while True:
            frame = read()
            if frame is None:
                return
            kind, batch, payload, files = frame
            try:
                if kind == _wire.BATCH:
                    self._start(batch, payload, files)
                elif kind == _wire.CREDIT:
                    with self.change:
                        self.credit += _wire.decode_number("credit", payload)
                        self.change.notify_all()
                elif kind == _wire.CANCEL:
                    self._cancel(batch, _wire.decode_cancel(payload))
                elif kind == _wire.THREADS:
                    total = _wire.decode_threads(payload)
                    with self.lock:
                        self.threads = max(self.threads, total)
                elif kind == _wire.DRAIN:
                    self.orders.send(_DRAIN)
                else:
                    raise WireError(f"frame {_wire.name_of(kind)}, want Batch, Cancel, Credit, Threads or Drain")
            finally:
                if files:
                    _conn.close_all(files)
            del frame, payload  # they can go before the next frame comes

    def _start(self, batch: int, payload: bytes, files: list[int]) -> None:
        """Decode a batch and have it run."""
        try:
            calls = _wire.decode_batch(payload, lambda *ref: _conn.detach(files, *ref))
        except WireError as err:
            raise WireError(f"batch {batch}: {err}") from None
        if len(calls) > self.hooks.max_batch:
            raise WireError(f"batch {batch} of {len(calls)} calls, want at most {self.hooks.max_batch}")
        latest = time.time() + self.timeout if self.timeout else 0.0
        for index, call in enumerate(calls):
            call.batch, call.index, call._link = batch, index, self
            if latest and (call.deadline is None or call.deadline > latest):
                call._until = latest
                call._overtime = f"it ran for longer than exec_timeout, {self.timeout:g} s"
        with self.lock:
            twice, n = batch in self.batches, len(self.batches)
            if twice or n >= self.hooks.slots:
                raise WireError(f"batch {batch} while {n} run, want at most {self.hooks.slots} and each once")
            leaving = self.leaving
            if not leaving:
                self.batches[batch] = calls
                self.running += 1
        if leaving:  # it was on its way when the replica decided to leave: its calls run elsewhere
            for index in range(len(calls)):
                self.conn.write(_wire.ERROR, batch, _wire.error(index, 0, _wire.REPLICA_LOST, LOST))
            return
        if n > len(self.workers):  # every worker that there is has a batch
            worker = self._thread(self._work, (0,), f"stagecoach-{n}")
            try:
                worker.start()
                self.workers.append(worker)
            except RuntimeError as err:  # no thread is to be had: the batch waits for a worker
                self.log.warning("the replica goes on with %d batches at a time: %s", len(self.workers) + 1, err)
        self.jobs.put((batch, calls))

    def _cancel(self, batch: int, index: int) -> None:
        with self.change:
            for call in self.batches.get(batch, ()):  # none: it has just ended
                if index in (call.index, _wire.CANCEL_ALL):
                    call._cancelled = True
            self.change.notify_all()

    # What the calls do.

    def _work(self, threads: int) -> None:
        """Run batches until there are none. threads is with how many this thread computes, 0: nobody knows."""
        get, gradients = self.jobs.get, True
        while True:
            job = get()
            if job is None:
                return
            if gradients and "torch" in sys.modules:
                sys.modules["torch"].set_grad_enabled(False)  # of this thread alone
                gradients = False
            if threads != self.threads:
                threads = self.threads
                _threads.compute_with(threads)
            self._run(*job)
            job = None  # its inputs can go before the next batch comes

    def _run(self, batch: int, calls: list[Call]) -> None:
        try:
            begin = time.monotonic_ns()
            results = _ends.run(self.infer, self.state, calls)
            service = time.monotonic_ns() - begin
            with self.lock:
                del self.batches[batch]  # before the last result leaves: it frees the slot on the other side
            for call in calls:
                call._cancelled = True  # a call that is over can stream no more
            self._send(batch, service, results)
            lost = device.lost(results)
            if lost:  # each call that comes would fail, and fast
                raise StageError(f"the device's context is lost: {lost}")
        except OSError as err:  # of the connection
            self.log.debug("results of batch %d not sent: %s", batch, err)
            self.conn.shut()
        except BaseException as err:  # no memory, for instance: nobody would wait for them in vain
            told = isinstance(err, StageError)
            self.fault = err if told else WireError(f"results of batch {batch}: {type(err).__name__}: {err}")
            self.conn.shut()
        with self.lock:
            self.running -= 1
            if self.leaving:
                self.change.notify_all()

    def _send(self, batch: int, service: int, results: list[Output | BaseException]) -> None:
        """Send the ends of a batch's calls, the small ones together."""
        pending: list[bytes] = []
        size = 0
        for index, r in enumerate(results):
            kind, payload, files = _ends.encoded(index, service, r)
            pending.append(_conn.frame(kind, batch, payload, len(files)))
            size += len(payload)
            if files or size > _conn.COPY_LIMIT:
                try:  # a file may come before its frame: the frames in front of it claim none
                    self.conn.send(b"".join(pending), files)
                finally:
                    _conn.close_all(files)
                pending, size = [], 0
        if pending:
            self.conn.send(b"".join(pending))

    def send(self, call: Call, rest: memoryview) -> None:
        """Send a piece of the call's output, as far as the dispatcher has room for it."""
        while len(rest):
            with self.change:
                while True:
                    call.check()
                    if self.closed:
                        raise Cancelled("the dispatcher is gone")
                    if self.credit > 0:
                        break
                    self.change.wait(call.remaining())
                n = min(len(rest), MAX_CHUNK, self.credit)
                self.credit -= n
            try:
                self.conn.write(_wire.CHUNK, call.batch, _wire.chunk(call.index, rest[:n]))
            except OSError as err:
                raise Cancelled(f"the dispatcher is gone: {err}") from err
            rest = rest[n:]

    def wait(self, call: Call, timeout: float | None) -> bool:
        """Wait until the call is over, or for so many seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        with self.change:
            while not call.cancelled():
                bounds = [
                    b for b in (call.remaining(), None if end is None else end - time.monotonic()) if b is not None
                ]
                if bounds and min(bounds) <= 0:
                    break
                self.change.wait(min(bounds, default=None))
            return call.cancelled()
