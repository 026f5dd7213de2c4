train base.toml -n 2 --deepspeed offload.json
