"""The gloo side of the benchmark of collectives: comm_gloo.py RANKS BYTES REPEATS.

Prints what bench-comm prints: for each call, the operation and the seconds of the slowest rank.
"""

import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank_main(rank: int, ranks: int, bytes_: int, repeats: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    part_len = bytes_ // 4 // ranks
    whole = torch.full((part_len * ranks,), rank + 1.0)
    part = torch.zeros(part_len)
    for repeat in range(repeats + 1):
        for verb in ("reduce-scatter", "all-gather"):
            dist.barrier()
            started = time.perf_counter()
            if verb == "reduce-scatter":
                dist.reduce_scatter_single(part, whole)
            else:
                dist.all_gather_single(whole, part)
            seconds = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            if rank == 0 and repeat > 0:
                print(verb, seconds.item(), flush=True)
        assert torch.all(whole == ranks * (ranks + 1) / 2), "the sums are wrong"
        whole.fill_(rank + 1.0)
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks, bytes_, repeats = map(int, sys.argv[1:])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(ranks, bytes_, repeats, os.path.join(folder, "store")), nprocs=ranks)
