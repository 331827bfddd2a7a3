"""Small tokenizers with the chat formats that are in use, made in-process."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "Hello there, how are you today? I am fine, thank you.",
    "What is two plus two? Two plus two is four.\n\n\n\nAnd so on.\n\n",
    "system user assistant model think answer question 0 1 2 3 4 5 6 7 8 9",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n",
] * 4

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Earlier thinking is dropped, the last turn always shows a thinking block (as Qwen3 does).
THINKING = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% set answer = m['content'].split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m['content'].split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in m['content'] else '' %}<|im_start|>assistant\n"
    "{% if loop.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ answer }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The generation prompt opens a thought that a history never shows.
FORCED_THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
# The next turn's marker ends a turn (as in GLM-4).
NO_END = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Another token ends the last turn than the earlier ones (as in gpt-oss).
TWO_ENDS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}<|message|>{{ m['content'] }}"
    "{{ '<|return|>' if loop.last and m['role'] == 'assistant' else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|message|>{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
DATED = "{{ strftime_now('%d %b %Y') }}\n" + CHATML

SPECIALS = {
    "chatml": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama3": [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ],
    "gemma": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    "glm": ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"],
    "harmony": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|message|>", "<|return|>"],
    "llama2": ["<s>", "</s>"],
}


# A run of newlines is one word whatever follows (Llama-3, Qwen); GPT-2's own words split it before a letter.
NEWLINES_TOGETHER = Regex(r"[\r\n]+| ?[^\s\p{L}\p{N}]+| ?\p{L}+|\p{N}| +")


def byte_level(
    specials: list[str],
    template: str | None,
    *,
    bos: str | None = None,
    eos: str,
    words: tuple[str, ...] = (),
    gpt2: bool = False,
) -> PreTrainedTokenizerFast:
    """Byte-level BPE with merged runs of newlines, as large vocabularies have them."""
    core = Tokenizer(models.BPE())
    split = [] if gpt2 else [pre_tokenizers.Split(NEWLINES_TOGETHER, "isolated")]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2)
    core.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(TEXT, trainer)
    core.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=template,
        bos_token=bos,
        eos_token=eos,
        clean_up_tokenization_spaces=False,
    )


def metaspace(template: str) -> PreTrainedTokenizerFast:
    """BPE with ▁ for blanks and <0xNN> for unknown bytes, as Llama-2 has."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))],
        show_progress=False,
    )
    core.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=template,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def chatml(template: str = CHATML) -> PreTrainedTokenizerFast:
    return byte_level(SPECIALS["chatml"], template, eos="<|endoftext|>", words=("<think>", "</think>"))


def llama3(gpt2: bool = False) -> PreTrainedTokenizerFast:
    return byte_level(SPECIALS["llama3"], LLAMA3, bos="<|begin_of_text|>", eos="<|end_of_text|>", gpt2=gpt2)


def gemma() -> PreTrainedTokenizerFast:
    return byte_level(SPECIALS["gemma"], GEMMA, bos="<bos>", eos="<eos>", words=("\n\n", "\n\n\n"))


def glm() -> PreTrainedTokenizerFast:
    return byte_level(SPECIALS["glm"], NO_END, eos="<|endoftext|>")


def harmony() -> PreTrainedTokenizerFast:
    return byte_level(SPECIALS["harmony"], TWO_ENDS, eos="<|return|>")
