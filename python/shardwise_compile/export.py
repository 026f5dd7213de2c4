"""Exports model and loss as one functional graph, and says what its placeholders are and where its blocks are."""

import torch
from torch import nn

from .errors import CompileError, line_of, place_of, quiet
from .source import Program

ASSERTIONS = {
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
}


def export(source, inputs, targets):
    """The graph for a batch of these shapes, the kinds of its placeholders, and the names of the blocks in it."""
    try:
        with torch.no_grad(), quiet():
            exported = torch.export.export(Program(source), (inputs, targets), strict=False).run_decompositions({})
    except Exception as error:
        problem = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise CompileError(
            f"torch.export cannot trace {type(source.model).__name__} at {line_of(error)}: {problem}. Branches and sizes must "
            "not depend on values; torch.where chooses without branching"
        ) from error
    if exported.graph_signature.buffers_to_mutate:
        names = ", ".join(name.removeprefix("net.") for name in exported.graph_signature.buffers_to_mutate.values())
        raise CompileError(f"the forward pass changes the buffers {names}; a compiled unit cannot: make them constant")
    graph = exported.graph_module.graph
    simplify(graph)
    kinds = classify_placeholders(exported, source.model)
    names = {name for name, _ in source.model.named_modules()}
    unknown = [name for name in source.units or [] if name not in names]
    if unknown:
        raise CompileError(f"`units` lists {unknown[0]}, which {type(source.model).__name__} does not have")
    blocks = [f"net.{name}" for name in source.units or find_blocks(source.model, graph)]
    return graph, kinds, blocks


def simplify(graph):
    """Removes assertions and dropout that does nothing. Refuses chance: a backward pass could not repeat it."""
    for node in list(graph.nodes):
        if node.target in ASSERTIONS:
            graph.erase_node(node)
        elif node.target == torch.ops.aten.dropout.default and (node.args[1] == 0.0 or not node.args[2]):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
            is_attention = node.target == torch.ops.aten.scaled_dot_product_attention.default
            probability = (*node.args[4:5], node.kwargs.get("dropout_p", 0.0))[0]
            if not is_attention or probability != 0.0:
                raise CompileError(f"{place_of(node)} draws random numbers; turn it off (for dropout, p = 0)")
    graph.eliminate_dead_code()


def classify_placeholders(exported, model):
    """What each placeholder of the exported graph is. Parameters go by the first of their names, so that ties show."""
    first_names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_names.setdefault(id(parameter), name)
    aliases = {name: first_names[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    signature = exported.graph_signature
    kinds = {}
    for node in exported.graph.find_nodes(op="placeholder"):
        if node.name in signature.inputs_to_parameters:
            kinds[node] = ("parameter", aliases[signature.inputs_to_parameters[node.name].removeprefix("net.")])
        elif node.name in signature.inputs_to_buffers:
            name = signature.inputs_to_buffers[node.name]
            held = exported.state_dict if name in exported.state_dict else exported.constants
            kinds[node] = ("constant", held[name])
        elif node.name in signature.inputs_to_lifted_tensor_constants:
            kinds[node] = ("constant", exported.constants[signature.inputs_to_lifted_tensor_constants[node.name]])
        else:
            kinds[node] = "inputs" if "inputs" not in kinds.values() else "targets"
    return kinds


def find_blocks(model, graph):
    """The names of the longest list of modules of one class that the forward pass goes through."""
    seen = {name.split("@")[0] for node in graph.nodes for name, _ in (node.meta.get("nn_module_stack") or {}).values()}
    best = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len({type(child) for child in module}) != 1:
            continue
        names = [f"{name}.{index}" if name else str(index) for index in range(len(module))]
        names = [name for name in names if f"net.{name}" in seen]
        if len(names) > len(best):
            best = names
    if not best:
        raise CompileError(
            f"{type(model).__name__} has no nn.ModuleList of blocks; define `units`, the names of its blocks in order, "
            'such as units = ["layers.0", "layers.1"]'
        )
    return best
