"""Splits a unit into forward and backward graphs, and decides what the forward pass saves.

PyTorch's partitioner chooses the saved values. Ours are fewer: parameters are released between the passes (ZeRO-3), so nothing
that is computed from parameters alone is saved, and the batch is at hand in both passes, so nothing that is computed from it and
constants alone is. Views and casts to a wider dtype are made again from what they were made of. Saved values are contiguous,
because a package records shapes and no strides.
"""

from dataclasses import dataclass

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._functorch.partitioners import min_cut_rematerialization_partition, reordering_to_mimic_autograd_engine
from torch._subclasses import FakeTensorMode

from .compiler import trace_decompositions
from .errors import CompileError, quiet
from .graphs import CASTS, VIEWS, aten, bytes_of, contiguous_order, is_pointwise, make_contiguous, module_of_graph

# How much of the activations selective checkpointing keeps, for PyTorch's partitioner. For a block of Llama, 0.3 saves 45% of the
# bytes that "none" saves, for 14% more FLOPs in forward and backward passes together.
SELECTIVE_BUDGET = 0.3


@dataclass
class Split:
    """Forward and backward graphs of a unit, with the calling conventions of a package."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    saved: list  # ("parameter", i), "input", "inputs", "targets", or ("value", fake tensor)
    gradients: list[int | None]


def fakes(values):
    """Fake tensors of one mode like `values`, which may belong to different modes. Contiguous: no caller sends others."""
    with FakeTensorMode():
        return [torch.empty(value.shape, dtype=value.dtype, device=value.device) for value in values]


def trace_joint(unit, function=None, examples=None):
    """One graph of forward and backward: takes the unit's arguments and the output's gradient, returns output and gradients."""
    examples = fakes(examples or unit.examples())
    for argument, example in zip(unit.arguments, examples):
        if argument == "input" or argument[0] == "parameter":
            example.requires_grad_(True)
    try:
        with quiet():
            return aot_export_joint_simple(
                function or unit.graph, tuple(examples), trace_joint=True, decompositions=trace_decompositions()
            )
    except Exception as error:
        raise CompileError(f"{unit.name}: PyTorch cannot derive the backward pass: {str(error).splitlines()[0]}") from error


def split(unit, activation_checkpointing):
    joint = trace_joint(unit)
    budget = SELECTIVE_BUDGET if activation_checkpointing == "selective" else 1.0
    with functorch_config.patch(activation_memory_budget=budget):
        forward, _ = min_cut_rematerialization_partition(joint, None, num_fwd_outputs=1)
    # The partitioner leaves the joint graph as it has simplified it.
    nodes = {node.name: node for node in joint.graph.nodes}
    chosen = [nodes[node.name] for node in forward.graph.output_node().args[0][1:]]
    return Splitter(unit, joint.graph).split(chosen)


class Splitter:
    """Cuts a joint graph in two at a set of saved values."""

    def __init__(self, unit, joint):
        self.unit, self.joint = unit, joint
        *self.primals, self.tangent = joint.find_nodes(op="placeholder")
        self.kinds = dict(zip(self.primals, unit.arguments))
        self.output, *self.gradients = joint.output_node().args[0]
        self.depends = {}
        for node in joint.nodes:
            if node in self.kinds:
                kind = self.kinds[node]
                self.depends[node] = {"batch" if kind in ("inputs", "targets") else kind if kind == "input" else kind[0]}
            elif node.op != "output":
                self.depends[node] = set().union(*(self.depends[operand] for operand in node.all_input_nodes))

    def split(self, chosen):
        values = self.reduce(chosen)
        assert not any(map(self.is_recomputed, values)), "a value of parameters alone or of the batch alone would be saved"
        forward = fx.Graph()
        copies = self.add_placeholders(forward, [node for node in self.primals if self.kinds[node][0] != "constant"])
        self.copy(forward, copies, [self.output, *values], stops=())
        orders = [contiguous_order(value.meta["val"]) for value in values]
        outputs = [make_contiguous(forward, copies[self.output], self.output.meta["val"])]
        outputs += [
            self.save(forward, copies[value], value.meta["val"], order) for value, order in zip(values, orders, strict=True)
        ]
        forward.output(tuple(outputs))

        # Inputs and targets have no gradients; they come after the parameters and the input.
        differentiable = sum(kind == "input" or kind[0] == "parameter" for kind in self.unit.arguments)
        gradients = self.gradients[:differentiable]
        results = [node for node in gradients if node is not None]
        places = iter(range(len(results)))
        needed = self.needed(results, values)
        kept = [node for node in self.primals if node in needed and self.kinds[node][0] != "constant"]
        backward = fx.Graph()
        copies = self.add_placeholders(backward, kept)
        for index, (value, order) in enumerate(zip(values, orders, strict=True)):
            copies[value] = self.restore(backward, f"saved_{index}", value.meta["val"], order)
        copies |= self.add_placeholders(backward, [self.tangent])
        self.copy(backward, copies, results, stops=values)
        backward.output(tuple(self.own_results(backward, copies, results)))
        saved = [self.kinds[node] for node in kept] + [
            ("value", value.meta["val"] if order is None else value.meta["val"].permute(order))
            for value, order in zip(values, orders, strict=True)
        ]
        constants = {f"constant_{i}": kind[1] for i, kind in enumerate(self.unit.arguments) if kind[0] == "constant"}
        return Split(
            module_of_graph(forward, constants),
            reordering_to_mimic_autograd_engine(module_of_graph(backward, constants)),
            saved,
            [None if node is None else next(places) for node in gradients],
        )

    def reduce(self, chosen):
        """What must be saved so that the backward pass can have the chosen values."""
        bases = {}
        for node in chosen:
            if self.is_recomputed(node):
                continue
            bases.setdefault(self.base_of(node), []).append(node)
        values = []
        for base, group in bases.items():
            if self.is_recomputed(base) or base in self.kinds:
                continue
            if base in group or bytes_of(base) <= sum(map(bytes_of, group)):
                values.append(base)
            else:
                values += group
        for value in sorted(values, key=bytes_of, reverse=True):
            if self.is_cheap(value, set(values) - {value}):
                values.remove(value)
        used = self.needed([node for node in self.gradients if node is not None], values)
        return [value for value in values if value in used]

    def is_cheap(self, node, available):
        """Whether pointwise operations alone make the node from available values: an activation function, a scaled norm."""
        found, stack = set(), [node]
        while stack:
            node = stack.pop()
            if not is_pointwise(node):
                return False
            for operand in node.all_input_nodes:
                is_given = operand in available or operand in self.kinds or self.is_recomputed(operand)
                if not is_given and operand not in found:
                    found.add(operand)
                    stack.append(operand)
        return True

    def is_recomputed(self, node):
        depends = self.depends[node] - {"constant"}
        return depends <= {"parameter"} or depends <= {"batch"}

    def base_of(self, node):
        """Follows views and widening casts to the value that holds the information, and copies where that is smaller."""
        base, is_copied = node, False
        while node.op == "call_function":
            if node.target in CASTS:
                source, result = node.args[0].meta["val"].dtype, node.meta["val"].dtype
                if not (source.is_floating_point and result.is_floating_point and source.itemsize < result.itemsize):
                    break
            elif node.target == aten.clone.default:
                # Keys and values that are repeated for each head of a group.
                is_copied = True
            elif node.target not in VIEWS:
                break
            node = node.args[0]
            if not is_copied or bytes_of(node) < bytes_of(base):
                base, is_copied = node, False
        return base

    def own_results(self, graph, copies, results):
        """Gradients that share no memory with each other or with an argument, because the trainer may change them in place."""
        seen = set()
        for node in results:
            root = node
            while root.target in VIEWS:
                root = root.args[0]
            is_shared = root in seen or root.op == "placeholder"
            seen.add(root)
            yield make_contiguous(graph, copies[node], node.meta["val"], is_shared)

    def add_placeholders(self, graph, nodes):
        copies = {}
        for node in nodes:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta["val"] = node.meta["val"]
        return copies

    def needed(self, results, stops):
        found, stack, stops = set(), list(results), set(stops)
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack += [] if node in stops else node.all_input_nodes
        return found

    def copy(self, graph, copies, results, stops):
        needed = self.needed(results, stops)
        for node in self.joint.nodes:
            if node not in needed or node in copies:
                continue
            kind = self.kinds.get(node)
            if kind is not None and kind[0] == "constant":
                copies[node] = graph.get_attr(f"constant_{self.primals.index(node)}")
                copies[node].meta["val"] = node.meta["val"]
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)

    def save(self, graph, node, value, order):
        if order is None:
            return make_contiguous(graph, node, value)
        permuted = graph.call_function(aten.permute.default, (node, order))
        permuted.meta["val"] = value.permute(order)
        return permuted

    def restore(self, graph, name, value, order):
        placeholder = graph.placeholder(name)
        placeholder.meta["val"] = value if order is None else value.permute(order)
        if order is None:
            return placeholder
        node = graph.call_function(aten.permute.default, (placeholder, [order.index(i) for i in range(len(order))]))
        node.meta["val"] = value
        return node
