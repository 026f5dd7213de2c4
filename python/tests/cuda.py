"""Cuts models for a GPU where there is none, which is as far as PyTorch goes without one: python cuda.py [NAME ...]

The tensors are fake: they have a device and no memory. So this shows that the tool keeps everything on the GPU when it exports and
cuts a model. The next step, deriving the backward pass, asks PyTorch for the device, and its compiler tries kernels out on it.
"""

import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import torch  # noqa: E402
from graphs import load  # noqa: E402
from shardwise_compile import source  # noqa: E402
from shardwise_compile.cut import cut  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402


def fake_on_gpu(made, mode):
    """Replaces the values of a model and its batch by fake ones on a GPU."""

    def fake(value):
        with mode:
            return torch.empty(value.shape, dtype=value.dtype, device="cuda")

    replaced = {}
    for module in made.model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                module._parameters[name] = replaced.setdefault(id(value), nn.Parameter(fake(value)))
        for name, value in module._buffers.items():
            if value is not None:
                module._buffers[name] = fake(value)
    made.inputs, made.targets = fake(made.inputs), fake(made.targets)


def main(models):
    for model in models or ["llama", "qwen3", "gpt2", "vision_transformer.py", "convolutional.py"]:
        with tempfile.TemporaryDirectory() as folder:
            made = load(model, Path(folder))
        source.prepare(made, torch.bfloat16)
        fake_on_gpu(made, FakeTensorMode())
        units = cut(made, made.inputs, made.targets)
        values = [node.meta["val"] for unit in units for node in unit.graph.graph.nodes if "val" in node.meta]
        devices = {value.device.type for value in values if isinstance(value, torch.Tensor) and value.dim() > 0}
        assert devices == {"cuda"}, f"{model}: {devices}"
        print(f"ok: {model}: {len(units)} units, {len(values)} values", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
