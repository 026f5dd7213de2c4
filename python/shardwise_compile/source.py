"""What is compiled: a model, a batch to try it on, and a loss. Reads a user's Python file; Hugging Face is next door."""

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from .errors import CompileError

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass
class Source:
    """A model with f32 parameters, and what it takes to run it and to describe it."""

    model: nn.Module
    run: Callable  # (model, inputs) -> outputs
    loss: Callable  # (outputs, targets) -> the sum over the targets that count
    inputs: torch.Tensor
    targets: torch.Tensor
    units: list[str] | None = None
    # The batch is tokens: other batch sizes and lengths may be tried, to see whether the head works row by row.
    is_text: bool = False
    # Buffers keep the dtype that the model gave them (rotary frequencies of transformers are f32 in a bf16 model).
    keep_buffers: bool = False
    description: dict = field(default_factory=dict)
    initializer_range: float | None = None
    config: dict | None = None
    weights: Callable | None = None  # () -> state dict; None: the values of `model`
    initializations: dict = field(default_factory=dict)  # by parameter


class Program(nn.Module):
    """Model and loss as one module, which is what gets exported. The loss is f32 whatever the model's dtype."""

    def __init__(self, source):
        super().__init__()
        self.net, self.run, self.loss = source.model, source.run, source.loss

    def forward(self, inputs, targets):
        return self.loss(self.run(self.net, inputs), targets).float()


def load_file(path: Path):
    """Runs the user's file and takes `model`, `inputs`, `targets`, `loss` and perhaps `units` from it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    missing = [name for name in ("model", "inputs", "targets", "loss") if not hasattr(module, name)]
    if missing:
        raise CompileError(f"{path} does not define {', '.join(missing)}; see python/examples/ for complete files")
    model = module.model
    if not isinstance(model, nn.Module):
        if not callable(model) or any(p.default is p.empty for p in inspect.signature(model).parameters.values()):
            raise CompileError(f"{path}: `model` must be an nn.Module, or a function without arguments that returns one")
        model = model()
    return Source(
        model=model,
        run=run,
        loss=module.loss,
        inputs=module.inputs,
        targets=module.targets,
        units=getattr(module, "units", None),
        is_text=module.inputs.dtype == torch.int64 and module.inputs.shape == module.targets.shape and module.inputs.dim() == 2,
        description={"architecture": type(model).__name__, "file": path.name},
    )


def run(model, inputs):
    """Batches hold f32; the model computes in its own dtype."""
    dtype = next(model.parameters()).dtype
    return model(inputs.to(dtype) if inputs.is_floating_point() else inputs)


def prepare(source, dtype, device="cpu"):
    """Casts the model, turns dropout off, and refuses what a chain of pure functions cannot do. Ends on the device."""
    model = source.model
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    if frozen:
        raise CompileError(
            f"{frozen[0]} does not require a gradient: make it a buffer, or let it require one and freeze it with model.frozen in the recipe"
        )
    for name, parameter in model.named_parameters():
        source.initializations[name] = initialization(parameter, source.initializer_range)
    # Norms and biases begin with ones and zeros, which would hide from the self-check where they are left out.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if getattr(module, "running_mean", None) is not None:
            raise CompileError(
                f"{name} ({type(module).__name__}) keeps running statistics, which a compiled unit cannot update; "
                "use GroupNorm or LayerNorm"
            )
    if source.keep_buffers:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    else:
        model.to(dtype)
    if source.inputs.is_floating_point():
        source.inputs = source.inputs.float()
    model.train().requires_grad_(True).to(device)
    source.inputs, source.targets = source.inputs.to(device), source.targets.to(device)


def initialization(parameter, initializer_range):
    """How to draw the parameter, judging by the values that the model's own code gave it; "weights" if that cannot be told."""
    values = parameter.detach().float()
    if bool((values == 1).all()):
        return "ones"
    if bool((values == 0).all()):
        return "zeros"
    deviation = values.square().mean().sqrt().item()
    if initializer_range and abs(deviation / initializer_range - 1) < 0.1:
        deviation = initializer_range
    # The fourth moment tells a normal distribution (3) from a uniform one (1.8) or a constant (1). Few values tell nothing.
    spread = (values / deviation).square().square().mean().item()
    if values.numel() < 1000 or abs(values.mean().item()) > 0.2 * deviation or not 2.5 < spread < 3.5:
        return "weights"
    return {"normal": float(f"{deviation:.4g}")}
