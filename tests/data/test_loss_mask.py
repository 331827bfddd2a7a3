"""The loss mask, read back as text: exactly what the assistant wrote, and the token that ends its turn."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from deepspec.data.conversation import BadRow
from deepspec.data.template import ChatTemplate, Row, check_system, given_turns, join_turns
from deepspec.errors import UserError
from tests.data.toy_tokenizers import (
    CHATML,
    DATED,
    FORCED_THINKING,
    INST,
    SPECIALS,
    THINKING,
    byte_level,
    chatml,
    gemma,
    glm,
    harmony,
    llama3,
    metaspace,
)

TALK = [
    ("user", "What is two plus two?"),
    ("assistant", "Four."),
    ("user", "Say exactly: What is two plus two?"),
    ("assistant", "What is two plus two?"),
    ("user", "Thank you."),
    ("assistant", "e"),
]


def messages(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def reader(tokenizer: PreTrainedTokenizerBase, *ends: str) -> ChatTemplate:
    return ChatTemplate(tokenizer, tokenizer.convert_tokens_to_ids(list(ends) or [tokenizer.eos_token]))


def rows_of(template: ChatTemplate, talk: list[dict[str, str]]) -> list[Row]:
    return join_turns(given_turns(template, talk), template.eos)


def masked(template: ChatTemplate, row: Row) -> list[str]:
    """The text of each run of supervised tokens."""
    assert len(row.tokens) == len(row.loss_mask)
    runs: list[list[int]] = []
    before = 0
    for token, mask in zip(row.tokens, row.loss_mask, strict=True):
        if mask and not before:
            runs.append([])
        if mask:
            runs[-1].append(token)
        before = mask
    return [template.decode(run) for run in runs]


@pytest.mark.parametrize(
    ("tokenizer", "end"),
    [
        (chatml(), "<|im_end|>"),
        (llama3(), "<|eot_id|>"),
        (gemma(), "<end_of_turn>"),
    ],
    ids=["chatml", "llama3", "gemma"],
)
def test_multi_turn_rows_supervise_the_answers_and_their_end_tokens(
    tokenizer: PreTrainedTokenizerBase, end: str
) -> None:
    template = reader(tokenizer)  # whose EOS is not the end of a turn
    talk = messages(*TALK)
    (row,) = rows_of(template, talk)
    assert masked(template, row) == [
        f"Four.{end}",
        f"What is two plus two?{end}",
        f"e{end}",
    ]
    whole = tokenizer.apply_chat_template(talk, tokenize=False)
    assert whole.startswith(template.decode(row.tokens))
    assert whole[len(template.decode(row.tokens)) :].strip() == ""


@pytest.mark.parametrize("tokenizer", [llama3(), gemma()], ids=["llama3", "gemma"])
def test_a_template_that_strips_leaves_no_blanks_in_the_mask(tokenizer: PreTrainedTokenizerBase) -> None:
    template = reader(tokenizer)
    (row,) = rows_of(template, messages(("user", " Hello there "), ("assistant", " \n I am fine \n\n")))
    (text,) = masked(template, row)
    assert text.startswith("I am fine<") and text.count("<") == 1


def test_every_turn_starts_from_the_tokens_decoding_starts_from() -> None:
    for tokenizer in (chatml(), llama3(), gemma(), harmony(), glm()):
        template = reader(tokenizer)
        talk = messages(*TALK)
        for turn, end in zip(given_turns(template, talk), (1, 3, 5), strict=True):
            expected = tokenizer.apply_chat_template(
                talk[:end], add_generation_prompt=True, return_dict=False
            )
            assert turn.prompt == expected


def test_earlier_thinking_that_the_template_drops_gives_a_row_a_turn() -> None:
    template = reader(chatml(THINKING), "<|im_end|>")
    talk = messages(
        ("user", "Hello"),
        ("assistant", "<think>\nthey greet\n</think>\n\nHello there"),
        ("user", "two plus two?"),
        ("assistant", "<think>\nfour\n</think>\n\nFour."),
    )
    first, second = rows_of(template, talk)
    assert masked(template, first) == ["<think>\nthey greet\n</think>\n\nHello there<|im_end|>"]
    assert masked(template, second) == ["<think>\nfour\n</think>\n\nFour.<|im_end|>"]
    assert "they greet" not in template.decode(second.tokens)
    assert "Hello there<|im_end|>" in template.decode(second.tokens)


def test_a_last_turn_that_ends_otherwise_gives_a_row_a_turn() -> None:
    template = reader(harmony())
    rows = rows_of(template, messages(*TALK[:4]))
    assert [masked(template, row) for row in rows] == [
        ["Four.<|return|>"],
        ["What is two plus two?<|return|>"],
    ]
    assert template.decode(rows[1].tokens).count("Four.<|im_end|>") == 1


def test_without_an_end_token_the_next_turns_marker_is_it_and_none_is_made_up() -> None:
    template = reader(glm(), "<|endoftext|>", "<|user|>")
    (row,) = rows_of(template, messages(*TALK[:4]))
    assert masked(template, row) == ["Four.<|user|>", "What is two plus two?"]
    closed = reader(glm(), "<|endoftext|>")
    (row,) = rows_of(closed, messages(*TALK[:4]))
    assert masked(closed, row) == ["Four.", "What is two plus two?"]


def test_a_token_across_the_border_of_prompt_and_answer_is_split_as_in_decoding() -> None:
    template = reader(chatml(), "<|im_end|>")
    talk = messages(("user", "Hello"), ("assistant", "\n\nFour."))
    (turn,) = given_turns(template, talk)
    assert turn.straddled
    assert turn.prompt == template.prompt(talk[:1])
    assert template.decode(turn.answer) == "\n\nFour.<|im_end|>"


def test_history_that_is_tokenised_otherwise_than_it_was_decoded_gives_a_row_a_turn() -> None:
    template = reader(llama3(gpt2=True))  # "\n\n" is one token at the end of a prompt and two before a word
    talk = messages(*TALK[:4])
    first, second = rows_of(template, talk)
    assert first.tokens[: len(template.prompt(talk[:1]))] == template.prompt(talk[:1])
    assert second.tokens[: len(template.prompt(talk[:3]))] == template.prompt(talk[:3])
    assert masked(template, first) == ["Four.<|eot_id|>"]
    assert masked(template, second) == ["What is two plus two?<|eot_id|>"]


def test_sentencepiece_style_tokens() -> None:
    template = reader(metaspace(INST))
    (row,) = rows_of(template, messages(*TALK[:4]))
    assert [text.strip() for text in masked(template, row)] == ["Four. </s>", "What is two plus two? </s>"]
    accents = messages(("user", "Grüße"), ("assistant", "Schöne Grüße"))
    (row,) = rows_of(template, accents)
    assert [text.strip() for text in masked(template, row)] == ["Schöne Grüße </s>"]


def test_a_generation_prompt_the_answer_does_not_continue_is_refused() -> None:
    template = reader(chatml(FORCED_THINKING))
    with pytest.raises(BadRow, match="does not continue the prompt"):
        given_turns(template, messages(*TALK[:2]))
    assert template.decode(template.prompt(messages(*TALK[:1]))).endswith("<think>\n")


def test_end_tokens_inside_the_answer_do_not_end_it() -> None:
    template = reader(chatml(), "<|im_end|>")
    (row,) = rows_of(template, messages(("user", "Hello"), ("assistant", "a<|im_end|>b")))
    assert masked(template, row) == ["a<|im_end|>b<|im_end|>"]


def test_a_system_prompt_the_template_refuses_or_swallows_is_an_error() -> None:
    check_system(reader(chatml()), "Be brief.")
    with pytest.raises(UserError, match=r"System role not supported.*data.system=null"):
        check_system(reader(gemma()), "Be brief.")
    with pytest.raises(UserError, match="leaves the system prompt out"):
        check_system(reader(metaspace(INST)), "Be brief.")


def test_a_base_model_without_template_reads_paragraphs_and_ends_with_eos() -> None:
    template = reader(byte_level(SPECIALS["llama2"], None, bos="<s>", eos="</s>"))
    (row,) = rows_of(template, messages(*TALK[:4]))
    assert template.plain
    assert masked(template, row) == ["Four.</s>", "What is two plus two?</s>"]
    assert template.decode(row.tokens).startswith("<s>What is two plus two?\nFour.</s>\nSay")


def test_the_date_in_a_template_does_not_move() -> None:
    template = reader(chatml(DATED))
    assert template.render(messages(*TALK[:1]), True).startswith("01 Jan 2026\n")


TEXTS = st.text(alphabet=st.sampled_from(list("ab \n.?é漢🙂<>|")), min_size=1, max_size=12).filter(str.strip)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3), st.sampled_from(["chatml", "llama3", "gemma"])
)
def test_any_texts_come_back_from_the_mask(pairs: list[tuple[str, str]], family: str) -> None:
    tokenizer, end, strips = FAMILIES[family]
    template = reader(tokenizer)
    talk = messages(*(turn for user, answer in pairs for turn in (("user", user), ("assistant", answer))))
    found = [text for row in rows_of(template, talk) for text in masked(template, row)]
    assert found == [(answer.strip() if strips else answer) + end for _, answer in pairs]


FAMILIES = {
    "chatml": (chatml(CHATML), "<|im_end|>", False),
    "llama3": (llama3(), "<|eot_id|>", True),
    "gemma": (gemma(), "<end_of_turn>", True),
}
