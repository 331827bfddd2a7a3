"""Text in pieces: whole characters, the same text in the end, and nothing from a stop string on."""

from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec.decoding.text import StopCut, TextStream
from tests.data.toy_tokenizers import INST, chatml, metaspace

CHATML, METASPACE = chatml(), metaspace(INST)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=30) | st.text("abé你🙂 \n", max_size=30)


@settings(max_examples=60, deadline=None)
@given(TEXTS)
def test_the_pieces_are_the_text(text: str) -> None:
    for tokenizer in (CHATML, METASPACE):
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        stream = TextStream(tokenizer.decode)
        pieces = [stream.add(token) for token in tokens]
        assert "".join(pieces) + stream.rest() == tokenizer.decode(tokens)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=24))
def test_any_tokens_give_the_text_of_them_all(tokens: list[int]) -> None:
    """Broken characters and special tokens too."""

    def decode(ids: list[int]) -> str:
        return CHATML.decode(ids, skip_special_tokens=True)

    stream = TextStream(decode)
    assert "".join(stream.add(token) for token in tokens) + stream.rest() == decode(tokens)


@settings(deadline=None)
@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_a_cut_is_before_the_first_stop_however_the_text_comes(pieces: list[str], stops: list[str]) -> None:
    cut, shown = StopCut(stops), []
    for piece in pieces:
        shown.append(cut.add(piece))
        so_far = "".join(shown)
        assert not any(stop in so_far for stop in stops)
    seen, text = "", "".join(pieces)
    for letter in text:  # the stop that is complete first, and of those the one that begins first
        seen += letter
        if found := [seen.find(stop) for stop in stops if stop in seen]:
            text = seen[: min(found)]
            break
    whole = "".join(shown) + cut.rest()
    assert cut.stopped == any(stop in "".join(pieces) for stop in stops)
    if all(len(piece) <= 1 for piece in pieces) or len({len(stop) for stop in stops}) <= 1:
        assert whole == text
    assert "".join(pieces).startswith(whole)
