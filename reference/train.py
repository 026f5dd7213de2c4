"""The oracle as a trainer: train.py CONFIG.json IN.safetensors

IN holds the initial parameters by name, and `tokens` and `targets` of all steps (steps, sequences, positions). One process, one
batch per step, torch's own AdamW. Prints for each step the mean loss of the tokens that count and the norm of all gradients
before clipping.
"""

import json
import sys

import torch
from safetensors.torch import load_file

from models import FAMILIES, IGNORED

config_file, in_file = sys.argv[1:]
with open(config_file) as file:
    config = json.load(file)
torch.set_num_threads(1)
tensors = load_file(in_file)
tokens, targets = tensors.pop("tokens"), tensors.pop("targets")
for tensor in tensors.values():
    tensor.requires_grad_(True)
model = FAMILIES[config["family"]](config, tensors)
adamw = config["adamw"]
# Weight decay is for matrices.
groups = [
    {"params": [t for t in tensors.values() if t.dim() >= 2], "weight_decay": adamw["weight_decay"]},
    {"params": [t for t in tensors.values() if t.dim() < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=adamw["rate"], betas=(adamw["beta1"], adamw["beta2"]), eps=adamw["epsilon"])
for step_tokens, step_targets in zip(tokens, targets):
    optimizer.zero_grad()
    loss = model.loss(step_tokens, step_targets) / (step_targets != IGNORED).sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(list(tensors.values()), config["clip_norm"])
    optimizer.step()
    print(loss.item(), norm.item())
