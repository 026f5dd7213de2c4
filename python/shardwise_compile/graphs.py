"""What we need to know about the operations and values of a graph."""

import torch
from torch import fx, nn

aten = torch.ops.aten
VIEWS = {
    aten.alias.default,
    aten.detach.default,
    aten.expand.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten._unsafe_view.default,
    aten.view.default,
    aten.reshape.default,
}
CASTS = {aten._to_copy.default, torch.ops.prims.convert_element_type.default}


def is_pointwise(node):
    target = node.target
    if target in VIEWS or target in CASTS:
        return True
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def bytes_of(node):
    return node.meta["val"].numel() * node.meta["val"].itemsize


def contiguous_order(value):
    """The order of dimensions in which a dense value is contiguous. None: as it is, or in none."""
    if value.is_contiguous():
        return None
    order = sorted(range(value.dim()), key=lambda dim: (-value.stride(dim), dim))
    return order if value.permute(order).is_contiguous() else None


def make_contiguous(graph, node, value, is_copy=False):
    """The node, or a contiguous copy of it if it is not contiguous or a copy is asked for."""
    if value.is_contiguous() and not is_copy:
        return node
    copy = graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    copy.meta["val"] = torch.empty_like(value, memory_format=torch.contiguous_format)
    return copy


def module_of_graph(graph, constants):
    """A module with the constants that the graph uses."""
    root = nn.Module()
    used = {node.target for node in graph.find_nodes(op="get_attr")}
    for name, constant in constants.items():
        if name in used:
            root.register_buffer(name, constant)
    return fx.GraphModule(root, graph)
