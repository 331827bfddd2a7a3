"""As a script: prepares data in several processes that meet at a barrier, as ranks of a launch do.

`python -m tests.data.sharing FOLDER PROMPTS PROCESSES KILL_AT`: the last process kills itself when it would make
its answers number KILL_AT ("never"); what waits for it is then killed too, as a launcher does. Prints the number of
batches that each process made.
"""

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


if __name__ == "__main__":
    place, source, processes, kill = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    fork = multiprocessing.get_context("fork")
    meeting, counts = fork.Barrier(processes), fork.SimpleQueue()
    last = None if kill == "never" else int(kill)
    children = [
        fork.Process(
            target=one, args=(place, source, rank, processes, meeting, last), kwargs={"made": counts}
        )
        for rank in range(processes)
    ]
    for child in children:
        child.start()
    children[-1].join(60)
    if children[-1].exitcode != 0:
        for child in children:
            child.kill()
    for child in children:
        child.join(60)
    print([child.exitcode for child in children], sorted(counts.get() for c in children if c.exitcode == 0))
