train base.toml -n 3 --dry-run --set batch.global=64
