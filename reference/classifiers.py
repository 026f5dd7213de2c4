"""Trains a classifier of python/examples with PyTorch, as crates/shardwise/examples/compiled.rs trains its package.

    python classifiers.py MODEL.py PACKAGE IMAGES

PACKAGE has weights.safetensors, IMAGES is the number of images per step. Prints the loss of each step as JSON.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from splitmix import splitmix64

CLASSES, STEPS = 10, 20


def image(number, shape):
    """An image and its class, as `image` in compiled.rs makes them."""
    channels, rows, columns = shape
    label = splitmix64(number) % CLASSES
    places = range(channels * rows * columns)
    pixels = [(splitmix64(number << 32 | place) >> 40) / (1 << 24) + (place // columns % rows % CLASSES == label) for place in places]
    return torch.tensor(pixels, dtype=torch.float32).view(shape), label


def main(path, package, count):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    file = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file)
    model = file.model()
    model.load_state_dict(load_file(package / "weights.safetensors"))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(STEPS):
        images, labels = zip(*(image(step * count + index, tuple(file.inputs.shape[1:])) for index in range(count)))
        loss = file.loss(model(torch.stack(images)), torch.tensor(labels)) / count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(json.dumps(losses))


main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
