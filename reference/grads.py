"""The oracle's loss and gradients: grads.py CONFIG.json IN.safetensors OUT.safetensors

IN holds the parameters by name, and `tokens` and `targets`. OUT gets `loss` (the sum over all tokens that count) and the
gradient of every parameter by name.
"""

import json
import sys

from safetensors.torch import load_file, save_file

from models import FAMILIES

config_file, in_file, out_file = sys.argv[1:]
with open(config_file) as file:
    config = json.load(file)
tensors = load_file(in_file)
tokens, targets = tensors.pop("tokens"), tensors.pop("targets")
for tensor in tensors.values():
    tensor.requires_grad_(True)
loss = FAMILIES[config["family"]](config, tensors).loss(tokens, targets)
loss.backward()
save_file({"loss": loss.detach()[None], **{name: tensor.grad for name, tensor in tensors.items()}}, out_file)
