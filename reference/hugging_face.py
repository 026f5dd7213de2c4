"""Models of Hugging Face's transformers, as others train and save them.

    python hugging_face.py make FOLDER       random models of every family, each with tokens and the logits for them
    python hugging_face.py large FOLDER      a random Llama of half a billion parameters, in several files
    python hugging_face.py chat FOLDER       a random Llama with a tokenizer and a chat template, and conversations
    python hugging_face.py check-chat FOLDER the model that was exported to FOLDER/exported answers as it was taught to
    python hugging_face.py check FOLDER      models that were exported to FOLDER/NAME/exported give the logits beside them
"""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

COMMON = dict(vocab_size=101, hidden_size=48, intermediate_size=112, num_hidden_layers=2, num_attention_heads=6)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)


def scaled(max_position_embeddings, **rope):
    """A Llama with a rotary embedding that is scaled for long contexts. Sequences of the tests have 24 positions."""
    rope["rope_theta"] = 100.0
    return LlamaConfig(**COMMON, max_position_embeddings=max_position_embeddings, rope_parameters=rope)


CONFIGS = {
    "llama2": LlamaConfig(**COMMON, num_key_value_heads=6, max_position_embeddings=64),
    "llama3": LlamaConfig(
        **COMMON, num_key_value_heads=2, max_position_embeddings=128, rope_parameters=LLAMA3, tie_word_embeddings=True
    ),
    "mistral": MistralConfig(**COMMON, num_key_value_heads=3, head_dim=10, sliding_window=7),
    "qwen2": Qwen2Config(**COMMON, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**COMMON, num_key_value_heads=3, head_dim=12),
    "mixtral": MixtralConfig(**COMMON, num_key_value_heads=3, num_local_experts=5, num_experts_per_tok=2),
    "qwen3-moe": Qwen3MoeConfig(
        **COMMON, num_key_value_heads=3, head_dim=12, num_experts=12, num_experts_per_tok=3, moe_intermediate_size=20
    ),
    "qwen3-moe-normalized": Qwen3MoeConfig(
        **COMMON, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=28, norm_topk_prob=True
    ),
    "olmoe": OlmoeConfig(**COMMON, num_key_value_heads=3, num_experts=6, num_experts_per_tok=2),
    "gpt2": GPT2Config(vocab_size=101, n_positions=32, n_embd=48, n_layer=2, n_head=6),
    "linear": scaled(64, rope_type="linear", factor=4.0),
    "dynamic": scaled(16, rope_type="dynamic", factor=3.0),
    "yarn": scaled(64, rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    "yarn-tuned": scaled(
        64,
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=16,
        beta_fast=2.5,
        beta_slow=0.4,
        mscale=0.7,
        mscale_all_dim=1.3,
        truncate=False,
    ),
}


def logits(model, tokens):
    model.eval()
    with torch.no_grad():
        return model(tokens).logits.contiguous()


def make(folder: Path):
    for number, (name, config) in enumerate(CONFIGS.items()):
        torch.manual_seed(number)
        config._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_config(config)
        # Norms and biases begin with ones and zeros, which would hide where they are left out.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        # Several files, so that the index is read.
        model.save_pretrained(folder / name, max_shard_size="100KB")
        tokens = torch.randint(101, (2, 24))
        save_file({"tokens": tokens, "logits": logits(model, tokens)}, folder / f"{name}.safetensors")
        (folder / name / "tokenizer.json").write_text('{"stands for": "a tokenizer"}')
        print(name)


def large(folder: Path):
    torch.manual_seed(1)
    shape = dict(vocab_size=32000, hidden_size=1280, intermediate_size=3456, num_hidden_layers=24)
    config = LlamaConfig(**shape, num_attention_heads=20, num_key_value_heads=20, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="500MB")


TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] | trim }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def chat(folder: Path):
    import json

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    talks = []
    for number in range(64):
        question, answer = f"What is {number} plus {number}?", f"It is {2 * number}, and no more."
        talks.append([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    talks[0] += [{"role": "user", "content": "Thank you."}, {"role": "assistant", "content": "Ask me again."}]
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    plain.train_from_iterator((message["content"] for talk in talks for message in talk), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(3)
    config = LlamaConfig(**{**COMMON, "vocab_size": len(tokenizer)}, num_key_value_heads=3, max_position_embeddings=128)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    lines = [json.dumps({"messages": talk}) for talk in talks]
    (folder / "chat.jsonl").write_text("\n".join(lines) + "\n")
    # What counts in the first conversation, by hand: the answers with what ends them, and nothing else.
    counted = []
    for turn in (1, 3):
        before = tokenizer.apply_chat_template(talks[0][:turn], tokenize=False, add_generation_prompt=True)
        after = tokenizer.apply_chat_template(talks[0][: turn + 1], tokenize=False)
        counted += tokenizer(after[len(before) :], add_special_tokens=False)["input_ids"]
    (folder / "counted.json").write_text(json.dumps(counted))


def check_chat(folder: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "exported")
    model = AutoModelForCausalLM.from_pretrained(folder / "exported")
    talk = [{"role": "user", "content": "What is 7 plus 7?"}]
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        answer = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
    print(tokenizer.decode(answer))


def check(folder: Path):
    for name in CONFIGS:
        model = AutoModelForCausalLM.from_pretrained(folder / name / "exported", attn_implementation="eager")
        ours = load_file(folder / f"{name}.trained.safetensors")
        difference = (logits(model, ours["tokens"]) - ours["logits"]).abs().max().item()
        assert difference < 1e-4, f"{name}: logits differ by {difference}"
        assert (folder / name / "exported" / "tokenizer.json").exists(), f"{name}: no tokenizer"
        print(f"{name} {difference:.1e}")


COMMANDS = {"make": make, "large": large, "chat": chat, "check-chat": check_chat, "check": check}
COMMANDS[sys.argv[1]](Path(sys.argv[2]))
