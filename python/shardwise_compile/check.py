"""Runs the compiled functions as the trainer will, and compares loss and gradients with the model's own."""

import torch

from . import compiler
from .errors import CompileError
from .head import pad_chunks
from .source import Program

# Relative to the largest gradient of the parameter, or to a hundredth of the largest of all: the gradient of a bias of
# attention's keys is zero but for rounding. In bf16 and f16 both sides round at every operation.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 2e-2}


def check_loss(source):
    """Refuses a mean: the trainer divides the sum over all micro-batches and ranks by the number of targets that count."""
    mean = "`loss` must be the sum over all targets that count, such as with reduction='sum', and not their mean"
    with torch.no_grad():
        outputs = source.run(source.model, source.inputs)
        whole = source.loss(outputs, source.targets).float()
        if source.targets.dtype != torch.int64:
            # Targets that are numbers all count, and only the first dimension is sure to divide them.
            if isinstance(outputs, torch.Tensor) and len(outputs) == len(source.targets) > 1:
                parts = [source.loss(outputs[part], source.targets[part]).float() for part in (slice(1), slice(1, None))]
                if not torch.isclose(whole, sum(parts), rtol=1e-2):
                    raise CompileError(mean)
            return
        ignored = torch.full_like(source.targets, -100)
        if source.loss(outputs, ignored).float().nan_to_num() != 0:
            raise CompileError("`loss` must leave out targets of -100, such as with ignore_index=-100")
        # Every third target, and the rest. A mean of any kind weighs the targets of the smaller part more.
        chosen = (torch.arange(source.targets.numel(), device=source.targets.device) % 3 == 0).view(source.targets.shape)
        parts = [source.loss(outputs, torch.where(part, source.targets, ignored)).float() for part in (chosen, ~chosen)]
        if source.targets.numel() > 1 and not torch.isclose(whole, sum(parts), rtol=1e-2):
            raise CompileError(mean)


def eager_step(source):
    """Loss and gradients of the model as PyTorch computes them."""
    source.model.zero_grad(set_to_none=True)
    loss = Program(source)(source.inputs, source.targets)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in source.model.named_parameters()}
    return loss.detach(), gradients


def compiled_step(source, package):
    """Loss and gradients of the chain of compiled functions. Records the memory that each function takes meanwhile."""
    parameters = {name: parameter.detach() for name, parameter in source.model.named_parameters()}
    batch = {"inputs": source.inputs, "targets": source.targets}
    gradients, tape, activation = {}, [], None

    def add(names, results, places):
        for name, place in zip(names, places):
            if place is not None:
                gradients[name] = gradients.get(name, 0) + results[place].float()

    def call(function, direction, arguments):
        results, temporary = compiler.run_and_measure(getattr(function, direction), arguments)
        setattr(function, f"{direction}_temporary_bytes", temporary)
        return results

    for unit, number in zip(package.units, package.function_of, strict=True):
        function = package.functions[number]
        names = [*unit.parameters, unit.tied] if unit.tied else unit.parameters
        own = [parameters[name] for name in names]
        if function.chunk_rows:
            loss, parts = torch.zeros((), device=activation.device), []
            rows, targets = pad_chunks(activation.flatten(0, -2), source.targets.flatten(), function.chunk_rows)
            for hidden, labels in zip(rows, targets):
                arguments = [*own, hidden.contiguous(), labels.contiguous()]
                part, *results = call(function, "forward", arguments)
                check_memory(function, results, arguments)
                loss += part
                add(names, results, function.split.gradients)
                parts.append(results[function.split.gradients[-1]])
            gradient = torch.cat(parts)[: activation.numel() // activation.shape[-1]].view_as(activation)
            continue
        values = {"input": activation, **batch}
        others = [values[kind] for kind in function.unit.arguments if isinstance(kind, str)]
        activation, *saved = call(function, "forward", [*own, *others])
        kept = iter(saved)
        arguments = [
            next(kept) if kind[0] == "value" else own[kind[1]] if kind[0] == "parameter" else values[kind]
            for kind in function.split.saved
        ]
        if not all(value.is_contiguous() for value in (activation, *saved)):
            raise CompileError(f"{unit.name}: the compiled forward pass returns values that are not contiguous")
        tape.append((function, names, arguments))
        if unit is package.units[-1]:
            loss, gradient = activation, torch.ones_like(activation)
    for function, names, arguments in reversed(tape):
        results = call(function, "backward", [*arguments, gradient])
        check_memory(function, results, [*arguments, gradient])
        add(names, results, function.split.gradients)
        if function.unit.arguments.count("input"):
            gradient = results[function.split.gradients[-1]]
    return loss, gradients


def check_memory(function, results, arguments):
    """The trainer may change gradients in place."""
    memory = [value.untyped_storage().data_ptr() for value in (*results, *arguments)]
    if any(memory.count(own) > 1 for own in memory[: len(results)]):
        raise CompileError(f"{function.name}: gradients share memory with each other or with an argument")


def check(source, package, dtype):
    """Fails with the name of the first parameter whose gradient is wrong. Returns the largest differences."""
    tolerance = TOLERANCES[dtype]
    expected_loss, expected = eager_step(source)
    loss, gradients = compiled_step(source, package)
    loss_difference = abs((loss - expected_loss) / expected_loss).item()
    if not loss_difference <= min(tolerance, 1e-2):
        raise CompileError(f"self-check: the compiled loss is {loss.item()}, the model's own {expected_loss.item()}")
    largest = max(gradient.float().abs().max().item() for gradient in expected.values() if gradient is not None)
    worst = 0.0
    for name, gradient in expected.items():
        if gradient is None and name not in gradients:
            continue
        nothing = torch.zeros((), device=loss.device)
        ours = gradients.get(name, nothing)
        other = gradient.float() if gradient is not None else nothing
        difference = (ours - other).abs().max().item() / max(other.abs().max().item(), largest / 100)
        if not difference <= tolerance:
            raise CompileError(f"self-check: the gradient of {name} is off by {difference:.1e} of its largest value")
        worst = max(worst, difference)
    return loss_difference, worst, expected_loss, expected
