"""One PyTorch side of the comparison, under mpirun: train.py SIDE RECIPE STORE

SIDE is bare, ddp, zero1 (DDP with ZeroRedundancyOptimizer), fsdp2-keep and fsdp2 (fully_shard without and with resharding
after the forward pass), or deepspeed-1, -2, -3. RECIPE is the recipe that `bench-train` trains, STORE a file that does not
exist yet, by which ranks find each other. Prints the lines that `bench-train` prints: one of JSON for each step, and one at
the end.

Settings are those that people get: each library's defaults, torch's fused AdamW, one unit per block for FSDP2; gradients reduced
in f32 where that can be said.
"""

import contextlib
import json
import os
import sys
import time
import tomllib
from pathlib import Path

RANK, RANKS = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
os.environ.update(RANK=str(RANK), LOCAL_RANK=str(RANK), WORLD_SIZE=str(RANKS))
# What a side without DeepSpeed does not need, it does not load: the first step is not to wait for it.
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from llama import Llama  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import nn  # noqa: E402


# ---- the same tokens as shardwise_train::data --------------------------------------------------------------------------


def mixed(bits):
    """splitmix64's finaliser."""
    mask = (1 << 64) - 1
    z = (bits + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def batch(recipe, step):
    sequences, positions = recipe["batch"]["sequences"], recipe["batch"]["positions"]
    vocabulary = recipe["model"]["llama"]["vocabulary"]
    first = ((step - 1) * RANKS + RANK) * sequences
    keys = [mixed(recipe["data"].get("seed", 0) ^ mixed(number)) for number in range(first, first + sequences)]
    ids = torch.tensor([[mixed(key ^ place) % vocabulary for place in range(positions + 1)] for key in keys])
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


# ---- the sides ---------------------------------------------------------------------------------------------------------


def optimizer_of(model, recipe, make=torch.optim.AdamW):
    o = recipe["optimizer"]
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": o["weight_decay"]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return make(groups, lr=o["rate"], betas=tuple(o["betas"]), eps=o["epsilon"], fused=True)


def torch_side(side, model, recipe):
    """A function that makes one step and returns this rank's loss."""
    bf16 = recipe["precision"]["parameters"] == "bf16"
    cast = lambda: torch.autocast("cpu", torch.bfloat16, enabled=bf16)  # noqa: E731
    make = torch.optim.AdamW
    if side in ("ddp", "zero1"):
        model = nn.parallel.DistributedDataParallel(model)
    elif side.startswith("fsdp2"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
        settings = {"mesh": init_device_mesh("cpu", (RANKS,)), "mp_policy": policy}
        for block in model.model.layers:
            fully_shard(block, **settings, reshard_after_forward=side == "fsdp2")
        # The embedding and the head, which the backward pass needs first: they stay, by default.
        fully_shard(model, **settings)
        cast = contextlib.nullcontext
    if side == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        make = lambda groups, **settings: ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **settings)  # noqa: E731
    optimizer = optimizer_of(model, recipe, make)

    def step(tokens, targets):
        with cast():
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def deepspeed_side(stage, model, recipe):
    import logging

    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    settings = {
        "train_micro_batch_size_per_gpu": recipe["batch"]["sequences"],
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": recipe["precision"]["parameters"] == "bf16"},
        "steps_per_print": None,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model, recipe), config=settings)

    def step(tokens, targets):
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


# ---- the run -----------------------------------------------------------------------------------------------------------


def field(file, key):
    """A figure of this process's in bytes, as the system counts it."""
    with open(file) as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def loopback_bytes():
    """What all programs have sent over the loopback device, which is where gloo sends."""
    with open("/proc/net/dev") as lines:
        return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


def most(*figures):
    """The greatest of all ranks."""
    figures = torch.tensor(figures, dtype=torch.double)
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    return figures.tolist()


def mean(figure):
    figure = torch.tensor(figure / RANKS, dtype=torch.double)
    dist.all_reduce(figure)
    return figure.item()


def main(side, recipe_path, store):
    say = lambda line: print(json.dumps(line), flush=True) if RANK == 0 else None  # noqa: E731
    torch.set_num_threads(1)
    recipe = tomllib.loads(recipe_path.read_text())
    steps = recipe["run"]["steps"]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=RANK, world_size=RANKS)
    model = Llama(recipe["model"]["llama"])
    weights = load_file(recipe_path.parent / recipe["start"]["weights"])
    model.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    del weights
    if side.startswith("deepspeed-"):
        step = deepspeed_side(int(side[-1]), model, recipe)
    else:
        step = torch_side(side, model, recipe)
    launched = float(os.environ["SHARDWISE_LAUNCHED"])
    (ready_s,) = most(time.time() - launched)
    for number in range(1, steps + 1):
        tokens, targets = batch(recipe, number)
        dist.barrier()
        started, cpu_started, sent_before = time.perf_counter(), time.process_time(), loopback_bytes()
        loss = step(tokens, targets)
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        dist.barrier()
        sent = (loopback_bytes() - sent_before) / RANKS if RANKS > 1 else 0
        say({"step": number, "loss": mean(loss), "seconds": most(seconds)[0], "cpu_seconds": mean(cpu_s), "sent_bytes": sent})
    peak, pss = most(field("/proc/self/status", "VmHWM:"), field("/proc/self/smaps_rollup", "Pss:"))
    say({"ready_seconds": ready_s, "peak_bytes": peak, "pss_bytes": pss})
    dist.destroy_process_group()


main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
