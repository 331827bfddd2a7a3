"""OpenAI's answer objects: whole, and as chunks of a stream."""

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspec.serving.exchange import Piece

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Form:
    """Of a chat (`POST /v1/chat/completions`) or of a completion."""

    chat: bool
    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(
        self, texts: Sequence[str], finishes: Sequence[str | None], usage: dict[str, int]
    ) -> dict[str, Any]:
        """The answer in one piece; one text and finish a choice."""
        choices = []
        for index, (text, finish) in enumerate(zip(texts, finishes, strict=True)):
            said: dict[str, Any] = {"text": text}
            if self.chat:
                said = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choices.append({"index": index, **said, "logprobs": None, "finish_reason": finish})
        name = "chat.completion" if self.chat else "text_completion"
        return self._object(name, choices) | {"usage": usage}

    def opening(self, choices: int) -> list[dict[str, Any]]:
        """A chat's first chunks, which say who speaks; a completion has none."""
        delta = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk({"index": index, **delta}) for index in range(choices if self.chat else 0)]

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """A piece's text, and the end of its choice."""
        found = []
        if self.chat:
            if piece.text:
                found.append({"index": piece.choice, "delta": {"content": piece.text}})
            if piece.finish:
                found.append({"index": piece.choice, "delta": {}, "finish_reason": piece.finish})
        elif piece.text or piece.finish:
            found.append({"index": piece.choice, "text": piece.text, "finish_reason": piece.finish})
        return [self._chunk(one) for one in found]

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """The last chunk, where the client asked for it: no choices."""
        return self._object(self._stream_name, []) | {"usage": usage}

    @property
    def _stream_name(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._object(self._stream_name, [{"logprobs": None, "finish_reason": None, **choice}])

    def _object(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.id}",
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def usage_of(prompt: int, completion: int) -> dict[str, int]:
    """Tokens of the prompts, each counted once, and of all answers."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def event(content: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"
