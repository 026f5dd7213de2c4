"""Compiles small random models of many architectures. The tool's self-check compares each with transformers.

    python architectures.py OUT [NAME ...]      writes OUT/NAME for each; all of them without names

Prints a line for each, with the tool's own, and fails at the end if one failed.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
HERE = Path(__file__).parent
SIZES = dict(vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
GROUPED = dict(SIZES, num_key_value_heads=2)
TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)


def config(name):
    import transformers as t

    match name:
        case "llama":
            return t.LlamaConfig(**GROUPED)
        case "mistral":
            return t.MistralConfig(**GROUPED, sliding_window=16)
        case "qwen2":
            return t.Qwen2Config(**GROUPED, tie_word_embeddings=True)
        case "qwen3":
            return t.Qwen3Config(**GROUPED, head_dim=16)
        case "gemma2":
            layers = ["sliding_attention", "full_attention"]
            return t.Gemma2Config(**GROUPED, head_dim=16, sliding_window=16, layer_types=layers, query_pre_attn_scalar=16)
        case "gemma3":
            layers = ["sliding_attention", "full_attention"]
            return t.Gemma3TextConfig(**GROUPED, head_dim=16, sliding_window=16, layer_types=layers)
        case "phi3":
            return t.Phi3Config(**GROUPED, **TOKENS)
        case "gpt2":
            return t.GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=64)
        case "gpt_neox":
            return t.GPTNeoXConfig(**SIZES, max_position_embeddings=64)
        case "olmo2":
            return t.Olmo2Config(**GROUPED, **TOKENS)
        case "bert":
            return t.BertConfig(**SIZES, max_position_embeddings=64, type_vocab_size=2)


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "bert": "BertForMaskedLM",
}
BF16, SELECTIVE = ["--dtype", "bf16"], ["--activation-checkpointing", "selective"]
CASES = {
    **{name: (name, []) for name in ARCHITECTURES},
    "llama-bf16": ("llama", BF16),
    "qwen3-bf16": ("qwen3", BF16),
    "qwen2-bf16": ("qwen2", BF16),
    "llama-selective": ("llama", SELECTIVE),
    "qwen3-selective": ("qwen3", SELECTIVE),
    "llama-bf16-selective": ("llama", BF16 + SELECTIVE),
    "llama-selective-whole": ("llama", SELECTIVE + ["--chunk-rows", "0"]),
    "vision_transformer": ("vision_transformer.py", []),
    "convolutional": ("convolutional.py", []),
}


def compile_case(case, out):
    model, options = CASES[case]
    if model.endswith(".py"):
        path = HERE.parent / "examples" / model
    else:
        path = out / ".configs" / model
        if not path.exists():
            made = config(model)
            made.architectures = [ARCHITECTURES[model]]
            made.save_pretrained(path)
        # 48 rows do not divide 64 tokens: the last chunk is padded.
        options = ["--micro-batch-size", "2", "--seq-len", "32", "--chunk-rows", "48", *options]
    command = [sys.executable, "-m", "shardwise_compile", str(path), "--out", str(out / case), "--expected", *options]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main(out, cases):
    failed = []
    for case in cases or CASES:
        started = time.perf_counter()
        run = compile_case(case, out)
        lines = run.stdout.strip().splitlines()
        result = next((line[10:] for line in lines if "self-check: loss off" in line), lines[-1] if lines else "nothing printed")
        state = "FAILED" if run.returncode else "ok"
        print(f"{case}: {state} in {time.perf_counter() - started:.0f} s: {result}", flush=True)
        if run.returncode:
            (out / f"{case}.log").write_text(run.stdout)
            failed.append(case)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
