config --schema base.toml
