"""Prints how long a step of DeepSpeed's CPUAdam takes, in seconds: adamw.py ELEMENTS"""

import statistics
import sys
import time

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

ROUNDS = 7


def main() -> None:
    elements = int(sys.argv[1])
    parameter = torch.nn.Parameter(torch.full((elements,), 0.5))
    optimizer = DeepSpeedCPUAdam([parameter], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, adamw_mode=True)
    parameter.grad = torch.full((elements,), 0.01)
    times = []
    # The first step allocates the moments.
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - started)
    print(statistics.median(times[1:]))


if __name__ == "__main__":
    main()
