"""What cannot be compiled is refused with the module, the line of the user's code, and a remedy. Run with: python refusals.py"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
COMMON = """
import torch
import torch.nn.functional as F
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.extra = nn.Linear(8, 8), {extra}
    def forward(self, x, first):
        return {block}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = nn.{container}(Block() for _ in range(2))
        {buffer}
    def forward(self, x):
        x = first = self.embedding(x)
        {statement}
        for block in self.blocks:
            x = block(x, first)
        return self.out(x)

model = Model
{units}
inputs, targets = torch.randint(16, (2, 4)), torch.randint(16, (2, 4))
def loss(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="{reduction}")
"""
FINE = dict(extra="None", block="x + self.linear(x)", container="ModuleList", buffer="", statement="", units="", reduction="sum")
CASES = {
    "a value of the embedding in a later block": (dict(block="x + self.linear(x) * first"), ["block.1", "embedding", "first"]),
    "running statistics": (dict(extra="nn.BatchNorm1d(4)", block="x + self.extra(x)"), ["blocks.0.extra", "GroupNorm"]),
    "random numbers": (dict(block="x + self.linear(x) * torch.rand_like(x)"), ["blocks.0", "rand_like", "random"]),
    "dropout as a function": (dict(block="x + F.dropout(self.linear(x), 0.1)"), ["blocks.0", "F.dropout", "p = 0"]),
    "a buffer that changes": (
        dict(buffer="self.register_buffer('steps', torch.zeros(()))", statement="self.steps.add_(1)"),
        ["steps", "constant"],
    ),
    "units in the wrong order": (dict(units='units = ["blocks.1", "blocks.0"]'), ["blocks.1", "order"]),
    "units that do not exist": (dict(units='units = ["layers.0", "layers.1"]'), ["layers.0"]),
    "control flow that depends on data": (dict(statement="x = x if x.sum() > 0 else -x"), ["Model", "x.sum()"]),
    "a mean": (dict(reduction="mean"), ["sum", "mean"]),
    "a mean of one sequence": (
        dict(reduction="mean", units="one = True"),
        ["sum", "mean"],
    ),
    "a frozen parameter": (dict(buffer="self.out.weight.requires_grad_(False)"), ["out.weight", "model.frozen"]),
    "no loss": (dict(units="del_loss = True"), ["loss"]),
}


def refuse(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.py"
        path.write_text(text)
        command = [sys.executable, "-m", "shardwise_compile", str(path), "--out", f"{folder}/out"]
        environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
        return subprocess.run(command, env=environment, capture_output=True, text=True)


def main():
    failed = []
    for case, (changes, words) in CASES.items():
        text = COMMON.format(**FINE | changes)
        if case == "no loss":
            text = text.split("def loss")[0]
        if case == "a mean of one sequence":
            text = text.replace("(16, (2, 4))", "(16, (1, 4))")
        run = refuse(text)
        message = run.stderr.strip()
        is_good = run.returncode == 1 and message.count("\n") == 0 and all(word in message for word in words)
        print(f"{'ok' if is_good else 'FAILED'}: {case}: {message}", flush=True)
        failed += [] if is_good else [case]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
