"""As a script: prepares short rows, few and then many, and prints the process's peak memory after each."""

import json
import resource
import sys
from pathlib import Path

from deepspec.config.schema import Answers, DataConfig
from deepspec.data import build, gather, work_folder
from tests.data.toy_target import ToyAnswers, toy_facts


def prepare(folder: Path, count: int, kind: str) -> None:
    source = folder / f"rows{count}.jsonl"
    with source.open("w") as file:
        for n in range(count):
            row: dict[str, object] = {
                "prompt": f"What is {n} and {n + 1}?",
                "response": f"That is {2 * n + 1}.",
            }
            if kind == "tokens":
                row = {"tokens": [n % 300, n // 300 % 300, *range(5, 20)], "loss_mask": [0] * 5 + [1] * 12}
            file.write(json.dumps(row | {"id": n}) + "\n")
    settings = DataConfig(prompts=str(source), answers=Answers.given, held_out_prompts=0, max_length=64)
    target, data = toy_facts(), folder / f"data{count}"
    gathered = gather(settings, work_folder(data))
    made = build(
        data,
        settings,
        gathered,
        target,
        draft_vocab_size=300,
        generate=ToyAnswers(target),
        say=lambda _: None,
    )
    assert made["counts"]["train"]["documents"] == count


if __name__ == "__main__":
    scale = 1 if sys.platform == "darwin" else 1024
    for size in sys.argv[3:]:
        prepare(Path(sys.argv[1]), int(size), sys.argv[2])
        print("MiB:", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale >> 20)
