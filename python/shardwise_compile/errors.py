"""What users see: the one error of this package, where in their code a node comes from, and no warnings of PyTorch's own."""

import contextlib
import io
import logging
import traceback
import warnings
from pathlib import Path


class CompileError(Exception):
    """The model cannot be compiled. The message names the module and the line, and says what to do."""


def module_of(node):
    """The name of the innermost module that made the node, without our wrapper's prefix."""
    stack = node.meta.get("nn_module_stack") or {}
    names = [name.split("@")[0] for name, _ in stack.values()]
    return (names[-1].removeprefix("net").removeprefix(".") if names else "") or "the model"


def place_of(node):
    """`module (file:line: code)` of the innermost line outside of torch, for error messages."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    for number in range(len(lines) - 1, -1, -1):
        line = lines[number].strip()
        if not line.startswith("File ") or "/torch/" in line:
            continue
        file, at = line.split('"')[1], line.split("line ")[1].split(",")[0]
        code = lines[number + 1].strip() if number + 1 < len(lines) else ""
        return f"{module_of(node)} ({file}:{at}: {code})"
    return f"{module_of(node)} ({node.target})"


def line_of(error):
    """`file:line: code` of the innermost line of the user's or transformers' code that raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/torch/" not in frame.filename and Path(frame.filename).parent != Path(__file__).parent]
    return f"{ours[-1].filename}:{ours[-1].lineno}: {ours[-1].line}" if ours else "an unknown line"


@contextlib.contextmanager
def quiet():
    """Hides warnings about deprecations inside of PyTorch, which users of this tool can do nothing about."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
