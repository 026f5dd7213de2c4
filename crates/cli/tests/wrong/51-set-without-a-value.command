config base.toml --set optimizer.lr
