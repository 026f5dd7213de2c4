"""A small vision transformer that classifies 32x32 images. Compile it with: shardwise compile vision_transformer.py --out FOLDER --weights"""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, hidden_size, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.qkv, self.out = nn.Linear(hidden_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)
        self.up, self.down = nn.Linear(hidden_size, 4 * hidden_size), nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, x):
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class VisionTransformer(nn.Module):
    def __init__(self, hidden_size=64, layers=3, heads=4, patch=8, classes=10):
        super().__init__()
        self.patches = nn.Conv2d(3, hidden_size, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, hidden_size))
        self.positions = nn.Parameter(torch.randn(1, 1 + (32 // patch) ** 2, hidden_size) * 0.02)
        self.blocks = nn.ModuleList(Block(hidden_size, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden_size), nn.Linear(hidden_size, classes)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


# ---- what `shardwise compile` needs ------------------------------------------------------------------------------------

model = VisionTransformer
inputs = torch.randn(4, 3, 32, 32)
targets = torch.randint(10, (4,))


def loss(outputs, targets):
    return F.cross_entropy(outputs.float(), targets, ignore_index=-100, reduction="sum")
