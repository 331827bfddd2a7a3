"""What a reader needs beside every number, and what a reader must be warned of."""

from collections.abc import Sequence

from deepspec.config.schema import Config, DecodeConfig
from deepspec.decoding.trees import longest_path, size_of
from deepspec.drafts.contract import DynamicTree, StaticTree
from deepspec.evaluation.baselines import OURS
from deepspec.evaluation.machine import describe_machine
from deepspec.evaluation.result import Baseline, Conditions, Noise, PromptRecord, ThreadSpeed
from deepspec.evaluation.subject import Papers
from deepspec.evaluation.summary import seconds_a_token
from deepspec.target import Target


def conditions_of(
    config: Config,
    target: Target,
    papers: Papers,
    fastest: Baseline,
    noise: Noise,
    *,
    k: int,
    load_before: Sequence[float],
    sweep: tuple[int, int] = (0, 0),
    processes: int = 1,
    resumed: int = 0,
    threads: Sequence[ThreadSpeed] = (),
) -> Conditions:
    """The conditions of a finished run. fastest: the headline's denominator. sweep: how many prompts it had, and how
    many of them the main run too."""
    settings, decode = config.evaluate, config.decode
    return Conditions(
        dtype=str(target.dtype).removeprefix("torch."),
        attention=str(getattr(target.model.config, "_attn_implementation", "unknown")),
        k=k,
        rule=rule_words(decode),
        batch_size=1,
        temperature=decode.temperature,
        max_new_tokens=decode.max_new_tokens,
        prompt_source=papers.prompt_source,
        sweep_prompts=sweep[0],
        sweep_overlap=sweep[1],
        excluded=papers.excluded,
        repeats=settings.repeats,
        resamples=settings.bootstrap,
        seed=decode.seed,
        price_per_hour=settings.price_per_hour,
        fastest_plain=fastest_words(fastest, settings.baselines),
        machine=describe_machine(target.device, load_before),
        noise=noise,
        processes=processes,
        resumed=resumed,
        threads=list(threads),
    )


def judge_headline(records: Sequence[PromptRecord], baselines: Sequence[Baseline], dtype: str) -> None:
    """The headline is against the plain decoding that was fastest on all prompts, not on the first few.

    Where that is the same loop (in the target's `dtype`) after all, the third way's times leave the records.
    """
    ours = seconds_a_token([d for record in records for d in record.plain])
    theirs = seconds_a_token([d for record in records for d in record.fastest])
    if ours is None or theirs is None or theirs <= ours:
        return
    for baseline in baselines:
        if baseline.chosen:
            baseline.note = f"on all prompts {1 / theirs:.2f} tokens a second, the same loop {1 / ours:.2f}"
        baseline.chosen = (baseline.decoder, baseline.dtype) == (OURS, dtype)
    for record in records:
        record.fastest = []


def fastest_words(chosen: Baseline, compared: bool) -> str:
    """What the headline is against, in words that follow "than"."""
    name = "the same loop without a draft" if chosen.decoder == OURS else chosen.decoder
    if compared:
        return f"the fastest plain decoding tried ({name}, {chosen.dtype})"
    return f"plain decoding by {name} ({chosen.dtype}; no other was tried)"


def rule_words(decode: DecodeConfig) -> str:
    """The rule that `auto` means, for the shape that is asked for."""
    if decode.tree.value != "none":
        kind = "greedy" if decode.temperature == 0 else f"{decode.children.value}-children"
        return f"{kind} {decode.tree.value}-tree"
    if decode.rule.value != "auto":
        return decode.rule.value
    return "greedy" if decode.temperature == 0 else "block"


def warnings_of(
    records: Sequence[PromptRecord],
    longest_row: int | None,
    tree: StaticTree | DynamicTree | None,
    asked: str,
    k: int,
) -> list[str]:
    """What the records themselves give reason to say. longest_row: tokens of the draft's longest training row, None:
    not known. asked: the kind of `tree`, as configured."""
    return [*_chains_for_trees(records, tree, asked, k), *_beyond_training(records, longest_row)]


def _beyond_training(records: Sequence[PromptRecord], longest: int | None) -> list[str]:
    """Texts longer than any row the draft was trained on."""
    if longest is None:
        return []
    lengths = [r.prompt_tokens + max(len(d.tokens) for d in r.speculative) for r in records]
    longer = sum(length > longest for length in lengths)
    if not longer:
        return []
    return [
        f"{longer} of {len(records)} prompts with their answers are longer than the longest row the draft was "
        f"trained on ({longest} tokens, data.max_length): see the acceptance by context length."
    ]


def _chains_for_trees(
    records: Sequence[PromptRecord], tree: StaticTree | DynamicTree | None, asked: str, k: int
) -> list[str]:
    """A draft that cannot branch takes no notice of `decode.tree`; whoever reads the result should."""
    rounds = [r for record in records for d in record.speculative for r in d.rounds if not r.cut]
    if tree is None or size_of(tree) == longest_path(tree) or any(r.scheduled != r.verified for r in rounds):
        return []
    return [f"decode.tree={asked} was asked for, and this draft proposed chains of up to {k} tokens."]
