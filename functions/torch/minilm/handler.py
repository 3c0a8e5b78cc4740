"""A layer of all-MiniLM-L6-v2 in PyTorch. It computes what ../../minilm/layers computes with ONNX
Runtime, with the same parameters.

Layer n takes the tensors ``hidden.<n-1>`` FP32 [texts, tokens, 384] and ``attention_mask`` INT64
[texts, tokens], and returns ``hidden.<n>`` and the mask. The names of the parameters say which
layer it is. The functions minilm-embed and minilm-pool are before and after the six layers.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

import stagecoach as sc

HEADS = 12
EPSILON = 1e-12
MASK = "attention_mask"

MAX_BATCH = 64  # the annotation stagecoach.dev/batch can only lower it


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


@sc.together
def infer(layer: Layer, items: list[sc.Item]) -> list[Any]:
    """Compute the items of all calls. An item is an already padded batch of texts. Items of similar
    lengths are padded further, and computed as one tensor."""
    out: list[Any] = [None] * len(items)
    inputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for i, item in enumerate(items):
        try:
            inputs[i] = checked(layer, item)
        except sc.BadInput as err:
            out[i] = err
    for group in similar({i: tuple(mask.shape) for i, (_, mask) in inputs.items()}):
        for i, y in zip(group, compute(layer, [inputs[i] for i in group])):
            out[i] = {f"hidden.{layer.number}": y, MASK: inputs[i][1]}
    return out


def checked(layer: Layer, item: sc.Item) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden state and the mask of an item."""
    x, mask = item.torch(f"hidden.{layer.number - 1}"), item.torch(MASK)
    width = len(layer.parameters["output.dense.bias"])
    if x.dtype != torch.float32 or x.dim() != 3 or x.shape[2] != width or mask.dtype != torch.int64 or mask.shape != x.shape[:2]:
        raise sc.BadInput(f"{x.dtype} {list(x.shape)} and {MASK} {mask.dtype} {list(mask.shape)}, "
                          f"want float32 [texts, tokens, {width}] and int64 [texts, tokens]")
    return x, mask


def similar(shapes: dict[int, tuple[int, ...]]) -> list[list[int]]:
    """Group items by length, so that at most a quarter of a group's tokens is padding. shapes are
    [texts, tokens], by item."""
    groups: list[list[int]] = []
    texts = tokens = 0
    for i in sorted(shapes, key=lambda i: shapes[i][1]):
        rows, length = shapes[i]
        texts, tokens = texts + rows, tokens + rows * length
        if not groups or texts * length - tokens > texts * length / 4:
            groups.append([])
            texts, tokens = rows, rows * length
        groups[-1].append(i)
    return groups


def compute(layer: Layer, inputs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Run the layer once for several inputs. Padding is masked, and cut off the outputs."""
    device = layer.parameters["output.dense.bias"].device
    longest = max(mask.shape[1] for _, mask in inputs)
    x = torch.cat([functional.pad(x, (0, 0, 0, longest - x.shape[1])) for x, _ in inputs])
    mask = torch.cat([functional.pad(mask, (0, longest - mask.shape[1])) for _, mask in inputs])
    y = layer(x.to(device), mask.to(device)).cpu()
    parts = y.split([len(x) for x, _ in inputs])
    return [part[:, : x.shape[1]] for part, (x, _) in zip(parts, inputs)]
