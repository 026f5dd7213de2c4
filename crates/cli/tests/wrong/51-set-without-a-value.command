config base.toml --set optimizer.rate
