"""Blockwise quantization to 8 bits, as `crates/torch/src/int8.rs` does it. Reads f32 numbers from a file, and writes their bytes to another."""

import sys
from pathlib import Path

import torch

BLOCK = 256
SMALLEST = 1e-30


def encode(block):
    largest = block.abs().max()
    if largest < SMALLEST:
        scale = factor = torch.zeros(())
    else:
        scale, factor = largest / 127, 127 / largest
    # Ties to even.
    return bytes(scale.view(1).view(torch.uint8).tolist() + (block * factor).round().to(torch.int8).view(torch.uint8).tolist())


numbers, encoded = sys.argv[1:]
blocks = torch.frombuffer(bytearray(Path(numbers).read_bytes()), dtype=torch.float32).split(BLOCK)
Path(encoded).write_bytes(b"".join(map(encode, blocks)))
