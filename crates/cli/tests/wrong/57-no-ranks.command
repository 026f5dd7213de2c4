train base.toml -n 0
