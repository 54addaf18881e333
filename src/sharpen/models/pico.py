"""`pico`: a random two-layer Llama with a byte-level tokenizer, built offline in a second.

It knows nothing; it is for tests, benchmarks and trying a recipe's plumbing. Its chat template is
ours. `find` builds it under the name `pico`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sharpen.models import quiet_transformers
from sharpen.render import hermes_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_END_OF_TEXT = "<|endoftext|>"
_TURN_START = "<|im_start|>"
_TURN_END = "<|im_end|>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per byte, and the chat markers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    markers = (_END_OF_TEXT, _TURN_START, _TURN_END)
    backend.add_special_tokens([AddedToken(text, special=True) for text in markers])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=_END_OF_TEXT,
        pad_token=_END_OF_TEXT,
        eos_token=_TURN_END,
        chat_template=hermes_template(),
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )


def build_pico(folder: Path, seed: int = 0) -> None:
    """Write pico's weights, config and tokenizer into `folder`."""
    import torch

    transformers = quiet_transformers()
    tokenizer = byte_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):  # leaves the caller's random state alone
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
