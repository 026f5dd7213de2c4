config base.toml --deepspeed nowhere.json
