"""A layer of all-MiniLM-L6-v2 in PyTorch. It computes what ../../minilm/layers computes with ONNX
Runtime, with the same parameters.

Layer n takes the tensors ``hidden.<n-1>`` FP32 [texts, tokens, 384] and ``attention_mask`` INT64
[texts, tokens], and returns ``hidden.<n>`` and the mask. The names of the parameters say which
layer it is. The functions minilm-embed and minilm-pool are before and after the six layers.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

import stagecoach as sc

HEADS = 12
EPSILON = 1e-12
MASK = "attention_mask"


@dataclass
class Layer:
    """A post-norm encoder layer (Devlin et al. 2019). Its parameters may be in any memory, such as
    a mapped file."""

    number: int  # starts at 1
    parameters: dict[str, torch.Tensor]

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor]) -> Layer:
        """Return the layer of tensors with the published names:
        encoder.layer.0.attention.self.query.weight, ..."""
        numbers = {name.split(".")[2] for name in tensors if name.startswith("encoder.layer.")}
        if len(numbers) != 1:
            raise ValueError(f"layers {sorted(numbers)}, want the parameters of one")
        [number] = numbers
        prefix = f"encoder.layer.{number}."
        return cls(int(number) + 1, {name[len(prefix):]: t for name, t in tensors.items() if name.startswith(prefix)})

    def to(self, device: str) -> Layer:
        """Return the layer on a device."""
        return Layer(self.number, {name: t.to(device) for name, t in self.parameters.items()})

    def __call__(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """x: [texts, tokens, width]; mask: [texts, tokens], 1 for a token and 0 for padding."""
        texts, tokens, width = x.shape

        def heads(name: str) -> torch.Tensor:
            return self.linear(f"attention.self.{name}", x).view(texts, tokens, HEADS, -1).transpose(1, 2)

        far = (mask[:, None, None, :].to(x.dtype) - 1) * 1e9
        weights = torch.softmax(heads("query") @ heads("key").transpose(-1, -2) / math.sqrt(width // HEADS) + far, -1)
        attended = (weights @ heads("value")).transpose(1, 2).reshape(x.shape)
        x = self.norm("attention.output.LayerNorm", self.linear("attention.output.dense", attended) + x)
        inner = functional.gelu(self.linear("intermediate.dense", x))
        return self.norm("output.LayerNorm", self.linear("output.dense", inner) + x)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.parameters[name + ".weight"], self.parameters[name + ".bias"])

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], self.parameters[name + ".weight"], self.parameters[name + ".bias"], EPSILON)


def load(model: sc.Model) -> Layer:
    """Make the layer from the parameters, which stay in the mapped file."""
    return Layer.of(model.torch())


def place(layer: Layer, replica: sc.Replica) -> Layer:
    """Move the parameters to the replica's device."""
    return layer if replica.device == "cpu" else layer.to(replica.device)


@sc.each
def infer(layer: Layer, call: sc.Call) -> sc.Output:
    """Compute each item of a call. An item is an already padded batch of texts."""
    return sc.Output(*(compute(layer, item) for item in call.items))


def compute(layer: Layer, item: sc.Item) -> dict[str, torch.Tensor]:
    x, mask = item.torch(f"hidden.{layer.number - 1}"), item.torch(MASK)
    width = len(layer.parameters["output.dense.bias"])
    if x.dtype != torch.float32 or x.dim() != 3 or x.shape[2] != width or mask.dtype != torch.int64 or mask.shape != x.shape[:2]:
        raise sc.BadInput(f"{x.dtype} {list(x.shape)} and {MASK} {mask.dtype} {list(mask.shape)}, "
                          f"want float32 [texts, tokens, {width}] and int64 [texts, tokens]")
    device = layer.parameters["output.dense.bias"].device
    return {f"hidden.{layer.number}": layer(x.to(device), mask.to(device)).cpu(), MASK: mask}
