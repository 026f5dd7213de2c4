"""Computes the head in chunks of rows: logits of a large vocabulary are the largest activations, and never all there at once.

Possible where the head treats each token on its own. A second export with another shape shows what the head does to a chunk, and
numbers decide: the losses of all chunks must add up to the loss of the whole.
"""

import math

import torch
from torch import fx

from .cut import cut
from .graphs import aten, module_of_graph
from .split import Split, trace_joint


def chunk(source, whole, chunk_rows, dtype):
    """The unit and the graph of a head that works on `chunk_rows` rows, or None."""
    hidden, targets = (example_of(whole, kind) for kind in ("input", "targets"))
    if not source.is_text or hidden is None or targets is None or hidden.dim() != 3 or "inputs" in whole.arguments:
        return None
    # Sequences that are not longer than the batch's, which every model accepts.
    length = math.gcd(chunk_rows, targets.shape[1])
    shape = (chunk_rows // length, length)
    tokens = source.inputs.new_zeros(shape)
    head = cut(source, tokens, tokens.clone())[-1]
    same = (whole.parameters, whole.tied) == (head.parameters, head.tied) and "inputs" not in head.arguments
    if not same or tuple(example_of(head, "input").shape) != (*shape, hidden.shape[-1]):
        return None
    if not adds_up(source, whole, head, hidden, targets, chunk_rows, dtype):
        return None
    return head, derive(head)


def example_of(unit, kind):
    return unit.examples()[unit.arguments.index(kind)] if kind in unit.arguments else None


def adds_up(source, whole, head, hidden, targets, chunk_rows, dtype):
    """Whether the chunks' losses add up, on random activations and the source's targets."""
    parameters = dict(source.model.named_parameters())
    names = [*whole.parameters, whole.tied] if whole.tied else whole.parameters
    hidden = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2)).to(hidden)

    def run(unit, hidden, targets):
        values = {"input": hidden, "targets": targets}
        arguments = [values[kind] if isinstance(kind, str) else None for kind in unit.arguments]
        for place, kind in enumerate(unit.arguments):
            if not isinstance(kind, str):
                arguments[place] = parameters[names[kind[1]]] if kind[0] == "parameter" else kind[1]
        return unit.graph(*arguments)[0].item()

    with torch.no_grad():
        expected = run(whole, hidden, source.targets)
        total = 0.0
        for rows, labels in zip(*pad_chunks(hidden.flatten(0, 1), source.targets.flatten(), chunk_rows)):
            total += run(head, rows.view(example_of(head, "input").shape), labels.view(example_of(head, "targets").shape))
    return abs(total - expected) <= (1e-5 if dtype == torch.float32 else 1e-2) * abs(expected)


def pad_chunks(rows, targets, chunk_rows):
    """Rows and targets in chunks, the last padded with zeros and targets that do not count, as the trainer does."""
    missing = -len(rows) % chunk_rows
    rows = torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
    targets = torch.cat([targets, targets.new_full((missing,), -100)])
    return rows.split(chunk_rows), targets.split(chunk_rows)


def derive(head):
    """One graph from parameters, hidden and targets to the loss, f32 gradients of the parameters, and hidden's gradient."""
    examples = head.examples()
    shapes = {place: examples[place].shape for place, kind in enumerate(head.arguments) if kind in ("input", "targets")}
    for place in shapes:
        examples[place] = examples[place].flatten(0, 1)

    def run_rows(*arguments):
        return head.graph(*(a.view(shapes[place]) if place in shapes else a for place, a in enumerate(arguments)))

    joint = trace_joint(head, run_rows, examples).graph
    *primals, tangent = joint.find_nodes(op="placeholder")
    loss, *gradients = joint.output_node().args[0]
    with joint.inserting_before(tangent):
        one = joint.call_function(aten.full.default, ([], 1.0), {"dtype": torch.float32, "device": tangent.meta["val"].device})
        one.meta["val"] = tangent.meta["val"]
    tangent.replace_all_uses_with(one)
    joint.erase_node(tangent)
    constants = {}
    for index, (node, kind) in enumerate(zip(primals, head.arguments, strict=True)):
        if kind[0] == "constant":
            constants[f"constant_{index}"] = kind[1]
            with joint.inserting_before(node):
                node.replace_all_uses_with(joint.get_attr(f"constant_{index}"))
            joint.erase_node(node)
    results, places, seen = [], [], set()
    with joint.inserting_before(joint.output_node()):
        for node, kind in zip(gradients, head.arguments, strict=True):
            if kind != "input" and kind[0] != "parameter":
                continue
            if node is None:
                places.append(None)
                continue
            value = node.meta["val"]
            # Two parameters with the same gradient get one each, since the trainer changes them in place.
            if node in seen:
                node = joint.call_function(aten.clone.default, (node,))
            seen.add(node)
            if kind != "input" and value.dtype != torch.float32:
                node = joint.call_function(torch.ops.prims.convert_element_type.default, (node, torch.float32))
            elif not value.is_contiguous():
                node = joint.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
            places.append(len(results))
            results.append(node)
    joint.output_node().args = ((loss, *results),)
    joint.eliminate_dead_code()
    # Arguments and results as they are, instead of the nested ones of a joint graph.
    joint.set_codegen(fx.graph.CodeGen())
    return Split(module_of_graph(joint, constants), None, [], places)
