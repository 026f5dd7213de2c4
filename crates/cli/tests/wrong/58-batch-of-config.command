config base.toml -n 3 --set batch.global_batch_size=50 --set batch.gradient_accumulation_steps=2
