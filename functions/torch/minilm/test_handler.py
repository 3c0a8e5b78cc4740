"""Tests with real PyTorch, against PyTorch's own encoder layer. ../torch_test.go compares the
trained layers."""
from __future__ import annotations

import unittest
from unittest import mock

import torch

import handler
import stagecoach as sc

WIDTH, INNER = 48, 80


def layer(number: int = 3) -> tuple[handler.Layer, torch.nn.TransformerEncoderLayer]:
    """Return a random layer as the handler's class and as PyTorch's own."""
    theirs = torch.nn.TransformerEncoderLayer(WIDTH, handler.HEADS, INNER, dropout=0, activation="gelu", batch_first=True,
                                              layer_norm_eps=handler.EPSILON).eval()
    query, key, value = theirs.self_attn.in_proj_weight.detach().chunk(3)
    biases = torch.randn(3 * WIDTH)
    theirs.self_attn.in_proj_bias.data.copy_(biases)
    modules = {"attention.output.dense": theirs.self_attn.out_proj, "attention.output.LayerNorm": theirs.norm1,
               "intermediate.dense": theirs.linear1, "output.dense": theirs.linear2, "output.LayerNorm": theirs.norm2}
    tensors = {}
    for name, weight, bias in zip(("query", "key", "value"), (query, key, value), biases.chunk(3)):
        tensors[f"attention.self.{name}.weight"], tensors[f"attention.self.{name}.bias"] = weight, bias
    for name, module in modules.items():
        module.bias.data.copy_(torch.randn(module.bias.shape))
        tensors[name + ".weight"], tensors[name + ".bias"] = module.weight.detach(), module.bias.detach()
    return handler.Layer.of({f"encoder.layer.{number - 1}.{name}": t for name, t in tensors.items()}), theirs


class TestLayer(unittest.TestCase):
    """The layers have twelve heads of width 4."""

    def setUp(self) -> None:
        torch.manual_seed(1)
        torch.set_num_threads(1)

    def test_layer_equals_the_encoder_layer_of_pytorch(self) -> None:
        ours, theirs = layer()
        x, mask = torch.randn(2, 7, WIDTH), torch.ones(2, 7, dtype=torch.int64)
        mask[1, 5:] = 0
        item = sc.Item(tensors={"hidden.2": x, "attention_mask": mask})
        with torch.enable_grad():  # without gradients, PyTorch uses another, faster path
            want = theirs(x, src_key_padding_mask=mask == 0).detach()
        [out] = handler.infer(ours, [sc.Call(item)])
        got = out.items[0]
        torch.testing.assert_close(got.torch("hidden.3")[mask == 1], want[mask == 1], atol=1e-5, rtol=1e-5)
        self.assertTrue(torch.equal(got.torch("attention_mask"), mask))
        self.assertEqual(sorted(got.tensors), ["attention_mask", "hidden.3"])

    def test_each_item_of_a_call(self) -> None:
        ours, _ = layer(1)
        items = [sc.Item(tensors={"hidden.0": torch.randn(1, n, WIDTH), "attention_mask": torch.ones(1, n, dtype=torch.int64)}) for n in (3, 5)]
        [out] = handler.infer(ours, [sc.Call([sc.Part("", items)])])
        self.assertEqual([it.torch("hidden.1").shape[1] for it in out.items], [3, 5])

    def test_calls_run_as_one_tensor(self) -> None:
        ours, _ = layer(1)
        given = [(1, 8), (2, 3), (1, 7), (3, 8), (1, 6)]
        items = [sc.Item(tensors={"hidden.0": torch.randn(texts, n, WIDTH), "attention_mask": torch.ones(texts, n, dtype=torch.int64)}) for texts, n in given]
        alone = [handler.infer(ours, [sc.Call(item)])[0].items[0].torch("hidden.1") for item in items]
        runs = []
        compute = ours.__call__
        with mock.patch.object(handler.Layer, "__call__", lambda self, x, mask: (runs.append(tuple(x.shape[:2])), compute(x, mask))[1]):
            together = handler.infer(ours, [sc.Call(item) for item in items])
        # With the short item, more than a quarter of the run would be padding.
        self.assertEqual(runs, [(2, 3), (6, 8)])
        for a, b in zip(alone, together):
            torch.testing.assert_close(b.items[0].torch("hidden.1"), a, atol=1e-5, rtol=1e-5)

    def test_bad_input(self) -> None:
        ours, _ = layer()
        x, mask = torch.zeros(1, 2, WIDTH), torch.ones(1, 2, dtype=torch.int64)
        for given, want in [
            ("text", "want tensors"),
            ({"hidden.1": x, "attention_mask": mask}, "no tensor 'hidden.2'"),
            ({"hidden.2": x}, "no tensor 'attention_mask'"),
            ({"hidden.2": x[..., 1:], "attention_mask": mask}, f"[1, 2, {WIDTH - 1}]"),
            ({"hidden.2": x[0], "attention_mask": mask}, "want float32"),
            ({"hidden.2": x.double(), "attention_mask": mask}, "float64"),
            ({"hidden.2": x, "attention_mask": mask[:, 1:]}, "attention_mask torch.int64 [1, 1]"),
            ({"hidden.2": x, "attention_mask": mask.float()}, "attention_mask torch.float32"),
        ]:
            good, bad = handler.infer(ours, [sc.Call({"hidden.2": x, "attention_mask": mask}), sc.Call(given)])
            self.assertIsInstance(good, sc.Output, want)
            self.assertIsInstance(bad, sc.BadInput, want)
            self.assertIn(want, str(bad))

    def test_parameters_of_one_layer(self) -> None:
        for names in ([], ["encoder.layer.0.x", "encoder.layer.1.x"]):
            with self.assertRaisesRegex(ValueError, "want the parameters of one"):
                handler.Layer.of({name: torch.zeros(1) for name in names})


if __name__ == "__main__":
    unittest.main()
