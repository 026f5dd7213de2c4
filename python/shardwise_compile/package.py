"""Compiles the units of a model and writes the package: manifest and code. Equal units share one function."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from . import compiler
from .cut import Unit, cut, signature_of
from .head import chunk
from .source import DTYPES
from .split import Split, split

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
DTYPE_NAMES |= {torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8", torch.bool: "bool"}


@dataclass
class Function:
    """A compiled function and what the manifest says about it."""

    name: str
    unit: Unit  # the first of the units that share it
    split: Split
    chunk_rows: int | None
    forward: object
    backward: object | None
    forward_temporary_bytes: int = 0
    backward_temporary_bytes: int = 0


@dataclass
class Package:
    units: list[Unit]
    functions: list[Function]
    function_of: list[int]  # for each unit


def compile_units(source, folder: Path, activation_checkpointing, chunk_rows, dtype, say):
    """Cuts the model and compiles its units into the folder."""
    units = cut(source, source.inputs, source.targets)
    say(f"{len(units)} units: {', '.join(unit.name for unit in units)}")
    chunk_rows = min(chunk_rows, source.targets.numel())
    chunked = chunk(source, units[-1], chunk_rows, dtype) if chunk_rows else None
    say(f"the head computes {chunk_rows} targets at a time" if chunked else "the head computes all targets at once")
    functions, function_of, known = [], [], {}
    for unit in units:
        signature = signature_of(unit)
        if signature not in known:
            known[signature] = len(functions)
            stem = unit.name.split(".")[0]
            same = sum(function.name.split("-")[0] == stem for function in functions)
            name = f"{stem}-{same + 1}" if same else stem
            if unit is units[-1] and chunked:
                functions.append(compile_function(name, chunked[0], chunked[1], chunk_rows, folder))
            else:
                functions.append(compile_function(name, unit, split(unit, activation_checkpointing), None, folder))
            say(f"compiled {name}")
            parts = functions[-1].split
            if any(module is not None and compiler.adds_atomically(module) for module in (parts.forward, parts.backward)):
                say(f"note: {name} adds at places that indices name; with several threads per rank, bits vary from run to run")
        function_of.append(known[signature])
    return Package(units, functions, function_of)


def compile_function(name, unit, parts, chunk_rows, folder):
    compiled = []
    for direction, module in (("forward", parts.forward), ("backward", parts.backward)):
        if module is None:
            compiled.append(None)
            continue
        path = folder / f"{name}.{direction}.pt2"
        compiled.append(compiler.compile_graph(module, compiler.examples_of(module), path))
    return Function(name, unit, parts, chunk_rows, *compiled)


def write_manifest(source, package, folder, options):
    torch_version = torch.__version__.split("+")[0]
    unit_of = {name: index for index, unit in enumerate(package.units) for name in unit.parameters}
    parameters = dict(source.model.named_parameters())

    def tie(name):
        owner = unit_of[name]
        return {"unit": owner, "parameter": package.units[owner].parameters.index(name)}

    manifest = {
        "format": 1,
        "torch": torch_version,
        "device": options.device,
        "cpu_features": compiler.cpu_features(),
        "gpu_architecture": compiler.gpu_architecture(options.device),
        "dtype": options.dtype,
        "activation_checkpointing": options.activation_checkpointing,
        "inputs": describe(source.inputs),
        "targets": describe(source.targets),
        "source": source.description,
        "functions": [describe_function(function, folder) for function in package.functions],
        "units": [
            {
                "name": unit.name,
                "function": function,
                "parameters": [
                    {
                        "name": name,
                        "shape": list(parameters[name].shape),
                        "init": source.initializations[name],
                        "decays": parameters[name].dim() >= 2,
                    }
                    for name in unit.parameters
                ],
                "tied": tie(unit.tied) if unit.tied else None,
            }
            for unit, function in zip(package.units, package.function_of, strict=True)
        ],
    }
    (folder / "package.json").write_text(json.dumps(manifest, indent=2) + "\n")
    if source.config is not None:
        (folder / "config.json").write_text(json.dumps(source.config, indent=2) + "\n")


def describe(value):
    return {"shape": list(value.shape), "dtype": DTYPE_NAMES[value.dtype]}


def describe_function(function, folder):
    unit, parts = function.unit, function.split
    examples = unit.examples()
    shapes = {kind: list(example.shape) for kind, example in zip(unit.arguments, examples) if isinstance(kind, str)}
    chunk_rows = function.chunk_rows

    def file(direction):
        name = f"{function.name}.{direction}.pt2"
        return {"file": name, "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest()}

    def saved(item):
        if item[0] == "value":
            return {"value": describe(item[1])}
        return item if isinstance(item, str) else {"parameter": item[1]}

    input_shape = shapes.get("input")
    return {
        "name": function.name,
        "parameters": [list(example.shape) for kind, example in zip(unit.arguments, examples) if kind[0] == "parameter"],
        "has_input": "input" in shapes,
        "reads_inputs": "inputs" in shapes,
        "reads_targets": "targets" in shapes,
        "input_shape": [chunk_rows, input_shape[-1]] if chunk_rows else input_shape,
        "output_shape": list(unit.output().shape),
        "forward": file("forward"),
        "backward": None if chunk_rows else file("backward"),
        "saved": [saved(item) for item in parts.saved],
        "gradients": parts.gradients,
        "chunk_rows": chunk_rows,
        "forward_flops": compiler.count_flops(parts.forward),
        "backward_flops": 0.0 if chunk_rows else compiler.count_flops(parts.backward),
        "forward_temporary_bytes": function.forward_temporary_bytes,
        "backward_temporary_bytes": function.backward_temporary_bytes,
    }
