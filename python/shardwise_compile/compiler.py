"""Compiles graphs with AOTInductor, and finds out what the compiled code costs and needs."""

import os
import subprocess
from pathlib import Path

import torch
from torch._inductor.decomposition import decompositions, select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from .errors import quiet

aten = torch.ops.aten


def embedding_dense_backward(gradient, indices, rows, padding_idx, scale_grad_by_freq):
    """PyTorch's own kernel, in f32. Inductor's would add atomically, so that bits would depend on the order of threads."""
    if gradient.dtype == torch.float32:
        return NotImplemented
    whole = aten.embedding_dense_backward(gradient.float(), indices, rows, padding_idx, scale_grad_by_freq)
    return whole.to(gradient.dtype)


# Inductor accepts either its own code for an operation or a call of PyTorch's.
decompositions.pop(aten.embedding_dense_backward.default, None)


def trace_decompositions():
    """How operations are taken apart when a graph is traced."""
    return {**select_decomp_table(), aten.embedding_dense_backward.default: embedding_dense_backward}


# Sums into places that indices name: Inductor's loops add atomically, so with several threads their bits vary.
ATOMIC = {
    aten.index_put.default,
    aten._unsafe_index_put.default,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
    aten.index_add.default,
}


def adds_atomically(module):
    """Whether a graph adds values into places that indices name."""
    nodes = [node for node in module.graph.nodes if node.target in ATOMIC]
    return any("index_put" not in str(node.target) or (len(node.args) > 3 and node.args[3]) for node in nodes)

# One thread is the trainer's default (ranks share a machine). Loops are still written as OpenMP loops, so that
# OMP_NUM_THREADS decides when the code runs.
OPTIONS = {
    "cpp.threads": 1,
    "cpp.dynamic_threads": True,
    "compile_threads": 1,
    # Parameters change at every step, so nothing may be computed from them ahead of time.
    "freezing": False,
    # Debugging information makes the files five times as large.
    "aot_inductor.enable_line_tables": False,
    "aot_inductor.enable_frame_pointer": False,
}


def compile_graph(module, examples, path: Path):
    """Compiles one graph for arguments like the examples into `path`, and returns a function that calls it."""
    with torch.no_grad(), quiet():
        exported = torch.export.export(module, tuple(examples), strict=False)
        file = torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs=OPTIONS)
        return torch._inductor.aoti_load_package(file)


def examples_of(module):
    """Fake tensors for the placeholders of a graph."""
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with FakeTensorMode(allow_non_fake_inputs=True):
        return [torch.empty(value.shape, dtype=value.dtype, device=value.device) for value in values]


def count_flops(module):
    """Floating-point operations of one call. Attention on CPUs is missing from PyTorch's own table."""

    def attention(query, key, value, *_, **__):
        return sdpa_flop_count(query, key, value)

    def attention_backward(gradient, query, key, value, *_, **__):
        return sdpa_backward_flop_count(gradient, query, key, value)

    formulas = {
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    }
    examples = examples_of(module)
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=formulas) as counter, examples[0].fake_mode:
        module(*examples)
    return float(counter.get_total_flops())


def run_and_measure(function, arguments):
    """Calls the function. Returns its results and the peak of its memory beyond arguments and results, in bytes."""
    if arguments[0].is_cuda:
        torch.cuda.reset_peak_memory_stats()
        with quiet():
            results = function(*arguments)
        return list(results), torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    with quiet(), torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        results = function(*arguments)
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return list(results), max(0, peak - now)


def gpu_architecture(device):
    """What the kernels run on, such as sm_90; None on a CPU."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else None


def cpu_features():
    """The features that the compiler may use for this machine, by their names in /proc/cpuinfo."""
    command = [os.environ.get("CXX", "g++"), "-march=native", "-dM", "-E", "-x", "c++", "/dev/null"]
    macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout.lower()
    # The compiler writes avx512bf16 where Linux writes avx512_bf16.
    used = {line.split()[1].strip("_").replace("_", "") for line in macros.splitlines() if line.startswith("#define __")}
    line = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    vector_extensions = ("avx", "fma", "f16c", "bmi", "amx", "sse4")
    return [flag for flag in line.split(":")[1].split() if flag.startswith(vector_extensions) and flag.replace("_", "") in used]
