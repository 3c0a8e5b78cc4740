"""A model of timm."""
from __future__ import annotations

import timm
import torch

import stagecoach as sc


def load(model: sc.Model) -> torch.nn.Module:
    return model.fill(timm.create_model("vit_tiny_patch16_224", pretrained=False, img_size=32, num_classes=5))


@sc.each
def infer(net: torch.nn.Module, call: sc.Call) -> dict[str, torch.Tensor]:
    return {"y": net(call.input.torch("x"))}
