"""Cuts the exported graph of a model into a chain of units: embedding, block.0, block.1, ..., head.

A node belongs to the block whose module made it. Nodes outside of the blocks belong to where their operands are: to the
embedding, to the block before them, or after the last block to the head. One tensor crosses each cut. Values that depend only on
the batch and constants (rotary tables, masks) or only on parameters are computed again in each unit that needs them.
"""

from dataclasses import dataclass, field

import torch
from torch import fx, nn

from .errors import CompileError, place_of
from .export import export


@dataclass
class Unit:
    """One unit: a graph whose placeholders are own parameters, tied parameter, input, inputs, targets, constants."""

    name: str
    parameters: list[str]
    tied: str | None
    graph: fx.GraphModule
    # What each placeholder is: ("parameter", i), "input", "inputs", "targets" or ("constant", tensor).
    arguments: list = field(default_factory=list)

    def examples(self):
        """The fake tensors that the placeholders stand for."""
        return [node.meta["val"] for node in self.graph.graph.find_nodes(op="placeholder")]

    def output(self):
        return self.graph.graph.output_node().args[0][0].meta["val"]


def cut(source, inputs, targets):
    """The units of the model for a batch of these shapes."""
    return Cutter(source.model, *export(source, inputs, targets)).units()


class Cutter:
    """Assigns the nodes of a graph to units and copies each unit into a graph of its own."""

    def __init__(self, model, graph, kinds, blocks):
        self.model, self.graph, self.kinds, self.blocks = model, graph, kinds, blocks
        self.parameters = {node: kind[1] for node, kind in kinds.items() if kind[0] == "parameter"}
        self.last = len(blocks) + 1
        self.names = ["embedding", *(f"block.{index}" for index in range(len(blocks))), "head"]
        # The unit of each node that depends on parameters and on the batch. The others are copied where they are needed.
        self.homes = {}
        self.assign()

    def assign(self):
        depends = {}
        for node in self.graph.nodes:
            if node.op == "output":
                continue
            if node in self.kinds:
                kind = self.kinds[node]
                depends[node] = {"batch" if isinstance(kind, str) else kind[0]} - {"constant"}
                continue
            depends[node] = set().union(*(depends[operand] for operand in node.all_input_nodes))
            if depends[node] == {"parameter", "batch"}:
                self.homes[node] = self.home_of(node)

    def home_of(self, node):
        operands = {self.homes[operand] for operand in node.all_input_nodes if operand in self.homes}
        before = max(operands, default=0)
        block = self.block_of(node)
        if block is None:
            # A residual connection around the last block, written outside of it, belongs to the block.
            return self.last if operands == {self.last - 1} else before
        if before > block:
            raise CompileError(
                f"{place_of(node)} runs in {self.names[block]} but needs a value of {self.names[before]}, which comes later; "
                "list the blocks in the order in which they run in `units`"
            )
        return block

    def block_of(self, node):
        inside = [name.split("@")[0] for name, _ in (node.meta.get("nn_module_stack") or {}).values()]
        return next((index + 1 for index, block in enumerate(self.blocks) if block in inside), None)

    def crossings(self):
        """The node that leaves each unit but the last."""
        crossing = {}
        for node, home in self.homes.items():
            for user in node.users:
                there = self.homes.get(user, self.last)
                if there == home:
                    continue
                other = crossing.setdefault(home, node)
                if there != home + 1 or other is not node:
                    problem = f"{self.names[there]} needs a value of {self.names[home]}"
                    beside = "" if there != home + 1 else f", beside that of {place_of(other)}"
                    at = user if user.op != "output" else node
                    raise CompileError(
                        f"{problem}: {place_of(node)}{beside}; it is used by {place_of(at)}. One tensor may go from each unit to "
                        "the next: carry it in the residual stream, or choose larger blocks with `units`"
                    )
                if not node.meta["val"].is_floating_point():
                    raise CompileError(f"{place_of(node)} hands integers to {self.names[there]}; only activations may cross")
        for unit in range(self.last):
            if unit not in crossing:
                raise CompileError(f"nothing goes from {self.names[unit]} to {self.names[unit + 1]}; check `units`")
        return crossing

    def units(self):
        crossing = self.crossings()
        result = self.graph.output_node().args[0][0]
        needs = [
            self.needed(result if unit == self.last else crossing[unit], crossing.get(unit - 1)) for unit in range(self.last + 1)
        ]
        owners = self.own(needs)
        units = []
        for index, name in enumerate(self.names):
            used = {self.parameters[node] for node in needs[index] if node in self.parameters}
            own = [parameter for parameter, _ in self.model.named_parameters() if owners[parameter] == index]
            tied = [parameter for parameter in used if owners[parameter] != index]
            if len(tied) > 1:
                raise CompileError(f"{name} shares {', '.join(sorted(tied))} with other units; it may share one parameter")
            output = result if index == self.last else crossing[index]
            units.append(self.copy(name, own, tied[0] if tied else None, needs[index], crossing.get(index - 1), output))
        return units

    def needed(self, output, entry):
        """The nodes that compute `output` from `entry`, in order."""
        found, stack = set(), [output]
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack += [] if node is entry else node.all_input_nodes
        return [node for node in self.graph.nodes if node in found]

    def own(self, needs):
        """The unit that owns each parameter: the first that uses it. Unused ones stay with the module they are in."""
        owners = {}
        for index, nodes in enumerate(needs):
            for node in nodes:
                if node in self.parameters:
                    owners.setdefault(self.parameters[node], index)
        for name, _ in self.model.named_parameters():
            block = next((i + 1 for i, block in enumerate(self.blocks) if f"net.{name}".startswith(block + ".")), 0)
            owners.setdefault(name, block)
        return owners

    def copy(self, name, own, tied, nodes, entry, output):
        """Copies the nodes of one unit, with placeholders in the order of the calling convention."""
        graph, copies, arguments = fx.Graph(), {}, []

        def add(argument, label, example, originals=()):
            placeholder = graph.placeholder(label)
            placeholder.meta["val"] = example
            arguments.append(argument)
            copies.update(dict.fromkeys(originals, placeholder))

        for index, parameter in enumerate([*own, tied] if tied else own):
            originals = [node for node, other in self.parameters.items() if other == parameter]
            add(("parameter", index), f"parameter_{index}", originals[0].meta["val"], originals)
        if entry is not None:
            add("input", "input", entry.meta["val"], [entry])
        for kind in ("inputs", "targets"):
            for node in [node for node in nodes if self.kinds.get(node) == kind]:
                add(kind, kind, node.meta["val"], [node])
        for node in [node for node in nodes if node in self.kinds and self.kinds[node][0] == "constant"]:
            add(self.kinds[node], f"constant_{len(arguments)}", node.meta["val"], [node])
        for node in nodes:
            if node not in copies and node is not entry:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output((copies[output],))
        return Unit(name, own, tied, fx.GraphModule(nn.Module(), graph), arguments)


def signature_of(unit):
    """Equal for two units that compute the same function: same operations, shapes and constants, whatever the names."""
    numbers, lines = {}, []

    def number(tree):
        return repr(fx.node.map_arg(tree, lambda operand: numbers[operand]))

    for node in unit.graph.graph.nodes:
        numbers[node] = f"%{len(numbers)}"
        value = node.meta.get("val")
        shape = (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None
        target = node.op if node.op == "placeholder" else str(node.target)
        lines.append(f"{target} {shape} {number(node.args)} {number(node.kwargs)}")
    for argument in unit.arguments:
        is_constant = argument[0] == "constant"
        lines.append(repr((argument[1].dtype, argument[1].tolist()) if is_constant else argument))
    return "\n".join(lines)
