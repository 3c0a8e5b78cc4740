"""Tests of the Python SDK's parts; package conformance runs them."""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import os
import struct
import tempfile
import unittest
import weakref
from unittest import mock

import numpy

import stagecoach as sc
from stagecoach import _ends, _main, _safetensors, _tensors
from stagecoach._types import Tensor

TORCH = importlib.util.find_spec("torch") is not None


async def _async(state: object, items: list) -> list:
    return items


class Types(unittest.TestCase):
    def test_values_become_items(self) -> None:
        for value, body, content_type in [
            (b"x", b"x", "application/octet-stream"),
            ("\u00e9", b"\xc3\xa9", "text/plain"),
            (bytearray(b"b"), b"b", "application/octet-stream"),
            ({"a": [1, None]}, b'{"a": [1, null]}', "application/json"),
            ([], b"[]", "application/json"),
            (1.5, b"1.5", "application/json"),
            ({}, b"{}", "application/json"),
            (sc.Item(b"i", "x/y"), b"i", "x/y"),
            (sc.Item("t", "text/html"), b"t", "text/html"),
        ]:
            it = sc.Output.of(value).items[0]
            self.assertEqual((it.body, it.content_type), (body, content_type), value)
        self.assertEqual(sc.Output.of(None).items, [])
        self.assertEqual([it.body for it in sc.Output("a", b"b").items], [b"a", b"b"])
        self.assertEqual(sc.Output(header={"A": "b"}).header, [("A", "b")])
        self.assertEqual(list(sc.Output.of(numpy.ones(2)).items[0].tensors), ["output"])
        self.assertEqual(sc.Output.of({"x": numpy.float32(1), "y": "z"}).items[0].body, b'{"x": 1.0, "y": "z"}')
        self.assertEqual(sc.Output.of(numpy.bool_(True)).items[0].body, b"true")
        for bad in (
            object(),
            {"x": object()},
            float("inf"),
            numpy.float32("nan"),
            [numpy.ones(2)],
            {"x": numpy.ones(2), "y": 1},
        ):
            with self.assertRaisesRegex(TypeError, "a result of"):
                sc.Output.of(bad)

    def test_wrong_kind_of_item_is_bad_input(self) -> None:
        text, tensors = sc.Item("no json"), sc.Item(tensors={"x": numpy.ones(2)})
        for ask, want in [
            (text.json, "want JSON"),
            (lambda: text.tensors, "want tensors"),
            (lambda: text.torch("x"), "want tensors"),
            (tensors.text, "want bytes"),
            (lambda: tensors.datatype("y"), r"no tensor 'y' among \['x'\]"),
            (sc.Item(b"\xff").text, "UTF-8"),
            (sc.Item(b"[" * 100_000).json, "want JSON"),
        ]:
            with self.assertRaisesRegex(sc.BadInput, want):
                ask()

    def test_items_of_all_calls_run_together(self) -> None:
        runs = []

        @sc.together
        def infer(state: int, items: list[sc.Item]) -> list:
            runs.append(len(items))
            if any(it.text() == "poison" for it in items):
                raise RuntimeError("poison")
            return [sc.BadInput("no number") if not it.text().isdigit() else state + int(it.text()) for it in items]

        def call(*texts: str) -> sc.Call:
            return sc.Call([sc.Part("", [sc.Item(t) for t in texts])])

        ended = sc.Call("1")
        ended._cancelled = True
        out = infer(10, [call("1", "2"), call("3", "x"), ended, call(), sc.Call("4")])
        self.assertEqual([[it.json() for it in out[i].items] for i in (0, 3, 4)], [[11, 12], [], [14]])
        self.assertIsInstance(out[1], sc.BadInput)
        self.assertEqual(str(out[1]), "item 1: no number")
        self.assertIsInstance(out[2], sc.Cancelled)
        self.assertEqual(runs, [5])

        runs.clear()  # one that raises fails alone, after 2·log2(8) further runs
        calls = [sc.Call(str(i)) for i in range(5)] + [sc.Call("poison"), sc.Call("6"), sc.Call("7")]
        out = infer(10, calls)
        self.assertEqual([out[i].items[0].json() for i in (0, 1, 2, 3, 4, 6, 7)], [10, 11, 12, 13, 14, 16, 17])
        self.assertEqual((type(out[5]), str(out[5])), (RuntimeError, "poison"))
        self.assertEqual(runs, [8, 4, 4, 2, 1, 1, 2])

        runs.clear()  # no call of a function that is not idempotent runs twice
        with mock.patch.dict(os.environ, STAGECOACH_IDEMPOTENT="false"):
            out = infer(10, calls)
        self.assertEqual([str(err) for err in out], ["poison"] * 8)
        self.assertEqual(runs, [8])

        [out] = sc.together(lambda state, items: [])(None, [sc.Call("1")])
        self.assertIn("0 results for 1 items", str(out))
        with self.assertRaises(sc.StageError):
            sc.together(_async)

    def test_a_call_of_a_handlers_own_tests(self) -> None:
        call = sc.Call("text", header=[("X-Call-Id", "7")])
        self.assertEqual(
            (call.input.text(), call.header_value("x-call-id"), call.header_value("y", "z")), ("text", "7", "z")
        )
        self.assertFalse(call.cancelled() or call.wait(0))
        call.send("piece")
        self.assertIsNone(call.remaining())
        late = sc.Call([sc.Part("a", [sc.Item("x")]), sc.Part("b", [sc.Item("y")])], deadline=1.0)
        self.assertEqual([it.text() for it in late.items], ["x", "y"])
        self.assertEqual(late.remaining(), 0)
        with self.assertRaises(sc.Expired):
            late.send("x")
        with self.assertRaisesRegex(sc.BadInput, "2 items, want one"):
            late.input
        infer = sc.each(lambda state, call: state + call.input.json())
        self.assertEqual(infer(1, [sc.Call("1")]), [2])
        errors = infer(1, [late, sc.Call("x"), sc.Call([])])
        self.assertEqual([type(e) for e in errors], [sc.Expired, sc.BadInput, sc.BadInput])

    def test_a_call_of_any_json(self) -> None:
        self.assertEqual(sc.Call([1, 2]).input.json(), [1, 2])
        self.assertEqual(sc.Call((1, 2)).input.json(), [1, 2])
        self.assertEqual(sc.Call(None).input.json(), None)
        self.assertEqual(sc.Call(numpy.zeros(2)).input.tensors["output"].tolist(), [0, 0])
        for call in (sc.Call(), sc.Call([])):
            self.assertEqual(call.items, [])

    def test_values_that_are_no_item_are_refused(self) -> None:
        for body in (5, {"a": 1}, [1, 2]):
            with self.assertRaisesRegex(TypeError, "bytes-like object is required, not"):
                sc.Item(body)

    def test_times(self) -> None:
        for text, want in {"": 0, "0": 0, "7": 7, "1m30s": 90, "400ms": 0.4, "1.5h": 5400, "10us": 1e-5}.items():
            self.assertAlmostEqual(_main.duration("x", text), want)
        for bad in ("soon", "-1", "s", "1m 3s", "1x", "ms1"):
            with self.assertRaisesRegex(sc.StageError, "want seconds or a duration"):
                _main.duration("x", bad)


class Ends(unittest.TestCase):
    def test_an_error_keeps_nothing_alive(self) -> None:
        kept: list[weakref.ref] = []

        @sc.each
        def infer(state: object, call: sc.Call) -> object:
            array = numpy.ones(1)
            kept.append(weakref.ref(array))
            raise BAD[len(kept) - 1]

        def whole(state: object, calls: list[sc.Call]) -> object:
            return infer(state, calls)[0].missing

        logging.disable()
        self.addCleanup(logging.disable, logging.NOTSET)
        gc.collect()
        gc.disable()
        self.addCleanup(gc.enable)
        BAD = [sc.BadInput("x"), ValueError("x"), sc.Expired("x"), KeyError("x")]
        self.assertEqual(len(_ends.run(infer, None, [sc.Call("a"), sc.Call("b")])), 2)
        del BAD[:2]
        kept_before, kept[:] = kept[:], []
        self.assertEqual([type(e) for e in _ends.run(whole, None, [sc.Call("a")])], [AttributeError])
        self.assertEqual([ref() for ref in kept_before], [None, None])

    def test_out_of_memory(self) -> None:
        class OutOfMemoryError(RuntimeError):
            """The name that PyTorch uses."""

        for err, code in [
            (sc.OutOfMemory("x"), 9),
            (OutOfMemoryError("CUDA out of memory."), 9),
            (MemoryError(), 2),
            (RuntimeError("CUDA error: out of memory"), 9),
            (RuntimeError("cuBLAS: CUBLAS_STATUS_ALLOC_FAILED, CUDA error"), 9),
            (RuntimeError("out of memory"), 2),
            (ValueError("CUDA out of memory"), 2),
        ]:
            self.assertEqual(_ends._code(err), 2, err)  # another replica would not have more memory
            with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "GPU-1"}):
                self.assertEqual(_ends._code(err), code, err)


class Tensors(unittest.TestCase):
    def test_numpy_there_and_back(self) -> None:
        for dtype in ("?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8", ">i4", ">f8"):
            for array in (
                numpy.arange(6).reshape(2, 3).astype(dtype),
                numpy.ones((), dtype),
                numpy.ones((0, 2), dtype),
                numpy.arange(6).reshape(2, 3).astype(dtype).T,
            ):
                t = _tensors.encode("x", array)
                back = _tensors.to_numpy(t)
                numpy.testing.assert_array_equal(back, array)
                self.assertEqual(back.shape, array.shape)
                self.assertTrue(back.flags.writeable)
        for array in (
            numpy.array([b"a", b""]),
            numpy.array(["a", "\u00e9\u4e16"]),
            numpy.array([[b"x"], ["y"]], object),
        ):
            back = _tensors.to_numpy(_tensors.encode("x", array))
            self.assertEqual(back.shape, array.shape)
            self.assertEqual(
                [e.decode() for e in back.reshape(-1)],
                [e if isinstance(e, str) else e.decode() for e in array.reshape(-1).tolist()],
            )
        for bad in (numpy.ones(1, "c8"), numpy.ones(1, "M8[s]"), numpy.array([1, b"x"], object)):
            with self.assertRaisesRegex(TypeError, "want"):
                _tensors.encode("x", bad)

    def test_a_large_tensor_is_not_copied(self) -> None:
        data = bytearray(8)
        _tensors.to_numpy(Tensor("x", "FP32", (2,), memoryview(data)))[0] = 1
        self.assertNotEqual(data, bytearray(8))

    def test_invalid_tensors_are_bad_input(self) -> None:
        for t, want in [
            (Tensor("x", "FP33", (1,), b"1234"), "datatype 'FP33'"),
            (Tensor("x", "FP32", (2,), b"1234"), r"4 bytes of data, want 8 for FP32\[2\]"),
            (Tensor("x", "FP32", (1 << 62, 1 << 62, 0), b""), "2\\^40"),
            (Tensor("x", "INT8", (1,) * 33, b"1"), "32 dimensions"),
            (Tensor("x", "BYTES", (1,), b"\1\0\0"), "3 bytes at its end"),
            (Tensor("x", "BYTES", (1,), b"\2\0\0\0x"), "2 bytes with 1 left"),
            (Tensor("x", "BYTES", (2,), b"\0\0\0\0"), "1 elements of BYTES, want 2"),
        ]:
            with self.assertRaisesRegex(sc.BadInput, want):
                _tensors.to_numpy(t)

    @unittest.skipUnless(TORCH, "no torch")
    def test_torch_there_and_back(self) -> None:
        import torch

        for dtype in (
            torch.bool,
            torch.uint8,
            torch.int8,
            torch.int16,
            torch.int32,
            torch.int64,
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
        ):
            for tensor in (
                torch.arange(6).reshape(2, 3).to(dtype),
                torch.ones((), dtype=dtype),
                torch.ones(0, 2, dtype=dtype),
                torch.arange(6).reshape(2, 3).to(dtype).t(),
            ):
                it = sc.Item(tensors={"x": tensor.clone().requires_grad_(tensor.is_floating_point())})
                back = it.torch("x")
                self.assertTrue(back.dtype == dtype and back.shape == tensor.shape and torch.equal(back, tensor))
        self.assertEqual(sc.Output.of(torch.ones(1)).items[0].datatype("output"), "FP32")
        self.assertEqual(sc.Output.of(torch.nn.Parameter(torch.ones(1))).items[0].datatype("output"), "FP32")
        with self.assertRaisesRegex(TypeError, "complex64"):
            sc.Item(tensors={"x": torch.ones(1, dtype=torch.complex64)})
        with self.assertRaisesRegex(sc.BadInput, "want numbers"):
            sc.Item(tensors={"x": numpy.array(["a"])}).torch("x")


def file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list, begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


class Models(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def write(self, name: str, content: bytes) -> str:
        path = os.path.join(self.folder, name)
        with open(path, "wb") as f:
            f.write(content)
        return path

    def weights(self, name: str = "model.safetensors", prefix: str = "") -> str:
        header = {
            "__metadata__": {"format": "pt"},
            prefix + "weight": entry("F32", [2, 2], 2, 18),
            prefix + "half": entry("BF16", [], 0, 2),
            prefix + "bias": entry("F32", [2], 18, 26),
            prefix + "none": entry("I64", [3, 0], 26, 26),
        }
        return self.write(name, file(header, b"\x80\x3f" + struct.pack("<6f", 1, 2, 3, 4, 5, 6)))

    def test_tensors_are_mapped(self) -> None:
        model = sc.Model(self.weights())
        self.assertEqual(model.tensors["weight"].tolist(), [[1, 2], [3, 4]])
        self.assertEqual(
            {k: (v.dtype.name, v.shape) for k, v in model.tensors.items()},
            {
                "half": ("uint16", ()),
                "weight": ("float32", (2, 2)),
                "bias": ("float32", (2,)),
                "none": ("int64", (3, 0)),
            },
        )
        with self.assertRaises(ValueError):
            model.tensors["bias"][0] = 1
        with open("/proc/self/maps", encoding="utf-8") as f:
            self.assertIn(model.path, f.read())

    def test_folders_and_indexes(self) -> None:
        one, two = os.path.basename(self.weights("a.safetensors", "a.")), os.path.basename(
            self.weights("b.safetensors", "b.")
        )
        self.write(".hidden.safetensors", b"")
        self.assertEqual(len(sc.Model(self.folder).tensors), 8)
        index = {
            "weight_map": {
                f"{p}.{n}": f for p, f in (("a", one), ("b", two)) for n in ("weight", "half", "bias", "none")
            }
        }
        at = self.write("model.safetensors.index.json", json.dumps(index).encode())
        self.assertEqual(len(sc.Model(self.folder).tensors), 8)
        self.assertEqual(len(sc.Model(at).tensors), 8)
        for change, want in [
            ({"a.weight": two}, "the index has it in b.safetensors, the files in a.safetensors"),
            ({"c": one}, "the files in none"),
            ({"a.weight": "../a.safetensors"}, "beside it"),
            ({"a.weight": "/etc/passwd"}, "beside it"),
            ({"a.weight": 3}, "weight_map"),
        ]:
            self.write(
                "model.safetensors.index.json", json.dumps({"weight_map": {**index["weight_map"], **change}}).encode()
            )
            with self.assertRaisesRegex(sc.StageError, want):
                sc.Model(self.folder).tensors
        os.remove(at)
        self.weights("c.safetensors", "a.")
        with self.assertRaisesRegex(sc.StageError, "it is in .*a.safetensors and .*c.safetensors, want it once"):
            sc.Model(self.folder).tensors
        for path, want in [
            ("", "no model"),
            ("/none", "no /none"),
            ("/proc/self/fd", "0 files"),
            ("/dev/null", "want a regular file"),
        ]:
            with self.assertRaisesRegex(sc.StageError, want):
                sc.Model(path).tensors

    def test_hostile_files(self) -> None:
        u8 = entry("U8", [1], 0, 1)
        for content, want in [
            (b"", "0 bytes"),
            (b"1234567", "7 bytes"),
            (struct.pack("<Q", 1 << 63) + b"{}", "a header of 9223372036854775808 bytes"),
            (file({"a": u8})[:20], "a header of"),
            (file(b"[]"), "want a JSON object"),
            (file(b" {}"), "want a JSON object"),
            (file(b'{"a":'), "Expecting"),
            (file(b"{}x"), "Extra data"),
            (file(b'{"\xff":1}'), "utf-8"),
            (file(b'{"a":{"dtype":"U8"},"a":1}'), "'a': it occurs twice"),
            (file({"a": {**u8, "dtype": "F7"}}, b"x"), "dtype 'F7'"),
            (file({"a": {**u8, "dtype": ["U8"]}}, b"x"), "dtype"),
            (file({"a": {**u8, "more": 1}}, b"x"), "want an object of dtype"),
            (file({"a": 1}), "want an object of dtype"),
            (file({"__metadata__": {"a": 1}}), "__metadata__"),
            (file({}, b"abc"), "3 bytes of data belong to no tensor"),
            (file({"a": entry("U8", [1], 1, 2)}, b"xy"), "want a begin of 0"),
            (
                file({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"xyz"),
                r"'b': data_offsets \[1,3\], want a begin of 2",
            ),
            (file({"a": entry("U8", [2], 0, 2)}, b"x"), "an end of at most 1"),
            (file({"a": entry("U8", [0], 0, -1)}), "two integers"),
            (file({"a": entry("U8", [0], 0, True)}), "two integers"),
            (file({"a": entry("U8", [3], 0, 2)}, b"xy"), "2 bytes of data, want 3"),
            (file({"a": entry("U8", [-1, -2], 0, 2)}, b"xy"), "shape"),
            (file({"a": entry("U8", [1.0], 0, 1)}, b"x"), "shape"),
            (file({"a": entry("U8", [1 << 32, 1 << 32], 0, 0)}), "0 bytes of data"),
            (file({"a": entry("U8", [1] * 65, 0, 1)}, b"x"), "at most 64"),
            (file({"a": {**u8, "data_offsets": [0, 1, 2]}}, b"x"), "two integers"),
            (file(b'{"a":' * 100_000), "recursion|Expecting"),
            (
                file(b'{"a":{"dtype":"U8","shape":[1' + b"0" * 10_000 + b'],"data_offsets":[0,1]}}', b"x"),
                "shape|digits",
            ),
        ]:
            with self.assertRaisesRegex(sc.StageError, want):
                _safetensors.read(self.write("x.safetensors", content))
        self.assertEqual(_safetensors.read(self.write("x.safetensors", file({}))), {})

    @unittest.skipUnless(TORCH, "no torch")
    def test_torch_is_mapped(self) -> None:
        import torch

        model = sc.Model(self.weights())
        tensors = model.torch()
        self.assertEqual(tensors["weight"].tolist(), [[1, 2], [3, 4]])
        self.assertTrue(
            tensors["half"].dtype == torch.bfloat16 and tensors["half"].item() == 1 and tensors["none"].shape == (3, 0)
        )
        header = json.dumps({"weight": entry("F32", [2, 2], 0, 16), "bias": entry("F32", [2], 16, 24)}).encode()
        aligned = sc.Model(
            self.write("b.safetensors", file(header + b" " * (-len(header) % 8), struct.pack("<6f", 1, 2, 3, 4, 5, 6)))
        )
        module = aligned.fill(torch.nn.Linear(2, 2))
        self.assertFalse(module.training)
        self.assertEqual(module(torch.ones(1, 2)).tolist(), [[8, 13]])
        self.assertEqual(module.weight.data_ptr(), aligned.torch()["weight"].data_ptr())
        tied = torch.nn.Module()
        tied.a = torch.nn.Linear(2, 2)
        tied.b = torch.nn.Linear(2, 2, bias=False)
        tied.b.weight = tied.a.weight
        header = {"a.weight": entry("F32", [2, 2], 0, 16), "a.bias": entry("F32", [2], 16, 24)}
        filled = sc.Model(self.write("c.safetensors", file(header, bytes(24)))).fill(tied)
        self.assertTrue(filled.a.weight is filled.b.weight and not filled.b.weight.detach().any())
        with self.assertRaisesRegex(sc.StageError, r"'half': got BF16 \[\], want no tensor of that name; .*'none': got I64"):
            model.fill(torch.nn.Linear(2, 2))
        with self.assertRaisesRegex(sc.StageError, r"'weight': got F32 \[2, 2\], want F32 \[2, 3\]"):
            aligned.fill(torch.nn.Linear(3, 2))
        with self.assertRaisesRegex(sc.StageError, r"'bias': got F32 \[2\], want no tensor of that name"):
            aligned.fill(torch.nn.Linear(2, 2, bias=False))
        norm = torch.nn.BatchNorm1d(2, affine=False, track_running_stats=True)
        header = {
            "running_mean": entry("F32", [2], 0, 8),
            "running_var": entry("F32", [2], 8, 16),
            "num_batches_tracked": entry("I64", [], 16, 24),
        }
        filled = sc.Model(self.write("d.safetensors", file(header, struct.pack("<4fq", 1, 2, 3, 4, 5)))).fill(norm)
        self.assertEqual((filled.running_var.tolist(), filled.num_batches_tracked.item()), ([3, 4], 5))


if __name__ == "__main__":
    unittest.main()
