"""A model of torchvision, of which the function's environment says which."""
from __future__ import annotations

import os

import torch
import torchvision

import stagecoach as sc

MAKE = {
    "resnet18": lambda: torchvision.models.resnet18(weights=None),
    "efficientnet-b0": lambda: torchvision.models.efficientnet_b0(weights=None),
    "faster-rcnn": lambda: torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=5, box_score_thresh=0.0, box_detections_per_img=10),
}


def load(model: sc.Model) -> torch.nn.Module:
    return model.fill(MAKE[os.environ["MODEL"]]())


@sc.each
def infer(net: torch.nn.Module, call: sc.Call) -> dict[str, torch.Tensor]:
    out = net(call.input.torch("x"))
    return {"y": out[0]["boxes"] if isinstance(out, list) else out}
