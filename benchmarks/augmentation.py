"""What augmentations of the prompts are worth: one head trained without and with each, τ on the same held-out prompts.

    python -m benchmarks.augmentation --prompts questions.jsonl --steps 300 --out runs/augmentation \\
        [--recipe augmentation] [--with typos synonyms '{name: rules, probability: 0.5}' ...] [--tiny]

Every run prepares its own data (the same prompts, the same split; with an augmentation, the changed prompts beside
them, all answered by the target), trains for the same number of optimiser steps from the same first weights, and is
evaluated greedily with chains of K tokens. Held-out prompts are never changed, so that τ and its difference from the
head without augmentation are compared prompt by prompt. A stage that is done is not done again: interrupted, or
started with more augmentations, the command goes on. Writes OUT/augmentation.json and OUT/augmentation.md.

One seed of training is one draw: the intervals are over prompts and say nothing of another seed. --seeds trains each
head that many times over, and the prompts' tokens and rounds are summed over the seeds.
"""

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.augmentation_tables import compared, markdown
from benchmarks.stages import run_stage
from deepspec.artifacts import differences, write_json
from deepspec.data.augment import read_augmentations
from deepspec.errors import UserError
from deepspec.evaluation.result import load_result

WITHOUT = "none"
OFFLINE = ("typos", "synonyms", "truncate", "system", "rename", "rules")
ASKED = ("paraphrase", "back_translation")  # of the target itself


def main(arguments: Sequence[str] | None = None) -> None:
    options = _arguments(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    tiny = _tiny(options) if options.tiny else []
    _settle(options)
    entries = {WITHOUT: None, **_entries(options.augmentations)}
    found = []
    for name, entry in entries.items():
        for seed in range(options.seeds):
            _measure(name, entry, seed, options, tiny)
        found.append(_of(name, entry, options))
        rows = compared(found)
        write_json(options.out / "augmentation.json", {"augmentations": rows})
        (options.out / "augmentation.md").write_text(markdown(rows), encoding="utf-8")
    print(markdown(rows))


def _entries(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Augmentations as the configuration has them, by a name for their folders."""
    found: dict[str, dict[str, Any]] = {}
    for text in given:
        content = yaml.safe_load(text)
        entry = {"name": content} if isinstance(content, str) else content
        try:
            read_augmentations([entry])
        except (UserError, AttributeError) as error:
            raise SystemExit(f"error: --with {text!r}: {error}") from error
        name = "_".join([entry["name"], *(f"{key}{value}" for key, value in entry.items() if key != "name")])
        found["".join(c if c.isalnum() or c in "._-" else "-" for c in name)] = entry
    return found


def _override(entry: Mapping[str, Any]) -> str:
    """An entry in Hydra's grammar, which takes no quoted keys."""
    return "{" + ",".join(f"{key}: {json.dumps(value)}" for key, value in entry.items()) + "}"


def _settle(options: argparse.Namespace) -> None:
    """What all heads have in common; SystemExit where those in the folder were made with something else."""
    now = {
        "recipe": options.recipe,
        "prompts": str(options.prompts),
        "steps": options.steps,
        "k": options.k,
        "overrides": options.overrides,
        "tiny": options.tiny,
    }
    path = options.out / "settings.json"
    if path.is_file():
        difference = differences(json.loads(path.read_text(encoding="utf-8")), now)
        if difference:
            raise SystemExit(
                f"error: {options.out} was made with other settings ({difference}): choose another --out."
            )
    write_json(path, now)


def _measure(
    name: str,
    entry: Mapping[str, Any] | None,
    seed: int,
    options: argparse.Namespace,
    tiny: Sequence[str],
) -> None:
    """One head: its data, which all seeds share, its training, its evaluation."""
    out, result = _folder(name, seed, options), _result(name, seed, options)
    if result.is_file():
        return
    settings = [
        *([f"data.prompts={options.prompts}"] if options.prompts else []),
        f"train.max_steps={options.steps}",
        "train.epochs=1000000",
        f"train.seed={seed}",
        "evaluate.sweep=[]",
        "evaluate.baselines=false",
        "decode.temperature=0",
        f"decode.k={options.k}",
        *tiny,
        *options.overrides,
        f"data.augment=[{_override(entry) if entry else ''}]",
    ]
    data = _folder(name, 0, options) / "data"
    if seed and not (out / "data").exists():
        out.mkdir(parents=True, exist_ok=True)
        partial = out / ".data.copy"
        shutil.copytree(data, partial, dirs_exist_ok=True)
        partial.replace(out / "data")
    for stage in ("prepare", "train", "evaluate"):
        run_stage(stage, options.recipe, out, settings)
    shutil.copy(out / "evaluation" / "result.json", result.with_suffix(".partial"))
    result.with_suffix(".partial").replace(result)


def _of(name: str, entry: Mapping[str, Any] | None, options: argparse.Namespace) -> dict[str, Any]:
    """What the stages' own files say: counts of the data, and each prompt's tokens and rounds over all seeds."""
    manifest = json.loads((_folder(name, 0, options) / "data" / "manifest.json").read_text(encoding="utf-8"))
    noted = manifest["counts"]["noted"]
    prompts: dict[str, list[int]] = {}
    for seed in range(options.seeds):
        result = load_result(_result(name, seed, options))
        for record in result.records:
            sums = prompts.setdefault(f"{record.id} {record.turn}", [0, 0])
            rounds = [one for decoding in record.speculative for one in decoding.rounds]
            sums[0] += sum(one.committed for one in rounds)
            sums[1] += len(rounds)
    return {
        "name": name,
        "entry": entry,
        "target": result.target["name"],
        "recipe": options.recipe,
        "steps": options.steps,
        "seeds": options.seeds,
        "k": result.conditions.k,
        "max_new_tokens": result.conditions.max_new_tokens,
        "added": sum(count for key, count in noted.items() if key.startswith("prompts added by ")),
        "prompts": prompts,
    }


def _folder(name: str, seed: int, options: argparse.Namespace) -> Path:
    place: Path = options.out / (f"{name}-seed{seed}" if seed else name)
    return place


def _result(name: str, seed: int, options: argparse.Namespace) -> Path:
    folder = _folder(name, seed, options)
    return folder.with_name(f"{folder.name}.result.json")


def _tiny(options: argparse.Namespace) -> list[str]:
    """A random target of a few thousand weights, and settings under which all is done in minutes."""
    import torch
    import transformers

    from tests.data.toy_tokenizers import chatml

    folder = options.out / "tiny_target"
    if not (folder / "config.json").is_file():
        tokenizer = chatml()
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.3,
            eos_token_id=tokenizer.eos_token_id,
        )
        tokenizer.save_pretrained(folder)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    options.steps = min(options.steps, 3)
    return [
        *("target=hf", f"target.path={folder}", "target.name=tiny", "target.dtype=float32"),
        *("target.device=cpu", "draft.vocab_size=null", "draft.ttt_steps=2", "data.max_length=256"),
        *("data.builtin_prompts=40", "data.held_out_prompts=8", "data.max_new_tokens=16"),
        *(
            "evaluate.max_prompts=8",
            "decode.max_new_tokens=16",
            "evaluate.threads=1",
            "train.eval_every=1000",
        ),
    ]


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="augmentation", help="of the head; its data.augment is replaced")
    parser.add_argument("--prompts", type=Path, help="a file of prompts beside the recipe's built-in ones")
    parser.add_argument(
        "--with",
        dest="augmentations",
        nargs="+",
        default=[*OFFLINE, *ASKED],
        metavar="NAME",
        help="augmentations, a name or {name: ..., probability: ...} each",
    )
    parser.add_argument("--steps", type=int, default=300, help="optimiser steps, the same for every head")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each head")
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--overrides", nargs="*", default=[], metavar="KEY=VALUE", help="for every stage")
    parser.add_argument("--tiny", action="store_true", help="a target of seconds, to see that it runs")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(given)
    options.out = options.out.resolve()
    if options.prompts is not None:
        options.prompts = options.prompts.resolve()
    return options


if __name__ == "__main__":
    main()
