train base.toml -n 2 --set optimizer.lr=1e-3
