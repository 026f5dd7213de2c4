"""A small residual convolutional network for 32x32 images. Compile it with: shardwise compile convolutional.py --out FOLDER --weights"""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Two convolutions with a residual connection. GroupNorm, because BatchNorm keeps running statistics."""

    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(4, channels), nn.GroupNorm(4, channels)
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride=stride)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.shortcut(x) + self.norm2(self.conv2(y)))


class ConvolutionalNetwork(nn.Module):
    def __init__(self, channels=16, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.stage1 = Block(channels, channels, stride=1)
        self.stage2 = Block(channels, 2 * channels, stride=2)
        self.stage3 = Block(2 * channels, 4 * channels, stride=2)
        self.head = nn.Linear(4 * channels, classes)

    def forward(self, images):
        x = self.stage3(self.stage2(self.stage1(F.relu(self.stem(images)))))
        return self.head(x.mean((2, 3)))


# ---- what `shardwise compile` needs ------------------------------------------------------------------------------------

model = ConvolutionalNetwork
units = ["stage1", "stage2", "stage3"]
inputs = torch.randn(4, 3, 32, 32)
targets = torch.randint(10, (4,))


def loss(outputs, targets):
    return F.cross_entropy(outputs.float(), targets, ignore_index=-100, reduction="sum")
