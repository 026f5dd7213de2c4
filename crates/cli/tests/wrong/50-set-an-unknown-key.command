train base.toml -n 2 --set optimizer.learning_rate=1e-3
