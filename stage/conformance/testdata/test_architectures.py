"""Tests Model.fill on real architectures: a filled module returns bit for bit what the module
returns whose parameters were saved."""

from __future__ import annotations

import importlib
import os
import tempfile
import unittest
from typing import Any, Callable

try:
    import torch
    from torch import nn
except ImportError as err:
    raise unittest.SkipTest(f"no PyTorch: {err}") from err

import stagecoach as sc
from filling import bits, lies_in, randomize, save

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Makes a module, and returns it with a function that computes with it.
Made = "tuple[nn.Module, Callable[[Any], Any]]"
IDS = [[3, 7, 1, 9, 4], [5, 2, 8, 0, 6]]
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def transformers(config: str, model: str, **options: Any) -> Made:
    t = importlib.import_module("transformers")
    made = getattr(t, model)(getattr(t, config)(**options))

    def run(module: nn.Module) -> Any:
        if "ViT" in model:
            return module(pixel_values=image(32))
        return module(input_ids=torch.tensor(IDS), attention_mask=torch.tensor([[1] * 5, [1, 1, 1, 0, 0]]))

    return made, run


def image(side: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * 3 * side * side).reshape(2, 3, side, side)


def bert() -> Made:
    return transformers("BertConfig", "BertModel", vocab_size=20, **SMALL)


def masked_bert() -> Made:
    """The weights of its decoder are those of its embedding."""
    return transformers("BertConfig", "BertForMaskedLM", vocab_size=20, **SMALL)


def roberta() -> Made:
    return transformers("RobertaConfig", "RobertaModel", vocab_size=20, **SMALL)


def distilbert() -> Made:
    return transformers("DistilBertConfig", "DistilBertModel", vocab_size=20, dim=16, n_layers=2, n_heads=2, hidden_dim=24)


def gpt2() -> Made:
    options = {"vocab_size": 20, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    return transformers("GPT2Config", "GPT2LMHeadModel", **options)


def t5() -> Made:
    return transformers("T5Config", "T5EncoderModel", vocab_size=20, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)


def vit() -> Made:
    return transformers("ViTConfig", "ViTModel", image_size=32, patch_size=8, **SMALL)


def llama() -> Made:
    return transformers("LlamaConfig", "LlamaForCausalLM", vocab_size=20, num_key_value_heads=1, **SMALL)


def tied_llama() -> Made:
    options = {**SMALL, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
    return transformers("LlamaConfig", "LlamaForCausalLM", vocab_size=20, tie_word_embeddings=True, **options)


def resnet() -> Made:
    return importlib.import_module("torchvision").models.resnet18(num_classes=5), lambda m: m(image(64))


def efficientnet() -> Made:
    return importlib.import_module("torchvision").models.efficientnet_b0(num_classes=5), lambda m: m(image(64))


def swin() -> Made:
    """Its tables of relative positions are buffers."""
    made = importlib.import_module("torchvision").models.SwinTransformer([4, 4], 8, [1, 1], [2, 2], [4, 4], num_classes=5)
    return made, lambda m: m(image(64))


def timm_vit() -> Made:
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
    return importlib.import_module("timm").create_model("vit_tiny_patch16_224", **options), lambda m: m(image(32))


def timm_eva() -> Made:
    """Its rotary table is a buffer that is not saved."""
    options = {"img_size": 28, "patch_size": 14, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
    return importlib.import_module("timm").create_model("eva02_tiny_patch14_224", **options), lambda m: m(image(28))


def transformer() -> Made:
    def run(module: nn.Transformer) -> Any:
        x, y = torch.linspace(-1, 1, 2 * 5 * 16).reshape(2, 5, 16), torch.linspace(1, -1, 2 * 3 * 16).reshape(2, 3, 16)
        padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
        mask = module.generate_square_subsequent_mask(3)
        # The second result uses the fast path.
        return module(x, y, tgt_mask=mask), module.encoder(x, src_key_padding_mask=padding)

    return nn.Transformer(16, 2, 2, 2, 24, batch_first=True), run


def lstm() -> Made:
    def run(module: nn.LSTM) -> Any:
        return module(torch.linspace(-1, 1, 2 * 5 * 6).reshape(2, 5, 6))

    return nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True, proj_size=4), run


ARCHITECTURES = [
    *(bert, masked_bert, roberta, distilbert, gpt2, t5, vit, llama, tied_llama),
    *(resnet, efficientnet, swin, timm_vit, timm_eva, transformer, lstm),
]


class Architectures(unittest.TestCase):
    """Each test makes a module twice with different values. It saves the first and fills the second
    from the file."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.addClassCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

    def check(self, make: Callable[[], Made]) -> None:
        try:
            saved, run = make()
        except ModuleNotFoundError as err:
            self.skipTest(f"no package {err.name}")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        with torch.no_grad():
            want = bits(run(randomize(saved.eval())))
        self.assertTrue(want)
        path = save(os.path.join(folder.name, "model.safetensors"), saved.state_dict())
        model = sc.Model(path)

        torch.manual_seed(1)
        with model.empty():
            module, run = make()
        self.assertTrue(all(p.is_meta for p in module.parameters()))
        self.assertFalse(any(b.is_meta for b in module.buffers() if b.numel()))
        self.assertIs(model.fill(module), module)
        self.same(path, saved, module, run, want)

        torch.manual_seed(2)
        module, run = make()
        self.same(path, saved, model.fill(module), run, want)

        if not hasattr(torch.device, "__enter__"):  # before PyTorch 2.0
            return
        try:
            with torch.device("meta"):
                module, run = make()
        except Exception:  # its code needs values, so PyTorch refuses
            return
        try:
            model.fill(module)
        except sc.StageError as err:
            self.assertRegex(str(err), r"on meta, which no file has.*make the module in `with model.empty\(\):`")
            self.assertTrue(all(p.is_meta for p in module.parameters()))
        else:
            self.same(path, saved, module, run, want)

    def test_lora(self) -> None:
        """Uses an adapter on a filled model."""
        try:
            peft = importlib.import_module("peft")
        except ModuleNotFoundError as err:
            self.skipTest(f"no package {err.name}")
        saved, run = llama()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = save(os.path.join(folder.name, "model.safetensors"), randomize(saved).state_dict())
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(saved, config).eval()
        adapted.save_pretrained(os.path.join(folder.name, "adapter"))
        with torch.no_grad():
            want = bits(run(adapted))

        model = sc.Model(path)
        with model.empty():
            base, _ = llama()
        filled = peft.PeftModel.from_pretrained(model.fill(base), os.path.join(folder.name, "adapter")).eval()
        with torch.no_grad():
            self.assertTrue(bits(run(filled)) == want)
            with filled.disable_adapter():
                self.assertFalse(bits(run(filled)) == want)
        parts = dict(filled.named_parameters())
        self.assertFalse([n for n, p in parts.items() if "lora_" not in n and not lies_in(path, p)])
        self.assertTrue([n for n in parts if "lora_" in n])

    def same(self, path: str, saved: nn.Module, module: nn.Module, run: Callable[[Any], Any], want: list[bytes]) -> None:
        tensors = dict(module.named_parameters())
        self.assertFalse([name for name, t in (*tensors.items(), *module.named_buffers()) if t.is_meta])
        self.assertFalse([name for name, t in tensors.items() if t.numel() and not lies_in(path, t)])
        before, after = (m.state_dict(keep_vars=True) for m in (saved, module))
        ties = [(a, b) for a in before for b in before if a < b and before[a] is before[b]]
        self.assertFalse([(a, b) for a, b in ties if after[a] is not after[b]])
        with torch.no_grad():
            got = run(module)
        self.assertTrue(bits(got) == want, "the filled module answers something else")


for _make in ARCHITECTURES:
    setattr(Architectures, f"test_{_make.__name__}", lambda self, make=_make: self.check(make))


if __name__ == "__main__":
    unittest.main()
