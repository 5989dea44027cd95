"""Small tokenizers of the kinds that models come with, trained on a few sentences."""

from __future__ import annotations

from functools import cache

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from deployments.engine.tokenizer import CHATML_TEMPLATE, ChatTokenizer, byte_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "How are you? I am fine, thank you; the weather is fine today.",
    "naïve café, déjà vu: où est la bibliothèque? 東京 は 大きい 都市 です。",
    "user assistant system Answer only with the word BANANA 1234567890 <|im|> end start",
] * 4

CHATML_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

INST_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = '<<SYS>>\\n' + messages[0]['content'].strip() + '\\n<</SYS>>\\n\\n' %}"
    "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
    "{% for message in rest %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.index0 == 0 else '') + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)

THINK_TEMPLATE = (
    "{% for m in messages %}"
    "{% set content = m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'] %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)


@cache
def byte_level() -> ChatTokenizer:
    """As GPT-2, Llama 3, Qwen: merges may cross the bytes of a character. Has <think> markers."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=CHATML_SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(
        [AddedToken(marker, special=False, normalized=False) for marker in ("<think>", "</think>")]
    )
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", chat_template=THINK_TEMPLATE
    )
    return ChatTokenizer(hf, name="byte-level")


@cache
def byte_fallback() -> ChatTokenizer:
    """As Llama 2: spaces are ▁, one is put in front, unknown characters become byte tokens."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = _llama_normalizer()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    trained.train_from_iterator(CORPUS[:2], trainer)
    state = trained.get_vocab()
    vocabulary = {token: i for i, token in enumerate(sorted(state, key=lambda t: state[t]))}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=_merges(trained), unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = _llama_normalizer()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t in ("<unk>", "<s>", "</s>")]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=INST_TEMPLATE,
    )
    return ChatTokenizer(hf, name="byte-fallback")


@cache
def unigram() -> ChatTokenizer:
    """As T5 or XLM-R: a Unigram vocabulary, which spells its own control tokens from plain text."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=["<unk>", *CHATML_SPECIALS],
        unk_token="<unk>",
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        chat_template=CHATML_TEMPLATE,
    )
    return ChatTokenizer(hf, name="unigram")


@cache
def word_piece() -> ChatTokenizer:
    """As BERT: lower case, no byte for what is unknown."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=250, special_tokens=["[UNK]", *CHATML_SPECIALS], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="[UNK]",
        eos_token="<|im_end|>",
        chat_template=CHATML_TEMPLATE,
    )
    return ChatTokenizer(hf, name="word-piece")


bytes_only = cache(byte_tokenizer)

ZOO = [bytes_only, byte_level, byte_fallback, unigram, word_piece]


def _llama_normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    import json

    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [tuple(merge) for merge in merges]
