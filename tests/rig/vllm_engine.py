"""An offline vLLM engine, as a program for the engine's own environment (no package of the tests is there).

    vllm_engine.py make DIRECTORY SEED      a small checkpoint with a tokenizer, made on the spot
    vllm_engine.py run MODEL OPTIONS        an engine; OPTIONS is JSON for vllm.LLM

`run` prints `TOKENS [[…], …]` (greedy, of two prompts), and then obeys one word a line from stdin: `sleep`, `wake`, `reload`;
each is answered by a line. It ends with its stdin.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PROMPTS = ["hello", "weights"]
TOKENS = 8


def make(directory: Path, seed: int) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    words = ["<s>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, [], unk_token="<unk>"))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.save_pretrained(directory)


def run(model: str, options: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        disable_log_stats=True,
        **options,
    )
    greedy = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)

    tokens = [list(one.outputs[0].token_ids) for one in engine.generate(PROMPTS, greedy, use_tqdm=False)]
    print("TOKENS", json.dumps(tokens), flush=True)
    for line in sys.stdin:
        word = line.strip()
        if word == "sleep":
            engine.sleep(level=1)
        elif word == "wake":
            engine.wake_up()
        elif word == "reload":
            engine.collective_rpc("reload_weights")
        print("DONE", word, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        run(sys.argv[2], json.loads(sys.argv[3]))
