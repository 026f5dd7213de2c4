"""Checks cuts, splits and chunks of every architecture without compiling them: python graphs.py [NAME ...]

The same self-check as the tool's, on the graphs that would be compiled: seconds for each instead of a minute.
"""

import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import shardwise_compile  # noqa: F401, E402  (sets PyTorch's environment before it is imported)
import torch  # noqa: E402
from architectures import ARCHITECTURES, CASES, config  # noqa: E402
from shardwise_compile import compiler, hugging_face, source  # noqa: E402
from shardwise_compile.check import check  # noqa: E402
from shardwise_compile.errors import CompileError  # noqa: E402
from shardwise_compile.package import compile_units  # noqa: E402


def load(model, folder):
    if model.endswith(".py"):
        return source.load_file(Path(__file__).parent.parent / "examples" / model)
    made = config(model)
    made.architectures = [ARCHITECTURES[model]]
    made.save_pretrained(folder)
    return hugging_face.load(folder, 2, 32)


def main(cases):
    compiler.compile_graph = lambda module, examples, path: module
    failed = []
    for case in cases or CASES:
        model, options = CASES[case]
        dtype = torch.bfloat16 if "bf16" in options else torch.float32
        torch.manual_seed(0)
        try:
            with tempfile.TemporaryDirectory() as folder:
                made = load(model, Path(folder))
                source.prepare(made, dtype)
                checkpointing = "selective" if "selective" in options else "none"
                package = compile_units(made, Path(folder), checkpointing, 48, dtype, lambda line: None)
                loss, gradients, *_ = check(made, package, dtype)
            saved = sum(
                value[1].numel() * value[1].itemsize
                for function in package.functions
                for value in function.split.saved
                if value[0] == "value"
            )
            rows = package.functions[-1].chunk_rows
            print(f"ok: {case}: loss {loss:.1e}, gradients {gradients:.1e}, chunk_rows {rows}, saved {saved} bytes", flush=True)
        except CompileError as error:
            print(f"FAILED: {case}: {error}", flush=True)
            failed.append(case)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
