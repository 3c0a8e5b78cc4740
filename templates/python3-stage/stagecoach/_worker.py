"""The worker: one process on a device that runs several stages, each in a thread of its own.

The worker makes the device's context only once, which saves time and device memory. A new stage is
only imported, loaded and placed. To its manager, the worker is a zygote whose children are threads
(package wire, order.go).

The stages of a worker share:

- the interpreter and the loaded libraries, also those of site-packages; if stages have different
  versions of a library, all use the version that was loaded first
- the settings of these libraries
- their process: a crash of one stage ends all stages

Each stage has its own:

- handler and other modules of its image's root, which can be imported only until the load hook has
  returned
- environment (os.environ)
- working directory
- output and logs; a thread that the handler starts prints to the worker's own output, unless it
  runs in a copy of the context (contextvars)

A stage in a worker cannot set signals' handlers.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import io
import os
import queue
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping
from types import ModuleType
from typing import Any, NoReturn, TextIO

from . import _linux, _main, _stage, _threads, device
from ._orders import (
    BEGIN_FDS,
    FAILED,
    HEADER,
    MAX_MESSAGE,
    VERSION,
    Control,
    Received,
    adopt,
    close,
    environment,
    give_up,
    receive,
    threads_of,
)
from ._serve import Orders
from ._types import StageError
from ._wire import WireError

ENV_ROOT = "STAGECOACH_STAGE_ROOT"

ENDED, BROKEN = 0, 1 << 8  # how a stage has ended, as in wait(2)
GRACE = 2.0  # seconds in which a killed stage must end

_DRAINS = (signal.SIGTERM, signal.SIGINT)


class Tenant:
    """A stage in the worker, or a thread that waits at a gate for its begin order."""

    def __init__(self, order: int, gate: socket.socket) -> None:
        self.order = order
        self.gate = gate
        self.orders = Orders()
        self.thread = threading.Thread()
        self.sock: socket.socket | None = None  # the stage socket
        self.env: dict[str, str] = {}
        self.out: list[TextIO] = []  # stdout and stderr of the stage
        self.modules: dict[str, ModuleType] = {}  # modules of the stage
        self.libraries = ""  # folder of its libraries, once it is in sys.path
        self.draining = self.killed = False

    def end(self, number: int) -> None:
        """End the stage as a signal would: in order, or at once."""
        if number in _DRAINS:
            self.draining = True
            self.orders.send(bytes((number,)))
        else:
            self.killed = True
            self._shut(self.sock)
        self._shut(self.gate)

    def shut_if_ended(self) -> None:
        """Shut the new stage socket down if the stage was killed before it came."""
        if self.killed:
            self._shut(self.sock)

    @staticmethod
    def _shut(sock: socket.socket | None) -> None:
        try:
            if sock is not None:
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is closed
            pass


_here: contextvars.ContextVar[Tenant | None] = contextvars.ContextVar("tenant", default=None)


class Environment(MutableMapping[str, str]):
    """os.environ: in a stage's threads the stage's, elsewhere the process's."""

    def __init__(self, process: MutableMapping[str, str]) -> None:
        self._process = process

    def _mine(self) -> MutableMapping[str, str]:
        tenant = _here.get()
        return self._process if tenant is None else tenant.env

    def __getitem__(self, name: str) -> str:
        return self._mine()[name]

    def __setitem__(self, name: str, value: str) -> None:
        self._mine()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._mine()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._mine()))

    def __len__(self) -> int:
        return len(self._mine())

    def copy(self) -> dict[str, str]:
        """The environment as a dict."""
        return dict(self._mine())

    def __or__(self, other: Mapping[str, str]) -> dict[str, str]:
        return {**self.copy(), **other}


class Stream(io.TextIOBase):
    """sys.stdout or sys.stderr: in a stage's threads the stage's, elsewhere the process's."""

    def __init__(self, process: TextIO, index: int) -> None:
        self._process, self._index = process, index

    def _mine(self) -> TextIO:
        tenant = _here.get()
        own = tenant.out[self._index] if tenant is not None and tenant.out else self._process
        return self._process if own.closed else own

    def write(self, text: str) -> int:
        return self._mine().write(text)

    def flush(self) -> None:
        self._mine().flush()

    def fileno(self) -> int:
        return self._mine().fileno()

    def writable(self) -> bool:
        return True

    def reconfigure(self, **options: Any) -> None:
        self._mine().reconfigure(**options)  # type: ignore[union-attr]

    @property
    def buffer(self) -> Any:
        return self._mine().buffer

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._mine().encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._mine().errors


def run(fd: int) -> NoReturn:
    """Run a worker on the control socket fd until that closes."""
    begin = time.monotonic_ns()
    control = adopt(fd)
    os.environ.pop(_main.ENV_WORKER, None)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # A stage must not find the modules of another one.
    sys.path[:] = [p for p in sys.path if os.path.abspath(p) != root]
    spot = device.Device(device.name(), keep=True)
    os.environ = Environment(os.environ)  # type: ignore[assignment]
    sys.stdout, sys.stderr = Stream(sys.stdout, 0), Stream(sys.stderr, 1)
    _stage.logs()
    try:
        if spot.name != "cpu":
            with contextlib.suppress(ImportError):  # stages without PyTorch have nothing to place
                import torch  # noqa: F401
        spot.ready()
    except Exception as err:
        give_up(control, FAILED, str(err) or type(err).__name__)
    worker = Worker(control, spot)
    worker.tell(struct.pack("<cBHIQII", b"R", VERSION, 0, os.getpid(), time.monotonic_ns() - begin, 0, 0))
    worker.serve_all()


class Worker(Control):
    """Serves orders on its control socket. Its children are threads."""

    def __init__(self, control: socket.socket, spot: device.Device) -> None:
        super().__init__(control)
        self._spot = spot
        self._tenants: dict[int, Tenant] = {}  # by thread id
        self._killed: dict[int, float] = {}  # when a killed thread must have ended, by thread id
        self._over: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()  # thread id and status
        self._woken, self._wake = socket.socketpair()
        # This lock protects sys.path and sys.modules, which belong to the process.
        self._importing = threading.Lock()

    def serve_all(self) -> NoReturn:
        """Carry out orders until the control socket closes, which ends the process."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while True:
            until = min(self._killed.values(), default=None)
            ready = dict(poll.poll(None if until is None else max(0.0, until - time.monotonic()) * 1000 + 1))
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
            while not self._over.empty():
                self._reap(*self._over.get())
            if self._control.fileno() in ready:
                self._receive()
            for tid, late in self._killed.items():
                if time.monotonic() >= late:
                    self._abandon(tid)

    def _abandon(self, tid: int) -> NoReturn:
        """End the process, because a killed stage does not end."""
        self._end(self._tenants[tid], f"does not end {GRACE:g} s after it was killed")

    @staticmethod
    def _end(tenant: Tenant, why: str) -> NoReturn:
        """End the process because of a stage."""
        name = tenant.env.get(_main.ENV_REPLICA, "")
        os.write(2, f"worker: replica {name} {why}; this process and all its stages end\n".encode(errors="replace"))
        os._exit(1)

    def _reap(self, tid: int, status: int) -> None:
        """Report the end of a stage, once its thread has ended."""
        tenant = self._tenants.pop(tid)
        tenant.thread.join()
        tenant.orders.close()
        self._children.pop(tid)
        self._killed.pop(tid, None)
        self.tell(struct.pack("<cBHII", b"X", VERSION, 0, tid, int(signal.SIGKILL) if tenant.killed else status))

    def _fork(self, order: int, r: Received) -> None:
        begin = time.monotonic_ns()
        tenant = Tenant(order, socket.socket(fileno=r.fds.pop()))
        tenant.gate.settimeout(None)  # overrides a default that a handler may have set
        tenant.thread = threading.Thread(target=self._run_tenant, args=(tenant,), name="stagecoach-stage", daemon=True)
        try:
            tenant.thread.start()
        except RuntimeError as err:
            tenant.gate.close()
            tenant.orders.close()
            return self._refuse(order, f"fork: {err}")
        tid = tenant.thread.native_id or 0
        self._tenants[tid], self._children[tid] = tenant, order
        self.tell(struct.pack("<cBHIIIQ", b"C", VERSION, 0, order, tid, 0, time.monotonic_ns() - begin))

    def _kill(self, pid: int, number: int) -> None:
        tenant = self._tenants.get(pid)
        if tenant is not None:
            tenant.end(number)
            if tenant.killed:
                self._killed.setdefault(pid, time.monotonic() + GRACE)

    # The following methods run in the tenants' threads.

    def _run_tenant(self, tenant: Tenant) -> None:
        """Wait at the gate, and then run a stage."""
        status = BROKEN
        try:
            _here.set(tenant)
            _linux.rename(b"spare")
            r = receive(tenant.gate, bytearray(MAX_MESSAGE))
            status = self._run_stage(tenant, r) if r.data else ENDED
        except BaseException as err:
            os.write(2, f"worker: new replica: {err}\n".encode(errors="replace"))
        finally:
            try:
                self._forget(tenant)
            # After some errors of CUDA, the context is of no use to any stage.
            except BaseException as err:
                self._end(tenant, f"could not be removed: {type(err).__name__}: {err}")
            self._over.put((threading.get_native_id(), status))
            self._wake.send(b"x")

    def _run_stage(self, tenant: Tenant, r: Received) -> int:
        """Run the stage of a begin order. Return its exit status."""
        if r.cut or len(r.data) < HEADER or r.data[:1] != b"B" or r.data[1] != VERSION or len(r.fds) != BEGIN_FDS:
            close(r.fds)
            raise OSError("invalid begin order: " + os.strerror(71))
        tenant.gate.close()
        threads = threads_of(r.data)
        told = dict(kv.partition("=")[::2] for kv in environment(r.data) if not kv.startswith(device.VISIBLE + "="))
        tenant.env = {**self._process(), **told, _main.ENV_THREADS: str(threads)}
        tenant.out = [open(f, "w", buffering=1, encoding="utf-8", errors="backslashreplace") for f in r.fds[1:]]
        try:
            tenant.sock = _main.connection(r.fds[0])
            tenant.shut_if_ended()
            self._stage(tenant, threads)
            return ENDED
        except (StageError, WireError, OSError) as err:
            _main.report(err)
        except Exception as err:
            _main.report(RuntimeError(f"{type(err).__name__}: {err}"))
        return BROKEN

    @staticmethod
    def _process() -> dict[str, str]:
        """Return the process's own environment."""
        return contextvars.Context().run(lambda: dict(os.environ))

    def _stage(self, tenant: Tenant, threads: int) -> None:
        root = tenant.env.get(ENV_ROOT, "")
        if not os.path.isabs(root) or not os.path.isdir(root):
            raise StageError(f'{ENV_ROOT}="{root}", want the folder of the stage\'s image')
        _linux.rename(tenant.env.get(_main.ENV_REPLICA, "stage").encode()[-15:])
        try:
            _linux.own_folder()
            os.chdir(root)
        except OSError as err:
            raise StageError(
                f"a working directory of its own, {root}: {err}; without that the stage needs a process of its own: "
                "remove the annotation stagecoach.dev/process"
            ) from err
        while not self._importing.acquire(timeout=0.1):
            if tenant.killed or tenant.draining:
                return
        try:
            with self._modules(root, tenant):
                loaded = _stage.load()
        finally:
            self._importing.release()
        _threads.compute_with(threads)
        if tenant.sock is not None and not (tenant.killed or tenant.draining):
            _main.answer(loaded, tenant.sock, loaded.nanos, self._spot, tenant.orders)

    @contextlib.contextmanager
    def _modules(self, root: str, tenant: Tenant) -> Iterator[None]:
        """Find modules in an image's root, and then in its site-packages. The modules of the root
        become the tenant's own."""
        libraries = os.path.join(root, "site-packages")
        sys.path[:0] = [root, libraries]
        before = set(sys.modules)
        try:
            yield
        finally:
            for path in (root, libraries):
                with contextlib.suppress(ValueError):  # the handler has removed it
                    sys.path.remove(path)
            sys.path.append(libraries)  # libraries import modules at any time
            tenant.libraries = libraries
            for name, module in list(sys.modules.items()):
                where = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
                there = where.startswith(root + os.sep) and not where.startswith(libraries + os.sep)
                if there and name not in before and name.partition(".")[0] != __package__:
                    tenant.modules[name] = sys.modules.pop(name)

    def _forget(self, tenant: Tenant) -> None:
        """Release everything that a stage had, here and on the device. Its memory is free when this
        returns."""
        tenant.modules.clear()
        if tenant.libraries:
            with self._importing, contextlib.suppress(ValueError):  # a handler has removed it
                del sys.path[len(sys.path) - 1 - sys.path[::-1].index(tenant.libraries)]
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and self._spot.name != "cpu":
            torch.cuda.empty_cache()
        for out in tenant.out:
            with contextlib.suppress(OSError):  # there is no reader
                out.close()
        for sock in (tenant.gate, tenant.sock):
            if sock is not None:
                sock.close()
