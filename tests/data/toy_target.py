"""A target that needs no model: answers are a function of prompt and seed. As a script: a run to kill."""

import os
import random
import signal
import sys
from pathlib import Path

from deepspec.config.schema import Answers, DataConfig
from deepspec.data import TargetFacts, build, gather
from tests.data.toy_tokenizers import chatml

END = "<|im_end|>"


def toy_facts(max_positions: int = 512) -> TargetFacts:
    tokenizer = chatml()
    return TargetFacts(
        tokenizer=tokenizer,
        eos=(tokenizer.convert_tokens_to_ids(END), tokenizer.convert_tokens_to_ids("<|endoftext|>")),
        vocab_size=len(tokenizer) + 3,
        max_positions=max_positions,
        identity={"name": "toy", "weights": "0" * 64},
    )


class ToyAnswers:
    """Letters, 3 to 20 of them, ended unless there are 20. Counts its calls; dies in the call `kill_at`."""

    def __init__(self, facts: TargetFacts, kill_at: int | None = None) -> None:
        self.facts = facts
        self.kill_at = kill_at
        self.batches: list[list[list[int]]] = []
        self.seeds: list[int] = []

    def __call__(self, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        if len(self.batches) == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.batches.append(prompts)
        self.seeds += seeds
        return [self.answer(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]

    def answer(self, prompt: list[int], seed: int) -> list[int]:
        draw = random.Random(f"{prompt} {seed}")
        letters = self.facts.tokenizer.convert_tokens_to_ids(list("abcdefgh"))
        length = draw.randint(3, 20)
        return draw.choices(letters, k=length) + ([self.facts.eos[0]] if length < 20 else [])


if __name__ == "__main__":
    folder, prompts, kill_at = sys.argv[1:]
    target = toy_facts()
    answers = ToyAnswers(target, int(kill_at) if kill_at != "never" else None)
    chosen = DataConfig(
        prompts=prompts, answers=Answers.regenerated, held_out_prompts=6, max_length=128, batch_size=4
    )
    build(Path(folder), chosen, gather(chosen), target, draft_vocab_size=300, generate=answers)
    print("batches made:", len(answers.batches))
