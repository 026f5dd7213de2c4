"""One PyTorch side of the comparison, under mpirun: train.py SIDE RECIPE ADDRESS [--tensor T]
[--pipeline P --schedule SCHEDULE --split-points UNITS]

SIDE is bare, ddp, zero1 (DDP with ZeroRedundancyOptimizer), fsdp2-keep and fsdp2 (fully_shard without and with resharding
after the forward pass), tensor (tensor and sequence parallelism), fsdp2-tensor (the same, and fully_shard on a second axis of
the mesh), pipeline (torch.distributed.pipelining), or deepspeed-1, -2, -3. With -compiled after ddp and those of FSDP2 and
tensor parallelism, Inductor compiles each block. RECIPE is the recipe that `bench-train` trains, ADDRESS the address of rank 0's
host and a free port on it for the rendezvous. T consecutive ranks share each layer and read the same batch, which the side bare
reads too; T is 1 for the other sides. P ranks hold the stages of a pipeline and read the same batch, which the side bare reads
too. SCHEDULE is 1f1b, interleaved-1f1b or zb-v. UNITS are the units with which PyTorch's stages after the first begin, as
`bench-train split-points` prints them. Prints the lines that `bench-train` prints: a line of JSON for each step, and one at the
end.

The settings are common ones: one unit per block for FSDP2, DeepSpeed's buckets as Hugging Face's "auto" sizes them and its
overlap on, torch's fused AdamW, the libraries' defaults for the rest. bf16 is autocast for DDP, and FSDP2 then reduces in f32;
DeepSpeed reduces in bf16. If the recipe offloads optimizer state, DeepSpeed keeps it on the same disk (ZeRO-Infinity, with its
CPUAdam) and FSDP2 in memory (CPUOffloadPolicy), where it is anyway on a CPU. Tensor parallelism has the placements that
torchtitan uses. A pipeline has two of PyTorch's stages per rank, except for 1F1B; in bf16, it computes with autocast, and its
stages send f32.
"""

import argparse
import contextlib
import json
import os
import time
import tomllib
from pathlib import Path

optimizer_cpu_s = 0.0
RANK, RANKS = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
os.environ.update(RANK=str(RANK), LOCAL_RANK=str(RANK), WORLD_SIZE=str(RANKS))
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from llama import Llama, Stage  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import nn  # noqa: E402


# ---- the same tokens as shardwise_train::data --------------------------------------------------------------------------


def mixed(bits):
    """splitmix64's finalizer."""
    mask = (1 << 64) - 1
    z = (bits + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def micro_batch_count(recipe):
    return recipe["batch"].get("gradient_accumulation_steps", 1)


def batch(recipe, data_rank, data_ranks):
    """The batch of the first step. Every step trains on it, so that the loss changes fast."""
    size, seq_len = recipe["batch"]["micro_batch_size"], recipe["batch"]["seq_len"]
    vocab_size = recipe["model"]["llama"]["vocab_size"]
    firsts = [(index * data_ranks + data_rank) * size for index in range(micro_batch_count(recipe))]
    numbers = [number for first in firsts for number in range(first, first + size)]
    keys = [mixed(recipe["data"].get("seed", 0) ^ mixed(number)) for number in numbers]
    ids = torch.tensor([[mixed(key ^ place) % vocab_size for place in range(seq_len + 1)] for key in keys])
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


# ---- the sides ---------------------------------------------------------------------------------------------------------


def optimizer_of(model, recipe, make=torch.optim.AdamW):
    o = recipe["optimizer"]
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": o["weight_decay"]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    # A stage of a pipeline may consist of the embedding alone.
    groups = [group for group in groups if group["params"]]
    return make(groups, lr=o["lr"], betas=tuple(o["betas"]), eps=o["eps"], fused=True)


def init_mesh(tensor=None):
    """The mesh of all ranks: one axis, or shard and tensor."""
    from torch.distributed.device_mesh import init_device_mesh

    if tensor is None:
        return init_device_mesh("cpu", (RANKS,))
    return init_device_mesh("cpu", (RANKS // tensor, tensor), mesh_dim_names=("shard", "tensor"))


def share_layers(model, mesh):
    """Applies tensor and sequence parallelism to the model, on a mesh with one axis."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    by_tokens = Shard(1)
    gather_tokens = lambda others: PrepareModuleInput(  # noqa: E731
        input_layouts=(by_tokens, *[None] * others), desired_input_layouts=(Replicate(), *[None] * others)
    )
    block_plan = {
        "input_layernorm": SequenceParallel(),
        "self_attn": gather_tokens(others=2),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=by_tokens),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": gather_tokens(others=0),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=by_tokens),
    }
    for block in model.model.layers:
        parallelize_module(block, mesh, block_plan)
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=by_tokens),
        "model.norm": SequenceParallel(),
        # Each rank has the logits of its part of the vocabulary. `loss_parallel` computes the loss from them.
        "lm_head": ColwiseParallel(input_layouts=by_tokens, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    # Both are divided by rows, so they can still be tied.
    model.lm_head.weight = model.model.embed_tokens.weight


def torch_side(side, model, recipe, tensor):
    """Returns a function that takes one step and returns this rank's loss."""
    if side.endswith("-compiled"):
        side = side.removesuffix("-compiled")
        for block in model.model.layers:
            block.compile()
    bf16 = recipe["precision"]["param_dtype"] == "bf16"
    cast = lambda: torch.autocast("cpu", torch.bfloat16, enabled=bf16)  # noqa: E731
    make = torch.optim.AdamW
    loss_context, mesh = contextlib.nullcontext, None
    if side in ("tensor", "fsdp2-tensor"):
        from torch.distributed.tensor.parallel import loss_parallel

        mesh, loss_context = init_mesh(tensor), loss_parallel
        share_layers(model, mesh["tensor"])
    if side in ("ddp", "zero1"):
        model = nn.parallel.DistributedDataParallel(model)
    elif side.startswith("fsdp2"):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
        settings = {"mesh": mesh["shard"] if mesh else init_mesh(), "mp_policy": policy}
        if "offload" in recipe:
            from torch.distributed.fsdp import CPUOffloadPolicy

            # Pinning needs a device.
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        for block in model.model.layers:
            fully_shard(block, **settings, reshard_after_forward=side != "fsdp2-keep")
        # The embedding and the head, which the backward pass needs first: by default they are not resharded.
        fully_shard(model, **settings)
        cast = contextlib.nullcontext
    if side == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        make = lambda groups, **settings: ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **settings)  # noqa: E731
    optimizer, count = optimizer_of(model, recipe, make), micro_batch_count(recipe)
    assert count == 1 or side == "bare", "only bare and pipelines accumulate gradients"

    def step(tokens, targets):
        global optimizer_cpu_s
        losses = []
        for micro_batch in zip(tokens.chunk(count), targets.chunk(count)):
            with loss_context():
                with cast():
                    loss = model(*micro_batch) / count
                loss.backward()
            losses.append(loss.detach())
        before = time.process_time()
        optimizer.step()
        optimizer_cpu_s += time.process_time() - before
        optimizer.zero_grad()
        return sum(loss.item() for loss in losses)

    return step


def stage_indices(schedule):
    """PyTorch's stages on this rank, and their number on all ranks."""
    match schedule:
        case "1f1b":
            return [RANK], RANKS
        case "interleaved-1f1b":
            return [RANK, RANKS + RANK], 2 * RANKS
        case "zb-v":
            return [RANK, 2 * RANKS - 1 - RANK], 2 * RANKS


def load_stages(recipe, folder, schedule, split_points):
    """Creates this rank's stages with the recipe's weights, as a list of stage index and module."""
    shape = recipe["model"]["llama"]
    units = ["embedding", *(f"block.{index}" for index in range(shape["num_hidden_layers"])), "head"]
    cuts = [0, *map(units.index, split_points), len(units)]
    indices, number = stage_indices(schedule)
    assert len(cuts) == number + 1, f"{number} stages need {number - 1} split points"
    stages = []
    with safe_open(folder / recipe["init"]["weights"], framework="pt") as weights:
        for index in indices:
            with torch.device("meta"):
                stage = Stage(shape, units[cuts[index] : cuts[index + 1]])
            stage.load_state_dict({name: weights.get_tensor(name) for name in stage.state_dict()}, assign=True)
            stages.append((index, stage.requires_grad_(True)))
    return stages


def pipeline_side(schedule, recipe, folder, split_points):
    """Returns a function that takes one step. The mean of what it returns on all ranks is the loss."""
    from torch.distributed import pipelining

    bf16 = recipe["precision"]["param_dtype"] == "bf16"
    cast = torch.autocast("cpu", torch.bfloat16, enabled=bf16)
    modules = load_stages(recipe, folder, schedule, split_points)
    optimizer, number = optimizer_of(nn.ModuleList(module for _, module in modules), recipe), stage_indices(schedule)[1]
    # Autocast is for forward passes only, and the schedule calls both.
    for _, module in modules:
        module.forward = cast(module.forward)
    stages = [pipelining.PipelineStage(module, index, number, torch.device("cpu")) for index, module in modules]
    count = micro_batch_count(recipe)
    tokens_per_step = count * recipe["batch"]["micro_batch_size"] * recipe["batch"]["seq_len"]

    def loss_fn(logits, targets):
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum") / tokens_per_step

    # The loss is divided by the tokens of all micro-batches, so gradients are not to be scaled.
    settings = {"n_microbatches": count, "loss_fn": loss_fn, "scale_grads": False}
    match schedule:
        case "1f1b":
            schedule = pipelining.Schedule1F1B(*stages, **settings)
        case "interleaved-1f1b":
            schedule = pipelining.ScheduleInterleaved1F1B(stages, **settings)
        case "zb-v":
            schedule = pipelining.ScheduleZBVZeroBubble(stages, **settings)
    has_first, has_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)

    def step(tokens, targets):
        global optimizer_cpu_s
        losses = []
        inputs = [tokens] if has_first else []
        schedule.step(*inputs, target=targets if has_last else None, losses=losses, return_outputs=False)
        before = time.process_time()
        optimizer.step()
        optimizer_cpu_s += time.process_time() - before
        optimizer.zero_grad()
        # Only the rank of the last stage has losses.
        return RANKS * sum(loss.item() for loss in losses)

    return step


def deepspeed_side(stage, model, recipe, folder):
    import logging

    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    hidden_size = recipe["model"]["llama"]["hidden_size"]
    settings = {
        "train_micro_batch_size_per_gpu": recipe["batch"]["micro_batch_size"],
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "reduce_bucket_size": hidden_size * hidden_size,
            "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
            "stage3_param_persistence_threshold": 10 * hidden_size,
        },
        "bf16": {"enabled": recipe["precision"]["param_dtype"] == "bf16"},
        # The default is to clip at 1.
        "gradient_clipping": 0.0,
        "steps_per_print": None,
    }
    make = torch.optim.AdamW
    if "offload" in recipe:
        make = lambda groups, fused, **common: deepspeed.ops.adam.DeepSpeedCPUAdam(groups, **common)  # noqa: E731
        path = str(folder / recipe["offload"]["optimizer"])
        settings["zero_optimization"]["offload_optimizer"] = {
            "device": "nvme",
            "nvme_path": path,
            "pipeline_read": True,
            "pipeline_write": True,
        }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model, recipe, make), config=settings)

    def step(tokens, targets):
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


# ---- the run -----------------------------------------------------------------------------------------------------------


def field(file, key):
    """Reads a figure of this process from /proc, in bytes."""
    with open(file) as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def reset_peak():
    """Resets the peak, so that only training is measured."""
    Path("/proc/self/clear_refs").write_text("5")


def device_bytes():
    """Bytes sent by all programs over the network device that gloo uses."""
    with open("/proc/net/dev") as lines:
        device = os.environ["GLOO_SOCKET_IFNAME"] + ":"
        return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith(device))


def most(figure):
    """The maximum over all ranks."""
    figure = torch.tensor(figure, dtype=torch.double)
    dist.all_reduce(figure, op=dist.ReduceOp.MAX)
    return figure.item()


def mean(figure):
    figure = torch.tensor(figure / RANKS, dtype=torch.double)
    dist.all_reduce(figure)
    return figure.item()


def load_model(recipe, folder):
    """Creates the model with the recipe's weights."""
    with torch.device("meta"):
        model = Llama(recipe["model"]["llama"])
    weights = load_file(folder / recipe["init"]["weights"])
    is_tied = recipe["model"]["llama"]["tie_word_embeddings"]
    if is_tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    if is_tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.requires_grad_(True)


def main(side, recipe_path, address, tensor, pipeline, schedule, split_points):
    say = lambda line: print(json.dumps(line), flush=True) if RANK == 0 else None  # noqa: E731
    torch.set_num_threads(1)
    recipe = tomllib.loads(recipe_path.read_text())
    steps, warm_up = recipe["run"]["steps"], int(os.environ["SHARDWISE_WARM_UP"])
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=RANK, world_size=RANKS)
    if side == "pipeline":
        step = pipeline_side(schedule, recipe, recipe_path.parent, split_points)
    elif side.startswith("deepspeed-"):
        step = deepspeed_side(int(side[-1]), load_model(recipe, recipe_path.parent), recipe, recipe_path.parent)
    else:
        step = torch_side(side, load_model(recipe, recipe_path.parent), recipe, tensor)
    ready_s = most(time.time() - float(os.environ["SHARDWISE_LAUNCHED"]))
    # The stages of a pipeline are the outermost axis of the mesh.
    stage_ranks = RANKS // pipeline
    tokens, targets = batch(recipe, RANK % stage_ranks // tensor, stage_ranks // tensor)
    reset_peak()
    first = time.perf_counter()
    losses = [step(tokens, targets)]
    first_s = time.perf_counter() - first
    losses += [step(tokens, targets) for _ in range(1, warm_up)]
    dist.barrier()
    started, cpu_started, sent_before = time.perf_counter(), time.process_time(), device_bytes()
    # Back to back, as in training: a step waits for communication that the previous one left running.
    losses += [step(tokens, targets) for _ in range(warm_up, steps)]
    dist.barrier()
    measured = steps - warm_up
    seconds, cpu_s = (time.perf_counter() - started) / measured, (time.process_time() - cpu_started) / measured
    sent = (device_bytes() - sent_before) / RANKS / measured if RANKS > 1 else 0
    for number, loss in enumerate(losses, 1):
        say({"step": number, "loss": mean(loss)})
    end = {
        "ready_seconds": ready_s,
        "step_seconds": most(seconds),
        "compile_seconds": max(0.0, most(first_s) - most(seconds)) if side.endswith("-compiled") else 0.0,
        "cpu_seconds": mean(cpu_s),
        "optimizer_cpu_seconds": mean(optimizer_cpu_s / steps),
        "sent_bytes": sent,
        "peak_bytes": most(field("/proc/self/status", "VmHWM:")),
        "pss_bytes": most(field("/proc/self/smaps_rollup", "Pss:")),
    }
    say(end)
    dist.destroy_process_group()
    # The results are printed. Threads that some frameworks leave behind sometimes abort a process that exits normally.
    os._exit(0)


parser = argparse.ArgumentParser()
parser.add_argument("side")
parser.add_argument("recipe", type=Path)
parser.add_argument("address")
parser.add_argument("--tensor", type=int, default=1)
parser.add_argument("--pipeline", type=int, default=1)
parser.add_argument("--schedule", choices=["1f1b", "interleaved-1f1b", "zb-v"])
parser.add_argument("--split-points", type=lambda points: points.split(","))
arguments = parser.parse_args()
main(
    arguments.side,
    arguments.recipe,
    arguments.address,
    arguments.tensor,
    arguments.pipeline,
    arguments.schedule,
    arguments.split_points,
)
