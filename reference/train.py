"""The oracle as a trainer: train.py RUN…

Each RUN is a folder with `config.json` (model, optimizer, clipping, loss scale) and `in.safetensors`: the initial parameters by
name in f32, or in f64 if `dtype` is float64, and `tokens` and `targets` of all steps (steps, sequences, positions). One process, one
batch per step, torch's own AdamW, SGD and GradScaler, and the LAMB of lamb.py.

Prints a line for each step of each run: the mean loss of the tokens that count, the norm of all gradients after unscaling and
before clipping, the loss scale, and 1 if the update was skipped or 0 if it was made.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from lamb import Lamb
from models import FAMILIES, IGNORED


def make_optimizer(config: dict, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    # Weight decay is for matrices.
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config["weight_decay"]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    if config["kind"] == "sgd":
        return torch.optim.SGD(groups, lr=config["lr"], momentum=config["momentum"])
    adaptive = {"adamw": torch.optim.AdamW, "lamb": Lamb}[config["kind"]]
    return adaptive(groups, lr=config["lr"], betas=(config["beta1"], config["beta2"]), eps=config["eps"])


def clip(parameters: list[torch.Tensor], largest: float) -> torch.Tensor:
    """Scales gradients down to a norm of `largest`, and returns their norm before. Unlike torch's clip_grad_norm_ it does not add
    1e-6 to the norm, which would shorten every step of SGD by a few millionths."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    for p in parameters:
        p.grad *= min(1.0, largest / norm.item())
    return norm


def make_biases(model: dict) -> dict:
    """What is added to the scores of experts when tokens choose, by name, if the model has it."""
    moe = model.get("moe") or {}
    if not moe.get("router_bias_update_rate"):
        return {}
    layers = range(model["num_hidden_layers"])
    return {f"model.layers.{i}.mlp.gate.e_score_correction_bias": torch.zeros(moe["num_experts"]) for i in layers}


def train(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    masters = load_file(folder / "in.safetensors")
    tokens, targets = masters.pop("tokens"), masters.pop("targets")
    parameters = [master.requires_grad_(True) for master in masters.values()]
    optimizer = make_optimizer(config["optimizer"], parameters)
    biases = make_biases(config["model"])
    # Without settings it is disabled: the scale is 1, and no step is skipped.
    scaler = torch.amp.GradScaler("cpu", enabled=config["loss_scale"] is not None, **(config["loss_scale"] or {}))
    for step_tokens, step_targets in zip(tokens, targets):
        optimizer.zero_grad()
        # The model computes in `dtype`. Autograd casts the gradients back, so those of the masters are f32 (f64 for float64).
        computed = {name: master.to(getattr(torch, config["dtype"])) for name, master in masters.items()}
        model = FAMILIES[config["model"]["family"]](config["model"], computed | biases)
        loss = model.loss(step_tokens, step_targets) / (step_targets != IGNORED).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip(parameters, config["max_grad_norm"])
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        # The scale falls after a step that was skipped, and after no other.
        is_skipped = scaler.get_scale() < scale
        if biases and not is_skipped:
            for bias, counts in zip(biases.values(), model.expert_tokens):
                bias += config["model"]["moe"]["router_bias_update_rate"] * (counts.double().mean() - counts).sign().float()
        print(loss.item(), norm.item(), scale, int(is_skipped))


torch.set_num_threads(1)
for run in sys.argv[1:]:
    train(Path(run))
