"""Make the quickstart's policy: tokenizer, tiny Qwen3, warm start, saved in Hugging Face's layout.

Enters: seeds and world.py, transcripts.py. Leaves: policy/ (config.json, generation_config.json, tokenizer.json,
tokenizer_config.json, chat_template.jinja, model.safetensors, 4 MB in float32). One thread on purpose: sums have one
order, so the same machine gives the same file, and a small model gains nothing from more.

Run: python examples/quickstart/make_policy.py [FOLDER]
"""

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from renderers.qwen3 import Qwen3Renderer
from tokenizer import MARKERS, SPECIAL, VOCAB_SIZE, train_tokenizer, wrap
from tokenizers import Tokenizer, models
from transcripts import demonstrate, draw_jobs
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM
from warmstart import Stage, tiny_config, train

HERE = Path(__file__).resolve().parent
SEED = 7
TOKENIZER_EPISODES = 2000
STAGES = (
    Stage(name="single", steps=900, max_jobs=1, batch_tokens=2048, with_system=False, rate=1.0, rate_end=1.0),
    Stage(name="several", steps=800, max_jobs=3, batch_tokens=3072, with_system=False, rate=1.0, rate_end=0.5),
    Stage(name="system", steps=500, max_jobs=3, batch_tokens=2560, with_system=True, rate=0.5, rate_end=0.01),
)


def tokenizer_texts() -> Iterator[str]:
    """Transcripts as plain text, cut at special tokens."""
    cut = re.compile("|".join(re.escape(token) for token in (*SPECIAL, *MARKERS)))
    template = wrap(Tokenizer(models.BPE()))  # only its conversation form is used
    rng = Random(SEED)
    for _ in range(TOKENIZER_EPISODES):
        for conversation in demonstrate(draw_jobs(rng), rng):
            text = template.apply_chat_template(conversation.messages, tools=conversation.tools, tokenize=False)
            yield from cut.split(text)


def main(out: Path) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokenizer: PreTrainedTokenizerFast = train_tokenizer(tokenizer_texts())
    model = Qwen3ForCausalLM(tiny_config(tokenizer, VOCAB_SIZE))
    logging.info("%d tokens, %d parameters", len(tokenizer), model.num_parameters())
    train(model, Qwen3Renderer(tokenizer), STAGES, SEED)
    stops = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    model.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=stops[1], do_sample=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "policy")
