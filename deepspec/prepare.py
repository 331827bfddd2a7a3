"""`python -m deepspec.prepare +recipe=…`: prompts to a data artifact, with the target's own answers.

Any number of processes may make it together (torchrun, `accelerate launch`); it is the same for each.
"""

if __name__ == "__main__":
    from deepspec.config.app import start

    start("prepare")  # before the imports below, which take seconds

import json
import shutil
from dataclasses import replace
from pathlib import Path

from deepspec.artifacts import MANIFEST, write_json
from deepspec.config.app import command
from deepspec.config.schema import Config, Dtype, TargetConfig
from deepspec.data import TargetFacts, build, gather, work_folder
from deepspec.data.answers import Generate
from deepspec.data.audit import write_audit
from deepspec.data.sharing import Group
from deepspec.data.store import store_file
from deepspec.decoding import Engine
from deepspec.decoding.request import Request, Sampling
from deepspec.drafts.registry import check_loss_parts, check_target
from deepspec.errors import UserError
from deepspec.evaluation.sharing import sharing
from deepspec.target import Target, load_target

SETTLED = "target.json"


def run(config: Config) -> Path:
    """Make `<out>/data` unless it is complete already; its path. `UserError` for what a person can mend."""
    folder = Path(config.out) / "data"
    with sharing(config) as group:
        try:
            _prepare(config, folder, group)
        except UserError:
            _leave_only_answers(work_folder(folder), group)
            raise
    return folder


def _leave_only_answers(work: Path, group: Group) -> None:
    """Of a refused run only finished answers, and parts that processes share, are of use to the next one."""
    store_file(work, group.rank).unlink(missing_ok=True)
    if work.is_dir() and {path.name for path in work.iterdir()} <= {SETTLED}:
        shutil.rmtree(work, ignore_errors=True)


def _prepare(config: Config, folder: Path, group: Group) -> None:
    gathered = gather(config.data, work_folder(folder), group)
    target = _load(config.target, folder, group)
    _check_later_stages(config, target)
    facts = TargetFacts(
        tokenizer=target.tokenizer,
        eos=target.eos,
        vocab_size=target.vocab_size,
        max_positions=target.max_positions,
        identity=target.identity(),
    )
    build(
        folder,
        config.data,
        gathered,
        facts,
        draft_vocab_size=getattr(config.draft, "vocab_size", None),
        generate=answerer(target, config),
        group=group,
        overwrite=config.overwrite,
        made_by=command("prepare"),
        retry_errors=config.retry_errors,
    )
    if config.audit and group.rank == 0:
        print(
            f"audit     {write_audit(folder, target.tokenizer, folder.parent / 'audit.html', command('prepare'))}"
        )


def _check_later_stages(config: Config, target: Target) -> None:
    """`UserError`, before anything is generated, for what training and evaluation will ask of this target."""
    check_target(config.draft, target)
    check_loss_parts(config.draft, config.train.loss)
    if config.decode.max_new_tokens >= target.max_positions:
        raise UserError(
            f"decode.max_new_tokens={config.decode.max_new_tokens} leaves no room for a prompt: {target.name} takes "
            f"{target.max_positions} tokens. Lower it."
        )


def _load(config: TargetConfig, folder: Path, group: Group) -> Target:
    """The target; with dtype=auto, in the format an earlier run for this folder has settled on.

    The measurement may fall the other way on a busy machine, and answers of two formats are neither the same
    answers nor resumable. The first process settles it for all.
    """
    if group.rank > 0:
        group.wait()
    settled = work_folder(folder) / SETTLED
    if config.dtype is Dtype.auto:
        known = _known_dtypes(folder, settled)
        if config.name in known:
            config = replace(config, dtype=Dtype(known[config.name]))
    target = load_target(config)
    settled.parent.mkdir(parents=True, exist_ok=True)
    if group.rank == 0:
        write_json(settled, {target.name: str(target.dtype).removeprefix("torch.")})
        group.wait()
    return target


def _known_dtypes(folder: Path, settled: Path) -> dict[str, str]:
    """Target name → dtype, of a finished artifact or of a run that was stopped."""
    try:
        if settled.is_file():
            return dict(json.loads(settled.read_text(encoding="utf-8")))
        identity = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["inputs"]["target"]
        return {identity["name"]: identity["dtype"].removeprefix("torch.")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def answerer(target: Target, config: Config) -> Generate:
    """The target's own answers by plain decoding, `data.batch_size` at a time."""
    engine = Engine(target, max_batch_size=config.data.batch_size)
    sampling = Sampling(temperature=config.data.temperature, top_p=config.data.top_p)

    def generate(prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        requests = [
            Request(
                tokens=prompt,
                max_new_tokens=min(config.data.max_new_tokens, target.max_positions - len(prompt)),
                sampling=sampling,
                seed=seed,
                eos=target.eos,
                id=str(index),
            )
            for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        return [result.tokens for result in engine.generate(requests)]

    return generate
