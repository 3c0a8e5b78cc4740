"""Measures what a device can do with PyTorch, with and without the SDK, and prints JSON.

`stagecoach bench gpu` compares starts with these figures. The first argument is a verb:

device.py context DEVICE:
    prints the time and the device memory that a new process needs to make a context.

device.py copies DEVICE BYTES:
    prints the seconds to copy BYTES bytes from a pinned buffer, over 1, 2 and 4 streams.

device.py ring DEVICE IMAGE MODEL:
    prints the seconds that the SDK's device module takes to copy the model's parameters.

device.py hold DEVICE:
    makes a context and keeps it until its stdin ends. The verb context starts such processes.

DEVICE is cuda:0 or cpu. With cpu, the same code runs without context, pinned memory and streams.
"""
from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import nullcontext
from typing import Any, Callable

PROCESSES, COPIES, PLACES = 3, 5, 5
# The most bytes to pin. Pinning all bytes of a large model would take longer than all copies.
BUFFER = 1 << 30


def clock(device: str, work: Callable[[], Any]) -> float:
    """The seconds until work is done, on the device too."""
    import torch

    begin = time.monotonic()
    kept = work()  # not freed within what is measured
    if device != "cpu":
        torch.cuda.synchronize()
    took = time.monotonic() - begin
    del kept
    return took


def free(device: str) -> int:
    """The free bytes of the device's memory."""
    import torch

    return 0 if device == "cpu" else torch.cuda.mem_get_info(0)[0]


def hold(device: str) -> None:
    """Import PyTorch, make a context, load libraries of kernels, and print how long each took."""
    begin = time.monotonic()
    import torch

    print(json.dumps(time.monotonic() - begin), flush=True)
    print(json.dumps(clock(device, lambda: torch.zeros(1, device=device))), flush=True)
    sys.stdin.readline()
    ones = torch.ones(64, 64, device=device)
    print(json.dumps(clock(device, lambda: ones @ ones)), flush=True)
    sys.stdin.read()


def context(device: str) -> dict[str, list[float]]:
    """The time and device memory that new processes need to make a context, one per process."""
    import torch

    out: dict[str, list[float]] = {"import_s": [], "context_s": [], "kernels_s": [], "context_bytes": [], "kernels_bytes": []}
    torch.zeros(1, device=device)  # our own is there before
    for _ in range(PROCESSES):
        before = free(device)
        with subprocess.Popen([sys.executable, __file__, "hold", device], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as p:
            out["import_s"].append(json.loads(p.stdout.readline()))
            out["context_s"].append(json.loads(p.stdout.readline()))
            made = free(device)
            p.stdin.write("\n")
            p.stdin.flush()
            out["kernels_s"].append(json.loads(p.stdout.readline()))
            out["context_bytes"].append(before - made)
            out["kernels_bytes"].append(made - free(device))
            p.stdin.close()
    return out


def copies(device: str, size: str) -> dict[str, list[float]]:
    """The seconds to copy size bytes from a pinned buffer, by the number of streams."""
    import torch

    total, on_device = int(size), device != "cpu"
    host = torch.empty(min(total, BUFFER), dtype=torch.uint8, pin_memory=on_device).fill_(1)
    there = torch.empty(total, dtype=torch.uint8, device=device).fill_(0)
    out: dict[str, list[float]] = {}
    for streams in (1, 2, 4) if on_device else (1,):
        own = [torch.cuda.Stream() if on_device else None for _ in range(streams)]

        def copy() -> None:
            for piece in there.split(host.numel()):
                for stream, to, of in zip(own, piece.chunk(streams), host[: piece.numel()].chunk(streams)):
                    with torch.cuda.stream(stream) if on_device else nullcontext():
                        to.copy_(of, non_blocking=True)

        copy()
        out[str(streams)] = [clock(device, copy) for _ in range(COPIES)]
    if there[-1].item() != 1:
        sys.exit("the copy has not arrived")
    return out


def ring(device: str, image: str, path: str) -> dict[str, list[float]]:
    """The seconds to copy a stage's parameters from the mapped file to the device, as in a replica.

    The first copy is not counted, because it allocates memory.
    """
    sys.path.insert(0, image)
    import handler
    import stagecoach
    from stagecoach.device import Device

    own = Device(device, keep=True)
    own.ready()
    model = stagecoach.Model(path)
    took = []
    for _ in range(1 + PLACES):
        stage = handler.load(model)
        took.append(clock(device, lambda: own.place(stage)))
        del stage  # it is the one on the device
    return {"seconds": took[1:]}


if __name__ == "__main__":
    result = {"context": context, "copies": copies, "ring": ring, "hold": hold}[sys.argv[1]](*sys.argv[2:])
    if result is not None:
        print(json.dumps(result))
