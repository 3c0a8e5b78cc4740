"""Tests with real PyTorch, on a model of a few thousand random parameters."""
from __future__ import annotations

import json
import struct
import tempfile
import unittest
from pathlib import Path

import torch

import handler
import stagecoach as sc

STAGES, WIDTH, INNER = 8, 64, 96
TEXTS = ["a", "to be, or not to be", "caf\u00e9", "to be, or not to b?", "x" * 300]


def parameters(stage: int) -> dict[str, torch.Tensor]:
    """Return the parameters of a stage, counted from 0. Each stage has one block."""
    block = handler.Block(WIDTH, INNER)
    tensors = {f"blocks.{stage}.{name}": torch.randn(p.shape) / 8 for name, p in block.named_parameters()}
    if stage == 0:
        tensors["embedding.weight"] = torch.randn(256, WIDTH)
    if stage == STAGES - 1:
        tensors.update({"norm.weight": torch.ones(WIDTH), "norm.bias": torch.zeros(WIDTH),
                        "head.weight": torch.randn(256, WIDTH), "head.bias": torch.zeros(256)})
    return tensors


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a file of FP32 tensors."""
    header, data = {}, b""
    for name, t in tensors.items():
        piece = t.contiguous().numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(t.shape), "data_offsets": [len(data), len(data) + len(piece)]}
        data += piece
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def run(stages: list[handler.Stage], texts: list[str]) -> list[dict]:
    """Send texts through stages, as a batch of one call each."""
    outputs: list = texts
    with torch.no_grad():
        for stage in stages:
            calls = [sc.Call(out.items[0] if isinstance(out, sc.Output) else out) for out in outputs]
            outputs = handler.infer(stage, calls)
            for out in outputs:
                if isinstance(out, Exception):
                    raise out
    return [out.items[0].json() for out in outputs]


class TestTransformer(unittest.TestCase):
    """The model is in eight files."""

    folder: tempfile.TemporaryDirectory
    stages: list[handler.Stage]

    @classmethod
    def setUpClass(cls) -> None:
        torch.manual_seed(1)
        torch.set_num_threads(1)
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.stages = []
        for stage in range(STAGES):
            path = Path(cls.folder.name, f"{stage + 1}.safetensors")
            write(path, parameters(stage))
            cls.stages.append(handler.load(sc.Model(str(path))))

    def likely(self, answers: list[dict]) -> list[list[float]]:
        self.assertTrue(all("nothing" in a["synthetic"] for a in answers))
        return [[p["probability"] for p in a["next"]] for a in answers]

    def close(self, got: list[dict], want: list[dict]) -> None:
        """Check for the same bytes, with probabilities that differ only by the order of
        additions."""
        self.assertEqual([[p["byte"] for p in a["next"]] for a in got], [[p["byte"] for p in a["next"]] for a in want])
        for g, w in zip(self.likely(got), self.likely(want)):
            self.assertEqual(len(g), handler.TOP)
            for a, b in zip(g, w):
                self.assertAlmostEqual(a, b, delta=2e-5)

    def test_cut_is_whole(self) -> None:
        whole = handler.load(sc.Model(self.folder.name))
        self.assertEqual(len(whole.blocks), STAGES)
        self.assertEqual(run(self.stages, TEXTS), run([whole], TEXTS))

    def test_batch_is_each_alone(self) -> None:
        self.close(run(self.stages, TEXTS), [run(self.stages, [text])[0] for text in TEXTS])

    def test_it_computes(self) -> None:
        first, again, other = self.likely(run(self.stages, [TEXTS[1], TEXTS[1], TEXTS[3]]))
        self.assertEqual(first, again)
        self.assertNotEqual(first, other)
        self.assertTrue(all(0 < p < 1 for p in first) and first == sorted(first, reverse=True))

    def test_only_the_last_bytes_count(self) -> None:
        self.assertEqual(*run(self.stages, ["y" + "x" * 256, "x" * 256]))

    def test_it_looks_back_only(self) -> None:
        """The hidden values of a position do not depend on later bytes."""
        with torch.no_grad():
            long, short = (handler.infer(self.stages[0], [sc.Call(text)])[0].items[0].torch("hidden") for text in ("abcdef", "abc"))
        torch.testing.assert_close(long[:, :3], short)

    def test_places_differ(self) -> None:
        """One block looks back at the same bytes in another order."""
        with torch.no_grad():
            one, other = (out.items[0].torch("hidden")[0, -1] for out in handler.infer(self.stages[0], [sc.Call("abc"), sc.Call("bac")]))
        self.assertFalse(torch.allclose(one, other, atol=1e-3))

    def test_block_is_an_encoder_layer(self) -> None:
        """A block computes what PyTorch's own encoder layer computes, with two heads here."""
        width, inner, length = 2 * handler.HEAD, 96, 7
        theirs = torch.nn.TransformerEncoderLayer(width, 2, inner, dropout=0, activation="gelu", batch_first=True, norm_first=True).eval()
        for p in theirs.parameters():
            torch.nn.init.normal_(p, std=0.1)
        attention = theirs.self_attn
        tensors = {"attention.weight": attention.in_proj_weight, "attention.bias": attention.in_proj_bias}
        for name, module in {"norm1": theirs.norm1, "merge": attention.out_proj, "norm2": theirs.norm2,
                             "inner": theirs.linear1, "outer": theirs.linear2}.items():
            tensors.update({name + ".weight": module.weight, name + ".bias": module.bias})
        ours = handler.Block(width, inner)
        ours.load_state_dict(tensors)
        x, mask = torch.randn(3, length, width), torch.full((length, length), -torch.inf).triu(1)
        torch.testing.assert_close(ours(x, mask), theirs(x, mask), atol=1e-5, rtol=1e-5)

    def test_parameters_are_mapped(self) -> None:
        model = sc.Model(str(Path(self.folder.name, "3.safetensors")))
        tensors = model.torch()
        stage = handler.load(model)
        for name, p in stage.named_parameters():
            self.assertEqual(p.data_ptr(), tensors[name].data_ptr(), name)

    def test_bad_input(self) -> None:
        first, second = self.stages[:2]
        for stage, given, want in [
            (first, "", "an empty text"),
            (first, b"\xff", "want text in UTF-8"),
            (first, torch.zeros(1, 2, WIDTH), "got tensors, want bytes"),
            (second, "text", "want tensors"),
            (second, {"x": torch.zeros(1)}, "no tensor 'hidden'"),
            (second, {"hidden": torch.zeros(1, 2, WIDTH - 1)}, f"[1, 2, {WIDTH - 1}], want float32"),
            (second, {"hidden": torch.zeros(1, 257, WIDTH)}, "1 to 256"),
            (second, {"hidden": torch.zeros(1, 0, WIDTH)}, "1 to 256"),
            (second, {"hidden": torch.zeros(1, 2, WIDTH, dtype=torch.float64)}, "float64"),
        ]:
            good = "a" if stage is first else {"hidden": torch.zeros(1, 2, WIDTH)}
            with torch.no_grad():
                out, bad = handler.infer(stage, [sc.Call(good), sc.Call(given)])
            self.assertIsInstance(out, sc.Output, want)
            self.assertIsInstance(bad, sc.BadInput, want)
            self.assertIn(want, str(bad))

    def test_parameters_that_do_not_fit(self) -> None:
        good = parameters(3)
        for tensors, want in [
            ({}, "blocks []"),
            ({**good, **parameters(5)}, "blocks [3, 5]"),
            ({**good, "more": torch.zeros(1)}, "'more': got F32 [1], want no tensor of that name"),
            ({n: t for n, t in good.items() if not n.endswith("merge.bias")}, "tensor 'blocks.3.merge.bias': got none, want F32 [64]"),
        ]:
            with tempfile.TemporaryDirectory() as folder:
                write(Path(folder, "model.safetensors"), tensors)
                with self.assertRaises((ValueError, sc.StageError)) as raised:
                    handler.load(sc.Model(folder))
            self.assertIn(want, str(raised.exception))


if __name__ == "__main__":
    unittest.main()
