"""Tests of placing a state on a device, on a stand-in of one."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import logging
import os
import re
import tempfile
import threading
import unittest
import unittest.mock
from typing import Any, Iterator, NamedTuple

import torch

import stagecoach as sc
from standin import StandIn
from stagecoach import _ends, _move, _ring, _stage, device
from stagecoach._model import Model

GPU = "GPU-0"


def placed(state: Any, backend: StandIn | None = None, piece: int = 1 << 12, lanes: int = 3) -> Any:
    d = device.Device("cuda:0", backend=backend or StandIn())
    d._ring = _ring.Ring(d._backend, lanes, piece)
    try:
        return d.place(state)
    finally:
        d.placed()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(40, 40)
        self.b = torch.nn.Linear(40, 40, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("ids", torch.arange(7))
        self.register_buffer("again", self.ids)
        self.rnn = torch.nn.LSTM(40, 40, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.rnn(self.b(self.a(x)))[0] + self.ids[0]


class Pair(NamedTuple):
    one: Any
    two: Any


@dataclasses.dataclass(frozen=True)
class Config:
    table: Any
    name: str


class Layout(unittest.TestCase):
    def test_all_kinds(self) -> None:
        base = torch.randn(50, 60)
        odd = torch.arange(1001, dtype=torch.uint8)
        state = {
            "float": base,
            "rows": base[3:9],
            "column": base[:, 7],
            "turned": base.t(),
            "one of many": torch.randn(4000, 50)[:, :2],
            "stretched": torch.randn(1, 30).expand(20, 30),
            "bytes": odd,
            "inside": odd[1:9],
            "bool": torch.tensor([True, False, True]),
            "half": torch.randn(33).half(),
            "brain": torch.randn(33).bfloat16(),
            "complex": torch.randn(9, dtype=torch.complex64),
            "conjugate": torch.randn(9, dtype=torch.complex64).conj(),
            "scalar": torch.tensor(3.5),
            "none": torch.empty(0, 4),
            "sparse": torch.eye(4).to_sparse(),
            "number": 5,
        }
        out = placed(state)
        for name, t in state.items():
            if name == "number":
                self.assertEqual(out[name], 5)
                continue
            self.assertTrue(out[name] is not t or name in ("conjugate", "none", "sparse"), name)
            self.assertEqual((out[name].dtype, out[name].shape), (t.dtype, t.shape), name)
            self.assertTrue(
                torch.equal(out[name].to_dense() if t.is_sparse else out[name], t.to_dense() if t.is_sparse else t),
                name,
            )
        out["float"][4, 7] = 99
        self.assertEqual(
            (out["rows"][1, 7], out["column"][4], out["turned"][7, 4]), (99, 99, 99), "no more of the same memory"
        )
        self.assertNotEqual(base[4, 7], 99)
        self.assertEqual(out["turned"].stride(), base.t().stride())
        self.assertEqual(out["half"].data_ptr() % 2, 0)

    def test_places(self) -> None:
        tensors = [torch.randn(n) for n in (1, 63, 64, 65, 1000)]
        slots, sources, size = _move.layout(torch, tensors)
        self.assertTrue(all(slots[id(t)].at % 256 == 0 for t in tensors))
        self.assertEqual([s.at for s in sources], sorted(s.at for s in sources))
        self.assertEqual(sum(s.size for s in sources), 4 * (1 + 63 + 64 + 65 + 1000))
        self.assertLess(size, 4 * (1 + 63 + 64 + 65 + 1000) + 5 * 256)
        few = torch.randn(1000, 1000)[:, :3]
        self.assertEqual(_move.layout(torch, [few])[2], 12000)

    def test_modules(self) -> None:
        net = Net().eval()
        x = torch.randn(2, 3, 40)
        with torch.no_grad():
            want = net(x)
        before, weight = {k: v.clone() for k, v in net.state_dict().items()}, net.a.weight
        at = weight.data_ptr()
        backend = StandIn()
        state = {"net": net, "weight": net.a.weight, "list": [net.ids, {"deep": (net.a.bias, 1)}]}
        out = placed(state, backend)
        self.assertIs(out["net"], net)
        self.assertIs(net.a.weight, weight)
        self.assertIs(net.b.weight, net.a.weight)
        self.assertIs(net.ids, net.again)
        self.assertNotEqual(weight.data_ptr(), at)
        self.assertEqual(out["weight"].data_ptr(), weight.data_ptr())
        self.assertIs(out["list"][0], net.ids)
        self.assertEqual(out["list"][1]["deep"][0].data_ptr(), net.a.bias.data_ptr())
        self.assertTrue(weight.requires_grad)
        self.assertEqual((backend.allocated, backend.contexts, backend.warmed), (1, 0, {torch.float32}))
        for k, v in net.state_dict().items():
            self.assertTrue(torch.equal(v, before[k]), k)
        with torch.no_grad():
            self.assertTrue(torch.equal(net(x), want))

    def test_modules_that_do_more(self) -> None:
        class Own(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.told = 0
                self.w = torch.nn.Parameter(torch.ones(3))

            def _apply(self, fn: Any, recurse: bool = True) -> Any:
                self.told += 1
                return super()._apply(fn)

        net = torch.nn.Sequential(Own(), torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        net[1].weight.sum().backward()
        at = {k: v.data_ptr() for k, v in net.state_dict(keep_vars=True).items()}
        grad = net[1].weight.grad
        scripted = torch.jit.script(torch.nn.Linear(3, 2))
        want = scripted(torch.ones(1, 3))
        placed([net, scripted])
        self.assertEqual(net[0].told, 1)
        for k, v in net.state_dict(keep_vars=True).items():
            self.assertNotEqual(v.data_ptr(), at[k], k)
        self.assertTrue(torch.equal(net[1].weight.grad, grad))
        self.assertTrue(torch.equal(scripted(torch.ones(1, 3)), want))

    def test_containers(self) -> None:
        t = torch.randn(5)
        loop: list[Any] = [t]
        loop.append(loop)
        plain = [1, {"a": 2}]
        state = {
            "pair": Pair(t, 1),
            "config": Config(t, "x"),
            "ordered": collections.OrderedDict(a=t, b=2),
            "loop": loop,
            "plain": plain,
            "class": Config,
        }
        out = placed(state)
        self.assertIsInstance(out["pair"], Pair)
        self.assertIsNot(out["pair"].one, t)
        for same in (out["config"].table, out["ordered"]["a"], out["loop"][0]):
            self.assertIs(same, out["pair"].one)
        self.assertIs(out["loop"][1], out["loop"])
        self.assertIs(out["plain"], plain)
        self.assertIs(state["config"].table, t)
        self.assertEqual((out["config"].name, list(out["ordered"])), ("x", ["a", "b"]))

    def test_nothing_to_move(self) -> None:
        backend = StandIn()
        d = device.Device("cuda:0", backend=backend)
        for state in (None, 7, {"a": [1]}, (), Config(1, "x")):
            self.assertIs(d.place(state), state)
        d.placed()
        self.assertEqual((backend.contexts, backend.allocated), (0, 0))
        t = {"a": torch.ones(3)}
        self.assertIs(device.Device("cpu").place(t), t)


class Ring(unittest.TestCase):
    def test_many_sizes(self) -> None:
        for piece in (256, 1000, 1 << 12, 1 << 20):
            for lanes in (1, 2, 7):
                state = {
                    i: torch.randint(0, 255, (n,), dtype=torch.uint8)
                    for i, n in enumerate((1, 255, 256, 257, 5000, 3, 70000))
                }
                backend = StandIn()
                out = placed(state, backend, piece, lanes)
                for i, t in state.items():
                    self.assertTrue(torch.equal(out[i], t), (piece, lanes, i))
                self.assertEqual(backend.pinned_now, [])

    def test_buffers_are_few(self) -> None:
        backend = StandIn()
        ring = _ring.Ring(backend, 2, 1000)
        ring.prepare()
        self.assertEqual(len(backend.pinned_now), 4)
        t = torch.randint(0, 255, (100_000,), dtype=torch.uint8)
        for _ in range(2):  # it can be used again
            flat = backend.allocate(t.numel())
            ring.copy([_ring.Source(0, t.numel(), t.data_ptr())], flat)
            self.assertTrue(torch.equal(flat, t))
        self.assertEqual(len(backend.pinned_now), 4)
        ring.close()
        self.assertEqual(backend.pinned_now, [])

    def test_buffers_are_as_large_as_needed(self) -> None:
        backend, piece = StandIn(), 1 << 20
        ring = _ring.Ring(backend, 1, piece)
        for size, want in ((100, [4096]), (5000, [8192]), (piece, [piece]), (3 * piece, [piece, piece]), (9, [piece, piece])):
            t = torch.randint(0, 255, (size,), dtype=torch.uint8)
            flat = backend.allocate(size)
            ring.copy([_ring.Source(0, size, t.data_ptr())], flat)
            self.assertTrue(torch.equal(flat, t))
            self.assertEqual([b.numel() for b in backend.pinned_now], want, f"pinned for {size} bytes")
        ring.close()
        self.assertEqual(backend.pinned_now, [])

    def test_remembered_files(self) -> None:
        """A zygote looks once, and again at files that the author's code may have changed."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "m.safetensors")
            n = 2 << 20
            header = json.dumps({"a": {"dtype": "U8", "shape": [n], "data_offsets": [0, n]}}).encode()
            with open(path, "wb") as f:
                f.write(len(header).to_bytes(8, "little") + header + bytes(n))
            tensors = Model(path).torch()
            self.addCleanup(_ring.forget_mappings)
            _ring.remember_mappings()
            with unittest.mock.patch.object(_ring, "_unchanged", side_effect=AssertionError("it walks again")):
                placed(dict(tensors))

            def place(state: Any, me: Any) -> Any:
                state["a"].fill_(7)
                return placed(state)

            hooks = _stage.Hooks(lambda state, calls: calls, place=place)
            out = _stage.place(_stage.Loaded(hooks, None, dict(tensors), 0), None)  # type: ignore[arg-type]
            self.assertEqual(out["a"][:3].tolist(), [7, 7, 7], "the file is copied, and not what place has made of it")

    def test_a_copy_fails(self) -> None:
        backend = StandIn()
        backend.fail_at = 5
        t = torch.randn(50_000)
        with self.assertRaisesRegex(RuntimeError, "illegal memory access"):
            placed([t], backend)
        self.assertLess(backend.copies, 15, "others went on")
        self.assertEqual(backend.pinned_now, [])
        self.assertEqual([x for x in threading.enumerate() if "lane" in x.name], [])

    def test_kernels_fail(self) -> None:
        backend = StandIn()
        backend.warm = lambda dtypes: (_ for _ in ()).throw(RuntimeError("no kernel"))  # type: ignore[method-assign]
        with self.assertRaisesRegex(RuntimeError, "no kernel"):
            placed([torch.randn(50_000)], backend)
        self.assertEqual(backend.pinned_now, [])

    def test_files(self) -> None:
        n = 3 << 20
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "m.safetensors")
            header = json.dumps(
                {k: {"dtype": "U8", "shape": [n], "data_offsets": [i * n, (i + 1) * n]} for i, k in enumerate("abc")}
            ).encode()
            with open(path, "wb") as f:
                f.write(len(header).to_bytes(8, "little") + header + os.urandom(3 * n))
            model = Model(path)
            tensors = model.torch()
            sources = [_ring.Source(0, n, tensors["b"].data_ptr())]

            def files(s: list[_ring.Source]) -> list[_ring.Source]:
                found, fds = _ring.opened(s)
                for fd in fds:
                    os.close(fd)
                return found

            (found,) = files(sources)
            self.assertGreaterEqual(found.file, 0)
            self.assertEqual(found.offset, 8 + len(header) + n)
            for piece in (1 << 20, 1000_003):
                out = placed(dict(tensors), piece=piece)
                for k in "abc":
                    self.assertTrue(torch.equal(out[k], tensors[k]), k)
            own = torch.randint(0, 255, (n,), dtype=torch.uint8)
            self.assertEqual(files([_ring.Source(0, n, own.data_ptr())])[0].file, -1)
            other = os.path.join(folder, "other")
            with open(other, "wb") as f:
                f.write(bytes(os.path.getsize(path)))
            self.assertEqual(_ring._open(path, os.stat(other).st_ino), -1, "another file of that name is taken for it")
            tensors["a"][5] = 1 ^ int(tensors["a"][5])  # a page of this process's own
            self.assertEqual(files(sources)[0].file, -1, "what was written since is not in the file")
            self.assertTrue(torch.equal(placed(dict(tensors))["a"], tensors["a"]))
            tensors = Model(path).torch()
            os.replace(other, path)
            self.assertEqual(
                files([_ring.Source(0, n, tensors["b"].data_ptr())])[0].file, -1, "the file is another by now"
            )

    def test_file_is_cut(self) -> None:
        with tempfile.TemporaryFile() as f:
            f.write(b"x" * 1000)
            f.flush()
            flat = torch.zeros(2000, dtype=torch.uint8)
            with self.assertRaisesRegex(OSError, "has become shorter"):
                _ring.Ring(StandIn(), 1, 4096).copy([_ring.Source(0, 2000, 0, f.fileno())], flat)


class Told(unittest.TestCase):
    def test_out_of_memory_in_place(self) -> None:
        os.environ[device.VISIBLE] = GPU
        backend = StandIn(room=1000)
        state = [torch.randn(500_000_000 // 4)]
        d = device.Device("cuda:0", backend=backend)
        me = sc.Replica(device="cuda:0", _place=d.place)
        loaded = _stage.Loaded(_stage.Hooks(infer=lambda s, c: c), Model(), state, 0)
        with self.assertRaisesRegex(
            sc.OutOfMemory, "^out of memory on device GPU-0: want 0.50 GB, 0.00 of 1.07 GB free"
        ) as got:
            d.place(state)
        self.assertEqual(backend.copies, 0)
        with self.assertRaisesRegex(sc.StageError, "place: OutOfMemory: out of memory on device GPU-0: want 0.50 GB"):
            _stage.place(loaded, me)
        self.assertIsInstance(got.exception, sc.OutOfMemory)
        self.assertIs(me.to_device(None), None)

    def test_out_of_memory_in_infer(self) -> None:
        os.environ[device.VISIBLE] = GPU
        failed = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 39.59 GiB total capacity)")
        own = sc.OutOfMemory("this many do not fit")
        calls = [sc.Call(b"x"), sc.Call(b"y"), sc.Call(b"z")]
        results = _ends.run(lambda s, c: [failed, "fine", own], None, calls)
        self.assertIsInstance(results[0], sc.OutOfMemory)
        self.assertIn("out of memory on device GPU-0: want 2.00 GiB, ", str(results[0]))
        self.assertIsInstance(results[1], sc.Output)
        self.assertIs(results[2], own)

    def test_each_replica_logs_its_own_copy(self) -> None:
        """Two replicas of a worker place their states at the same time: both copies end before one
        of them is logged."""
        d = device.Device("cuda:0", keep=True, backend=StandIn())
        both = threading.Barrier(2)

        def replica(size: int) -> None:
            d.place([torch.zeros(size, dtype=torch.uint8)])
            both.wait(60)
            d.placed()

        with self.assertLogs("stagecoach", logging.INFO) as log:
            threads = [threading.Thread(target=replica, args=(n << 20,)) for n in (10, 20)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
        said = sorted(re.search(r"0\.\d+ GB copied", line).group() for line in log.output)
        self.assertEqual(said, ["0.010 GB copied", "0.021 GB copied"])

    def test_times(self) -> None:
        os.environ[device.VISIBLE] = GPU
        backend = StandIn()
        d = device.Device("cuda:0", backend=backend)
        with self.assertLogs("stagecoach", logging.INFO) as log:
            d.ready()
            self.assertEqual((backend.contexts, len(backend.warmed)), (1, 3))
            before = len(backend.pinned_now)
            d.place([torch.randn(1000)])
            d.placed()
        self.assertGreater(before, 0)
        self.assertEqual((backend.contexts, backend.pinned_now), (1, []))
        self.assertRegex(log.output[0], r"device GPU-0 is ready: context 0\.\d+ s, first kernels 0\.\d+ s")
        self.assertRegex(
            log.output[1], r"device GPU-0 has its parameters: 0\.000 GB copied in 0\.\d+ s \(\d+\.\d GB/s\)$"
        )


class FakeCuda:
    """The part of torch.cuda that the ring uses, with its names and arguments, in host memory."""

    class Event:
        def __init__(self, blocking: bool = False) -> None:
            self.blocking = blocking

        def record(self, stream: Any) -> None:
            stream.told.append("record")

        def synchronize(self) -> None:
            pass

    class Stream:
        def __init__(self, device: str) -> None:
            self.told: list[str] = []

        def wait_event(self, event: Any) -> None:
            self.told.append("wait")

        def record_event(self) -> Any:
            return FakeCuda.Event()

        def synchronize(self) -> None:
            self.told.append("synchronize")

    def __init__(self, refuse: bool = False) -> None:
        self.registered: set[int] = set()
        self.refuse = refuse
        self.streams: list[Any] = []
        self.current = self.Stream("cpu")
        self.forked = False

    def init(self) -> None:
        pass

    def set_device(self, device: int) -> None:
        pass

    @functools.lru_cache(maxsize=1)
    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return self.forked

    def is_initialized(self) -> bool:
        return True

    def empty_cache(self) -> None:
        pass

    def mem_get_info(self) -> tuple[int, int]:
        return 3_000_000_000, 80_000_000_000

    def current_stream(self, device: Any = None) -> Any:
        return self.current

    def set_stream(self, stream: Any) -> None:
        self.streams.append(stream)

    def cudart(self) -> Any:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.refuse:
            self.registered.add(address)
        return int(self.refuse)

    def cudaHostUnregister(self, address: int) -> int:
        self.registered.remove(address)
        return 0


@contextlib.contextmanager
def made_for(cuda: FakeCuda) -> Iterator[None]:
    """PyTorch with CUDA."""
    with unittest.mock.patch.object(torch, "cuda", cuda), unittest.mock.patch.object(torch.version, "cuda", "12.0"):
        yield


class OnCuda(unittest.TestCase):
    """The calls to CUDA, as far as that can be seen without any. The rest needs a device."""

    def test_ring(self) -> None:
        t = torch.randint(0, 255, (40 << 20,), dtype=torch.uint8)
        cuda = FakeCuda()
        with made_for(cuda), unittest.mock.patch.object(
            torch.nn.functional, "linear", lambda a, w, b: a.float()  # which a CPU may not do in all types
        ):
            d = device.Device("cuda:0", backend=device._Cuda(torch, "cpu"))
            d.ready()
            self.assertGreater(len(cuda.registered), 0)
            out = d.place({"t": t, "f": torch.randn(9)})
            d.placed()
        self.assertTrue(torch.equal(out["t"], t))
        self.assertEqual(cuda.registered, set())
        self.assertTrue(all(s.told[0] == "wait" and "record" in s.told for s in cuda.streams))
        self.assertEqual(cuda.current.told, ["synchronize"])  # after first kernels, and no more

    def test_pinned_pages_are_not_inherited(self) -> None:
        """A buffer is private, and no child has it."""
        cuda = FakeCuda()
        with unittest.mock.patch.object(torch, "cuda", cuda):
            backend = _ring.Cuda(torch, "cpu")
            buffer = backend.pinned(3 << 20)
        at = buffer.data_ptr()

        def flags() -> str:
            """What the kernel says of the buffer's mapping; empty: there is none."""
            inside = False
            with open("/proc/self/smaps", encoding="utf-8", errors="surrogateescape") as f:
                for line in f:
                    if "-" in line.split(" ")[0]:
                        start, end = (int(x, 16) for x in line.split(" ")[0].split("-"))
                        inside = start <= at < end
                    elif inside and line.startswith("VmFlags:"):
                        return line
            return ""

        self.assertIn(" dc", flags(), "a child would inherit it")
        self.assertNotIn(" sh", flags(), "it is shared")
        pid = os.fork()
        if pid == 0:
            os._exit(0 if flags() == "" else 9)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0, "the child has the pinned pages")
        with unittest.mock.patch.object(torch, "cuda", cuda):
            backend.unpin([buffer])
        self.assertEqual(cuda.registered, set())

    def test_no_registering(self) -> None:
        cuda = FakeCuda(refuse=True)
        real = torch.empty
        asked = []

        def empty(*args: Any, pin_memory: bool = False, **more: Any) -> Any:
            asked.append(pin_memory)
            return real(*args, **more)

        with unittest.mock.patch.object(torch, "cuda", cuda), unittest.mock.patch.object(torch, "empty", empty):
            self.assertEqual(_ring.Cuda(torch, "cpu").pinned(4096).numel(), 4096)
        self.assertEqual(asked, [True])

    def test_asked_before_the_fork(self) -> None:
        cuda = FakeCuda()
        cuda.forked = True
        with made_for(cuda):
            with self.assertRaisesRegex(sc.StageError, "leave torch.cuda to the place hook"):
                device.Device("cuda:0").place([torch.ones(3)])
        with unittest.mock.patch.object(torch.version, "cuda", None):
            with self.assertRaisesRegex(sc.StageError, "is not made for CUDA"):
                device.Device("cuda:0").place([torch.ones(3)])

    def test_sizes(self) -> None:
        os.environ[device.VISIBLE] = GPU
        with unittest.mock.patch.object(torch, "cuda", FakeCuda()):
            got = device.memory_error(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; ...)"))
        self.assertEqual(str(got), "out of memory on device GPU-0: want 2.00 GiB, 3.00 of 80.00 GB free")


if __name__ == "__main__":
    unittest.main()
