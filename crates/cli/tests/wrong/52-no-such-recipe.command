train nowhere.toml -n 2
