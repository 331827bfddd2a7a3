"""As a script: prepares data in several processes that meet at a barrier, as ranks of a launch do.

`python -m tests.data.sharing FOLDER PROMPTS '[[NAME, PROCESSES, KILL_AT], ...]'`: one after the other, into
FOLDER/NAME/data. The last process kills itself when it would make its batch number KILL_AT (null: never); what waits
for it is then killed too, as a launcher does.
"""

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

from deepspec.config.schema import Answers, DataConfig
from deepspec.data import build, gather, sharing, work_folder
from tests.data.toy_target import ToyAnswers, toy_facts

TARGET = toy_facts()


def prepare(folder: Path, prompts: str, rank: int, size: int, barrier: Any, kill_at: int | None) -> int:
    sharing.CHUNK = 4  # so that there are parts enough for all
    settings = DataConfig(
        prompts=prompts,
        answers=Answers.mixed,
        regenerated_prompts=14,
        held_out_prompts=4,
        max_length=128,
        batch_size=3,
        max_new_tokens=20,
        near_duplicates=0.95,
        languages=["en"],
        redact=True,
        temperature=1.0,
        augment=[{"name": "typos"}, {"name": "paraphrase", "probability": 0.5}],
    )
    work = work_folder(folder)
    group = sharing.Group(rank, size, barrier.wait)
    answers = ToyAnswers(TARGET, kill_at if rank == size - 1 else None)
    build(
        folder,
        settings,
        gather(settings, work, group),
        TARGET,
        draft_vocab_size=300,
        generate=answers,
        group=group,
        say=lambda _: None,
    )
    return len(answers.batches)


def one(*arguments: Any, made: Any) -> None:
    made.put(prepare(*arguments))


def together(place: Path, source: str, processes: int, kill_at: int | None) -> dict[str, list[int]]:
    """Prepare in forks; how they ended, and how many batches each one made that came to its end."""
    fork = multiprocessing.get_context("fork")
    meeting, counts = fork.Barrier(processes), fork.SimpleQueue()
    children = [
        fork.Process(
            target=one, args=(place, source, rank, processes, meeting, kill_at), kwargs={"made": counts}
        )
        for rank in range(processes)
    ]
    for child in children:
        child.start()
    children[-1].join(120)
    if children[-1].exitcode != 0:
        for child in children:
            child.kill()
    for child in children:
        child.join(120)
    ends = [child.exitcode if child.exitcode is not None else 1 for child in children]
    return {"ends": ends, "made": [counts.get() for end in ends if end == 0]}


if __name__ == "__main__":
    for name, number, kill in json.loads(sys.argv[3]):
        print(json.dumps(together(Path(sys.argv[1]) / name / "data", sys.argv[2], number, kill)), flush=True)
