"""A stage of a decoder whose tokens are bytes. The decoder is cut between its blocks into as many
stages as there are files.

The names of the parameters say what a stage does. The stage with ``embedding`` takes text, and the
stage with ``head`` answers with the most likely next bytes. Between them, FP32 ``hidden`` [1,
bytes, width] goes from stage to stage. A stage with all parameters is the whole model. ../synthetic
makes the parameters, which are random numbers.
"""
from __future__ import annotations

import math
from typing import Mapping

import torch
from torch import nn
from torch.nn import functional

import stagecoach as sc

MAX_BATCH = 8
CONTEXT = 256  # bytes of a text that count: the last ones
HEAD = 64  # width of a head of attention
TOP = 5  # bytes per answer


class Block(nn.Module):
    """Attention to earlier bytes, and a network. Each adds to its normalised input."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.inner = nn.Linear(width, inner)
        self.outer = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """x: [texts, bytes, width]; mask: [bytes, bytes], which is added to the attention
        scores."""
        texts, length, width = x.shape
        heads = self.attention(self.norm1(x)).view(texts, length, 3, width // HEAD, HEAD)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        weights = torch.softmax(query @ key.transpose(-1, -2) / math.sqrt(HEAD) + mask, -1)
        x = x + self.merge((weights @ value).transpose(1, 2).reshape(x.shape))
        return x + self.outer(functional.gelu(self.inner(self.norm2(x))))


class Stage(nn.Module):
    """The part of the model that a set of parameters belongs to."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        numbers = sorted({int(name.split(".")[1]) for name in tensors if name.startswith("blocks.")})
        if not numbers or numbers != list(range(numbers[0], numbers[-1] + 1)):
            raise ValueError(f"blocks {numbers}, want some that follow each other: is each file of the model there?")
        inner, width = tensors[f"blocks.{numbers[0]}.inner.weight"].shape
        self.width = width
        self.blocks = nn.ModuleDict({str(n): Block(width, inner) for n in numbers})
        self.embedding = nn.Embedding(256, width) if "embedding.weight" in tensors else None
        self.norm = nn.LayerNorm(width) if "norm.weight" in tensors else None
        self.head = nn.Linear(width, 256) if "head.weight" in tensors else None
        self.to(tensors[f"blocks.{numbers[0]}.inner.weight"].dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the stage's blocks. In the first stage, x is bytes [texts, bytes]; in the
        others, it is hidden [texts, bytes, width]. The last stage returns the logarithms of the
        probabilities of each next byte, [texts, 256]; the others return hidden."""
        if self.embedding is not None:
            x = self.embedding(x) + places(x.shape[1], self.width, x.device)
        any_block = next(iter(self.blocks.values()))
        x = x.to(any_block.inner.weight.dtype)
        mask = torch.full((x.shape[1], x.shape[1]), -math.inf, dtype=x.dtype, device=x.device).triu(1)
        for block in self.blocks.values():
            x = block(x, mask)
        if self.head is not None:
            x = self.head(self.norm(x[:, -1])).log_softmax(-1)
        return x.float()


def places(length: int, width: int, device: torch.device) -> torch.Tensor:
    """Return the position encoding: sines and cosines [length, width] (Vaswani et al. 2017)."""
    rates = torch.exp(torch.arange(0, width, 2, device=device) * (-math.log(10_000) / width))
    angles = torch.arange(length, device=device)[:, None] * rates
    return torch.stack((angles.sin(), angles.cos()), -1).view(length, width)


def load(model: sc.Model) -> nn.Module:
    """Make the stage from the parameters, which stay in the mapped file."""
    with model.empty():
        stage = Stage(model.torch())
    return model.fill(stage)


def infer(stage: nn.Module, calls: list[sc.Call]) -> list[sc.Output | Exception]:
    """Compute inputs of the same length together, whichever calls they are from."""
    results: list[list | Exception] = []
    rows: dict[int, list[tuple[int, int, torch.Tensor]]] = {}  # by length: call, item, input
    for i, call in enumerate(calls):
        try:
            call.check()
            inputs = [read(stage, item) for item in call.items]
        except Exception as err:
            results.append(err)
            continue
        results.append([None] * len(inputs))
        for j, x in enumerate(inputs):
            rows.setdefault(x.shape[1], []).append((i, j, x))
    device = next(stage.parameters()).device
    for same in rows.values():
        out = stage(torch.cat([x for _, _, x in same]).to(device)).cpu()
        for (i, j, _), y in zip(same, out.split(1)):
            results[i][j] = answer(stage, y)
    return [r if isinstance(r, Exception) else sc.Output(*r) for r in results]


def read(stage: Stage, item: sc.Item) -> torch.Tensor:
    """Return the stage's input from an item."""
    if stage.embedding is not None:
        text = item.text().encode()[-CONTEXT:]
        if not text:
            raise sc.BadInput("an empty text, want at least a byte")
        return torch.tensor([list(text)])
    x = item.torch("hidden")
    if x.dtype != torch.float32 or x.dim() != 3 or x.shape[0] != 1 or not 1 <= x.shape[1] <= CONTEXT or x.shape[2] != stage.width:
        raise sc.BadInput(f"hidden {x.dtype} {list(x.shape)}, want float32 [1, 1 to {CONTEXT}, {stage.width}]")
    return x


def answer(stage: Stage, y: torch.Tensor) -> dict:
    """Make an item from the stage's output for a text."""
    if stage.head is None:
        return {"hidden": y}
    likely = y[0].exp().topk(TOP)
    return {
        "next": [{"byte": b, "probability": round(p, 6)} for b, p in zip(likely.indices.tolist(), likely.values.tolist())],
        "synthetic": "random parameters: this model has learnt nothing",
    }
