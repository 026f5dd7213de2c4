train base.toml -n 2 --set optimizer.rate=1e-3
