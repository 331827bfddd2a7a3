"""Answers as text while they come: whole characters only, and nothing behind a stop string."""

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"  # what a tokenizer gives for a character whose bytes are not all there yet


class TextStream:
    """Tokens → text, a piece for every token; the pieces together are the text of all tokens.

    A character stays back until all its bytes are there. Of each piece the tokens before it are decoded too, because
    some tokenizers write a word otherwise where a text begins; not the whole answer, whose cost would grow with its
    square.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.before: list[int] = []  # the last piece's tokens, shown already
        self.window: list[int] = []  # tokens whose text is not

    def add(self, token: int) -> str:
        """The text that this token completes."""
        self.window.append(token)
        piece = self._new()
        if piece.endswith(UNFINISHED):
            return ""
        if piece:  # a token without text is kept with those that follow
            self.before, self.window = self.window, []
        return piece

    def rest(self) -> str:
        """What stayed back, at the end of the answer."""
        piece, self.before, self.window = self._new(), self.window, []
        return piece

    def _new(self) -> str:
        if not self.window:
            return ""
        return self.decode([*self.before, *self.window])[
            len(self.decode(self.before)) if self.before else 0 :
        ]


class StopCut:
    """Text → the text before the first stop string; what may become the beginning of one stays back.

    stopped: a stop string was found; nothing comes after it.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.stop = [one for one in stop if one]
        self.held = ""
        self.stopped = False

    def add(self, piece: str) -> str:
        """The text that can be shown now."""
        if self.stopped:
            return ""
        text = self.held + piece
        found = [at for one in self.stop if (at := text.find(one)) >= 0]
        if found:
            self.stopped, self.held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, one) for one in self.stop), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """What stayed back, where the answer ended otherwise."""
        held, self.held = self.held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The longest proper beginning of `stop` that `text` ends with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
