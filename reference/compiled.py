"""Trains a model of Hugging Face's transformers on the random tokens of a recipe, as `shardwise train` trains its package.

    python compiled.py PACKAGE RECIPE STEPS EXPORTED

PACKAGE has config.json and weights.safetensors, RECIPE the batch and AdamW's settings, EXPORTED what `shardwise checkpoint export` wrote after the last
step. Prints JSON: the loss of each step, and the loss of both models on the batch after the last one. EXPORTED must have all parameters and no other.
"""

import json
import os
import sys
import tomllib
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from splitmix import splitmix64  # noqa: E402


def batch(recipe, vocab_size, step):
    size, seq_len, seed = recipe["batch"]["global_batch_size"], recipe["batch"]["seq_len"], recipe["data"].get("seed", 0)
    keys = [splitmix64(seed ^ splitmix64(index)) for index in range(step * size, (step + 1) * size)]
    ids = torch.tensor([[splitmix64(key ^ place) % vocab_size for place in range(seq_len + 1)] for key in keys])
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def model_class(config):
    is_masked = config.architectures[0].endswith("MaskedLM")
    return transformers.AutoModelForMaskedLM if is_masked else transformers.AutoModelForCausalLM


def loss_of(model, tokens, targets):
    logits = model(input_ids=tokens).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def main(package, recipe, steps, exported):
    recipe = tomllib.loads(recipe.read_text())
    config = transformers.AutoConfig.from_pretrained(package)
    model = model_class(config).from_config(config).float().eval()
    weights = load_file(package / "weights.safetensors")
    left_out = model.load_state_dict(weights, strict=False)
    assert not left_out.unexpected_keys, left_out
    model.tie_weights()
    settings = recipe["optimizer"]
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": settings["weight_decay"]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings["lr"], betas=tuple(settings["betas"]), eps=settings["eps"])
    losses = []
    for step in range(steps):
        loss = loss_of(model, *batch(recipe, config.vocab_size, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    read, about = model_class(config).from_pretrained(exported, dtype=torch.float32, output_loading_info=True)
    assert not about["missing_keys"] and not about["unexpected_keys"], about
    with torch.no_grad():
        after = [loss_of(each.eval(), *batch(recipe, config.vocab_size, steps)).item() for each in (model, read)]
    print(json.dumps({"losses": losses, "after": after}))


main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
