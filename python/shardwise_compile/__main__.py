"""shardwise compile: compiles a PyTorch model ahead of time into a package that Shardwise trains without Python."""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from . import hugging_face
from .check import check, check_loss
from .errors import CompileError
from .package import compile_units, write_manifest
from .source import DTYPES, load_file, prepare


# What --weights and --expected write.
EXTRAS = ["weights.safetensors", "batch.safetensors", "gradients.safetensors", "expected.json"]


def parse(arguments):
    parser = argparse.ArgumentParser(prog="shardwise compile", description=__doc__)
    parser.add_argument("model", type=Path, help="Hugging Face folder, config.json, or Python file that defines the model")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the package to")
    parser.add_argument("--micro-batch-size", type=int, help="sequences per micro-batch (Hugging Face)")
    parser.add_argument("--seq-len", type=int, help="tokens per sequence (Hugging Face)")
    parser.add_argument("--dtype", choices=DTYPES, default="f32", help="of parameters and activations")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="what to compile for; a GPU must be present")
    parser.add_argument("--activation-checkpointing", choices=["none", "selective"], default="none")
    parser.add_argument("--chunk-rows", type=int, default=256, help="tokens per chunk of the head, 0 to compute it whole")
    parser.add_argument("--weights", action="store_true", help="also write weights.safetensors with the initial values")
    parser.add_argument("--expected", action="store_true", help="also write weights, batch, loss and gradients of the self-check")
    return parser.parse_args(arguments)


def load(options):
    if options.model.suffix == ".py":
        if options.micro_batch_size is not None or options.seq_len is not None:
            raise CompileError(f"the shape of a micro-batch is that of `inputs` in {options.model}; leave out --micro-batch-size and --seq-len")
        return load_file(options.model)
    if options.micro_batch_size is None or options.seq_len is None:
        raise CompileError("a Hugging Face model needs --micro-batch-size and --seq-len")
    return hugging_face.load(options.model, options.micro_batch_size, options.seq_len)


def named_weights(source):
    """The values to begin with, in f32, under the names in the package. Tied parameters are there once."""
    values = source.weights() if source.weights else dict(source.model.named_parameters())
    return {name: values[name].detach().float().clone() for name, _ in source.model.named_parameters()}


def main(options):
    torch.manual_seed(0)
    started = time.perf_counter()
    say = lambda line: print(f"{time.perf_counter() - started:6.1f} s  {line}", flush=True)  # noqa: E731
    options.out = options.out.resolve()
    check_replaceable(options.out)
    if not options.model.exists():
        raise CompileError(f"{options.model} does not exist")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise CompileError("--device cuda: this machine has no GPU, and PyTorch's compiler tries kernels out on one")
    source, dtype = load(options), DTYPES[options.dtype]
    weights = named_weights(source) if options.weights else None
    prepare(source, dtype, options.device)
    check_loss(source)
    # A package is complete or not there at all.
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out.parent, prefix=".compile-") as folder:
        folder = Path(folder) / "package"
        folder.mkdir()
        package = compile_units(source, folder, options.activation_checkpointing, options.chunk_rows, dtype, say)
        loss_difference, worst, loss, gradients = check(source, package, dtype)
        say(f"self-check: loss off by {loss_difference:.1e}, gradients by at most {worst:.1e}")
        write_manifest(source, package, folder, options)
        if options.expected:
            save_expected(source, loss, gradients, folder)
        elif weights is not None:
            save_file(weights, folder / "weights.safetensors")
        if options.out.exists():
            options.out.rename(folder.with_name("replaced"))
        folder.rename(options.out)
    say(f"wrote {options.out}")
    needs_weights = "weights" in source.initializations.values()
    if options.weights or options.expected:
        say(f'to begin with the model\'s own values: init.weights = "{options.out}/weights.safetensors"')
    elif needs_weights:
        say("its initial values are not a plain distribution: compile with --weights, or set init.weights in the recipe")


def check_replaceable(folder):
    """Only a package is ever replaced, and nothing else that a folder with that name may hold."""
    if not folder.exists():
        return
    try:
        manifest = json.loads((folder / "package.json").read_text())
        files = {"package.json", "config.json", *EXTRAS}
        files |= {part["file"] for each in manifest["functions"] for part in (each["forward"], each["backward"]) if part}
    except (OSError, ValueError, KeyError, TypeError):
        raise CompileError(f"{folder} exists and is not a package; name a new folder, or remove it") from None
    others = sorted(file.name for file in folder.iterdir() if file.name not in files)
    if others:
        raise CompileError(f"{folder} also holds {others[0]}, which would be lost; name a new folder, or move it away")


def save_expected(source, loss, gradients, folder):
    """What a trainer's test compares with: weights and batch of the self-check, and the model's own loss and gradients."""
    weights = {name: parameter.detach().float().cpu() for name, parameter in source.model.named_parameters()}
    save_file(weights, folder / "weights.safetensors")
    save_file({"inputs": source.inputs.cpu(), "targets": source.targets.cpu()}, folder / "batch.safetensors")
    gradients = {name: gradient.contiguous().cpu() for name, gradient in gradients.items() if gradient is not None}
    save_file(gradients, folder / "gradients.safetensors")
    (folder / "expected.json").write_text(json.dumps({"loss": loss.item(), "gradients": "gradients.safetensors"}) + "\n")


if __name__ == "__main__":
    try:
        main(parse(sys.argv[1:]))
    except CompileError as error:
        sys.exit(f"shardwise compile: {error}")
