"""Which tokens a draft may propose."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from deepspec.data.vocab import byte_level_alphabet, choose_draft_vocab, count_supervised, kept_always
from deepspec.errors import UserError
from tests.data.toy_tokenizers import INST, chatml, metaspace

TOKENIZER = chatml()
EOS = (0, 2)


def test_counting_takes_supervised_tokens_only() -> None:
    counts = count_supervised([([5, 6, 5, 7], [0, 1, 1, 1]), ([7, 7], [1, 0])], 10)
    assert counts.tolist() == [0, 0, 0, 0, 0, 1, 1, 2, 0, 0]


def test_byte_alphabet_is_the_tokenizers_own() -> None:
    assert sorted(byte_level_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert byte_level_alphabet()[ord("A")] == "A" and byte_level_alphabet()[ord(" ")] == "Ġ"


def test_bytes_and_special_tokens_are_kept_in_either_kind_of_vocabulary() -> None:
    size = len(TOKENIZER)
    kept = kept_always(TOKENIZER, EOS, size)
    assert {0, 1, 2} <= kept and len(kept) == 256 + 3
    spell = TOKENIZER("é漢🙂 x", add_special_tokens=False)["input_ids"]
    assert set(TOKENIZER.convert_tokens_to_ids(list(pre_tokenizers.ByteLevel.alphabet()))) <= kept
    assert set(spell) <= set(range(size))
    pieces = metaspace(INST)
    ids = pieces.convert_tokens_to_ids([f"<0x{value:02X}>" for value in range(256)])
    assert set(ids) | {0, 1, 2} == kept_always(pieces, (2,), len(pieces))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=60), st.integers(259, len(TOKENIZER) + 5))
def test_the_most_frequent_tokens_are_in_and_ids_ascend(tokens: list[int], size: int) -> None:
    vocab_size = len(TOKENIZER)
    counts = count_supervised([(tokens, [1] * len(tokens))], vocab_size)
    vocab = choose_draft_vocab(counts, size, TOKENIZER, EOS)
    if size >= vocab_size:
        assert vocab.target_ids is None and vocab.coverage(counts) == 1.0
        return
    assert vocab.target_ids is not None and vocab.target_ids.dtype == torch.int64
    chosen = vocab.target_ids.tolist()
    assert chosen == sorted(set(chosen)) and len(chosen) == size
    always = kept_always(TOKENIZER, EOS, vocab_size)
    often = Counter(tokens)
    others = sorted(set(range(vocab_size)) - always, key=lambda token: (-often[token], token))
    assert set(chosen) == always | set(others[: size - len(always)])
    covered = sum(count for token, count in often.items() if token in set(chosen))
    assert vocab.coverage(counts) == pytest.approx(covered / len(tokens) if tokens else 1.0)


def test_too_small_a_vocabulary_is_refused_with_the_least_size() -> None:
    counts = torch.zeros(len(TOKENIZER), dtype=torch.int64)
    with pytest.raises(UserError, match=r"vocab_size=100 is too small.*259"):
        choose_draft_vocab(counts, 100, TOKENIZER, EOS)
    assert choose_draft_vocab(counts, None, TOKENIZER, EOS).target_ids is None
