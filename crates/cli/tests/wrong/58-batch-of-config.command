config base.toml -n 3 --set batch.global=50 --set batch.micro_batches=2
