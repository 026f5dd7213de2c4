"""Models of Hugging Face's transformers: how to build one from a config, and how to run it for training."""

import contextlib
import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from .errors import CompileError, quiet  # noqa: E402
from .source import Source  # noqa: E402


def load(path: Path, micro_batch_size, seq_len):
    """Builds the model of a folder or a config.json with random weights. The folder's weights are read only if asked for."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    # Every family has its own names: attention_dropout, resid_pdrop, hidden_dropout_prob, ...
    for key, value in config.to_dict().items():
        if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float):
            setattr(config, key, 0.0)
    architecture = (config.architectures or ["ForCausalLM"])[0]
    auto = transformers.AutoModelForCausalLM
    if "MaskedLM" in architecture:
        auto = transformers.AutoModelForMaskedLM
    elif "CausalLM" not in architecture and "LMHead" not in architecture:
        raise CompileError(f"{path}: {architecture} is neither a causal nor a masked language model")
    with quiet():
        try:
            # The scores of Gemma 2 are capped, which PyTorch's fused attention does not do.
            is_capped = getattr(config, "attn_logit_softcapping", None) is not None
            model = auto.from_config(config, attn_implementation="eager" if is_capped else "sdpa")
        except ValueError:
            model = auto.from_config(config, attn_implementation="eager")
    inputs, targets = random_batch(config.vocab_size, micro_batch_size, seq_len, auto is transformers.AutoModelForMaskedLM)
    folder = path if path.is_dir() else path.parent
    has_weights = any(folder.glob("*.safetensors"))
    if not has_weights and any(folder.glob("pytorch_model*.bin")):
        raise CompileError(f"{folder} has weights in PyTorch's old format; save them as safetensors")
    return Source(
        model=model.float(),
        run=run,
        loss=loss,
        inputs=inputs,
        targets=targets,
        is_text=True,
        keep_buffers=True,
        description={"architecture": type(model).__name__, "transformers": transformers.__version__},
        initializer_range=getattr(config, "initializer_range", None),
        config=json.loads((path / "config.json" if path.is_dir() else path).read_text()),
        weights=(lambda: auto.from_pretrained(folder, dtype=torch.float32).state_dict()) if has_weights else None,
    )


def random_batch(vocab_size, micro_batch_size, seq_len, is_masked):
    """Tokens for the self-check. Some targets do not count: a few in a causal model, most in a masked one."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randint(vocab_size, (2, micro_batch_size, seq_len), generator=generator).unbind()
    counts = torch.rand(targets.shape, generator=generator) < (0.15 if is_masked else 0.9)
    counts[0, 0] = True
    return inputs.contiguous(), torch.where(counts, targets, -100)


def run(model, inputs):
    with plain_attention():
        return model(inputs, use_cache=False).logits


def loss(logits, targets):
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


@contextlib.contextmanager
def plain_attention():
    """Lets a traced model use `is_causal` instead of a mask, as it does when it is not traced.

    While exporting, transformers builds masks that are right for every length and for packed sequences. Our shapes are fixed
    and our sequences are not packed. It also repeats keys and values here: attention with grouped heads has no fused kernel on
    CPUs.
    """
    from transformers import masking_utils
    from transformers.integrations import sdpa_attention

    patches = [
        (masking_utils, "is_torchdynamo_exporting", lambda: False),
        (masking_utils, "find_packed_sequence_indices", lambda position_ids: None),
        (sdpa_attention, "use_gqa_in_sdpa", lambda *_: False),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in patches]
    try:
        for module, name, function in patches:
            setattr(module, name, function)
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)
