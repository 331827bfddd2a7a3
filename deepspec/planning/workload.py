"""What there is to do: read off the data if they are prepared, else a sample of them is, with made-up answers.

The sample goes through the real `deepspec.data.build`, into a folder that is thrown away: template, loss mask,
packing and files are then what they will be, and only the answers' lengths are guessed. Everything is scaled from the
sample to the whole.
"""

import io
import math
import random
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deepspec.config.schema import Answers, DataConfig, Regenerate
from deepspec.data import ChatTemplate, TargetFacts, build
from deepspec.data.conversation import BadRow
from deepspec.data.dataset import DRAFT_VOCAB, load_prompts, load_rows
from deepspec.data.gather import Gathered
from deepspec.target import Target
from deepspec.target.features.estimate import Estimate, estimated
from deepspec.target.features.writer import Recipe

SAMPLE = 768  # conversations; of more, so many at even distances stand for all
FIXED = (DRAFT_VOCAB, "manifest.json")  # files whose size does not depend on the number of rows


@dataclass(frozen=True)
class Batch:
    """Requests decoded together: tokens of each prompt and answer."""

    prompts: list[int]
    answers: list[int]


@dataclass(frozen=True)
class Workload:
    """rows, held_out: packed, of the sample (of all where `done`); scale, held_scale: how many rows of the whole one of
    them stands for. batches: of the sample's regeneration. prompts: held-out ones. bytes: of the data's folder."""

    done: bool
    rows: Any
    held_out: Any
    scale: float
    held_scale: float
    counts: dict[str, int]
    bytes: int
    prompts: list[list[int]]
    batches: list[Batch] = field(default_factory=list)

    def stored(self, recipe: Recipe, hidden: int) -> Estimate:
        """A feature store of both splits."""
        return _times(estimated(self.rows, recipe, hidden), self.scale) + _times(
            estimated(self.held_out, recipe, hidden), self.held_scale
        )


class Imagined:
    """Answers of likely lengths made of the prompts' own words; keeps what it was asked.

    hazard: chance that a token ends the answer; 0: all are as long as they may be.
    """

    def __init__(self, facts: TargetFacts, longest: int, hazard: float) -> None:
        self.facts, self.longest, self.hazard = facts, longest, hazard
        self.special = set(facts.tokenizer.all_special_ids)
        self.batches: list[Batch] = []

    def __call__(self, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        answers = [self._answer(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        self.batches.append(Batch([len(one) for one in prompts], [len(one) for one in answers]))
        return answers

    def _answer(self, prompt: Sequence[int], seed: int) -> list[int]:
        most = min(self.longest, self.facts.max_positions - len(prompt))
        length = most if self.hazard <= 0 else drawn_length(random.Random(seed).random(), self.hazard)
        words = [token for token in prompt if token not in self.special] or [0]
        said = (words * (min(length, most) // len(words) + 1))[: min(length, most)]
        return [*said[:-1], self.facts.eos[0]] if length < most and self.facts.eos else said


def drawn_length(uniform: float, hazard: float) -> int:
    """A geometric length, 1 or more, by its inverse distribution."""
    return 1 + int(math.log1p(-uniform) / math.log1p(-min(hazard, 1 - 1e-9)))


def mean_length(hazard: float, longest: int) -> float:
    """Mean of lengths that end with chance `hazard` at each token and at `longest` anyway."""
    return longest if hazard <= 0 else (1 - (1 - hazard) ** longest) / hazard


def hazard_of(mean: float, longest: int) -> float:
    """The hazard with that mean, by bisection; 0 where no answer ends before its limit."""
    low, high = 0.0, 1.0
    if mean >= longest:
        return low
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_length(middle, longest) > mean else (low, middle)
    return high


def facts_of(target: Target) -> TargetFacts:
    """What preparing data needs to know."""
    return TargetFacts(
        tokenizer=target.tokenizer,
        eos=target.eos,
        vocab_size=target.vocab_size,
        max_positions=target.max_positions,
        identity=target.identity(),
    )


def first_prompts(
    gathered: Gathered, settings: DataConfig, facts: TargetFacts, count: int
) -> list[list[int]]:
    """Tokens of `count` conversations' first prompts, at even distances."""
    template = ChatTemplate(
        facts.tokenizer,
        facts.eos,
        arguments=settings.template_args,
        thinking=settings.thinking,
        tags=settings.thinking_tags,
    )
    found: list[list[int]] = []
    every = max(1, gathered.store.count() // count)
    for number, (_, bare) in enumerate(gathered.store.conversations()):
        if number % every or len(found) == count or bare.row is not None:
            continue
        try:
            prompt = template.prompt(next(bare.with_system(settings.system).prompts()), bare.tools)
        except BadRow:
            continue
        if len(prompt) <= settings.max_length:
            found.append(prompt)
    return found


def sampled(
    gathered: Gathered,
    settings: DataConfig,
    facts: TargetFacts,
    vocab_size: int | None,
    hazard: float,
    folder: Path,
) -> Workload:
    """Prepare a sample in `folder`, which must stay while the workload is used. `UserError` as preparing would raise."""
    whole = gathered.store.count()
    held = min(settings.held_out_prompts, whole // 4)
    part = _thinned(gathered, SAMPLE) / whole
    settings = replace(
        settings,
        regenerate=Regenerate.engine,
        held_out_prompts=max(1, round(held * part)) if held else 0,
        regenerated_prompts=_share(settings, part),
    )
    answers = Imagined(facts, settings.max_new_tokens, hazard)
    with redirect_stderr(io.StringIO()):  # progress of what is only a sample
        manifest = build(
            folder / "data",
            settings,
            gathered,
            facts,
            draft_vocab_size=vocab_size,
            generate=answers,
            say=lambda line: None,
        )
    counts = manifest["counts"]
    held_part = settings.held_out_prompts / held if held else 1.0
    train_part = (whole * part - settings.held_out_prompts) / (whole - held)
    totals = {
        name: round(counts["train"][name] / train_part)
        for name in ("rows", "tokens", "supervised_tokens", "documents")
    }
    totals["held_out_rows"] = round(counts["held_out"]["rows"] / held_part)
    totals["held_out_tokens"] = round(counts["held_out"]["tokens"] / held_part)
    totals["held_out_prompts"] = round(counts["held_out_prompts"] / held_part)
    sizes = {path: path.stat().st_size for path in (folder / "data").rglob("*") if path.is_file()}
    fixed = sum(size for path, size in sizes.items() if path.name in FIXED)
    return Workload(
        done=False,
        rows=load_rows(folder / "data", "train"),
        held_out=load_rows(folder / "data", "held_out"),
        scale=1 / train_part,
        held_scale=1 / held_part,
        counts=totals,
        bytes=fixed + round((sum(sizes.values()) - fixed) / part),
        prompts=[list(prompt["tokens"]) for prompt in load_prompts(folder / "data")],
        batches=answers.batches,
    )


def prepared(folder: Path, manifest: dict[str, Any]) -> Workload:
    """The data that are there. manifest: theirs."""
    counts = manifest["counts"]
    totals = {name: counts["train"][name] for name in ("rows", "tokens", "supervised_tokens", "documents")}
    totals |= {f"held_out_{name}": counts["held_out"][name] for name in ("rows", "tokens")}
    totals["held_out_prompts"] = counts["held_out_prompts"]
    return Workload(
        done=True,
        rows=load_rows(folder, "train"),
        held_out=load_rows(folder, "held_out"),
        scale=1.0,
        held_scale=1.0,
        counts=totals,
        bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        prompts=[list(prompt["tokens"]) for prompt in load_prompts(folder)],
    )


def _thinned(gathered: Gathered, most: int) -> int:
    """Remove conversations at even distances until `most` are left; how many are."""
    store = gathered.store
    numbers = [n for (n,) in store.rows("SELECT n FROM conversation ORDER BY n")]
    kept = (
        {numbers[index * len(numbers) // most] for index in range(most)}
        if len(numbers) > most
        else set(numbers)
    )
    for n in numbers:
        if n not in kept:
            store.remove(n)
    return len(kept)


def _share(settings: DataConfig, part: float) -> int | None:
    if settings.answers is not Answers.mixed or settings.regenerated_prompts is None:
        return settings.regenerated_prompts
    return round(settings.regenerated_prompts * part)


def _times(one: Estimate, factor: float) -> Estimate:
    return Estimate(*(round(factor * number) for number in vars(one).values()))
