train base.toml -n 3 --dry-run --set batch.global_batch_size=64
