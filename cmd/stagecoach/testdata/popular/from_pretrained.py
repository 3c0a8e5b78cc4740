"""A model of transformers, which maps its parameters itself."""
from __future__ import annotations

import os

import torch
import transformers

import stagecoach as sc

ARCHITECTURE = getattr(transformers, os.environ["ARCHITECTURE"])  # `from transformers import BertModel`, for example

def load(model: sc.Model) -> torch.nn.Module:
    return ARCHITECTURE.from_pretrained("model").eval()

@sc.each
def infer(net: torch.nn.Module, call: sc.Call) -> dict[str, torch.Tensor]:
    out = net(**{name: call.input.torch(name) for name in call.input.tensors})
    return {"y": out.logits[..., -1:, :] if "logits" in out else out.last_hidden_state}
