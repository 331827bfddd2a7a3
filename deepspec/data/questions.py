"""Several hundred everyday questions and instructions, written for this project (`questions.txt`)."""

import hashlib
from importlib.resources import files

from deepspec.data.conversation import Conversation, content_key, hash_order


def question_prompts(seed: int) -> tuple[list[Conversation], str]:
    """All questions, without answers, in a seeded order, and the sha256 of their file. group = itself."""
    content = (files("deepspec.data") / "questions.txt").read_bytes()
    found = []
    for line in content.decode("utf-8").splitlines():
        category, text = line.split("\t")
        messages = ({"role": "user", "content": text},)
        key = content_key(messages)
        found.append(
            Conversation(messages, id=f"question:{key}", group=key, category=category, source="questions")
        )
    found.sort(key=lambda conversation: hash_order(seed, conversation.id))
    return found, hashlib.sha256(content).hexdigest()
