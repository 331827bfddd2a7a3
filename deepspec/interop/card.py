"""The model card of an export: what it is, what was measured, how it is served."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from deepspec.artifacts import SUMS
from deepspec.evaluation.result import EvaluationResult, Metric
from deepspec.target.builtin import SHA256
from deepspec.target.load import BUILTIN as BUILTIN_PREFIX

# P-EAGLE is vLLM's EAGLE-3 with its slots filled in one pass
METHODS: dict[str, dict[str, Any]] = {
    "standalone": {"method": "draft_model"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
}
ALSO_VLLM = ("eagle3", "peagle", "dflash", "dspark")  # whose layout of speculators vLLM loads
# of which SGLang is told how many steps to run; a block has its size in its configuration
CHAINED = ("eagle", "eagle3", "standalone")

# weights of a built-in target → its licence, which lies in no file of the folder made of it
BUILTIN = {SHA256[:16]: "apache-2.0"}


@dataclass(frozen=True)
class Subject:
    """What a card is about. folder, target: where whoever serves finds the draft and its target, hub names or folders;
    builtin: the target's name where deepspec makes its folder. k: drafted tokens a round; notes: what the format left
    behind; result: of this very draft, or None."""

    name: str
    form: str
    algorithm: str
    folder: str
    target: str
    licence: str
    k: int
    manifest: dict[str, Any]
    notes: list[str]
    result: EvaluationResult | None
    builtin: str | None = None


def licence_of(path: str, identity: dict[str, Any]) -> str:
    """The `license` of the target's own model card, `unknown` where none can be read."""
    if known := BUILTIN.get(identity.get("weights", "")):
        return known
    card = Path(path) / "README.md"
    try:
        if not Path(path).is_dir():
            card = Path(hf_hub_download(path, "README.md"))
        found = ModelCard.load(card).data.to_dict() if card.is_file() else {}
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError):
        found = {}
    return str(found.get("license") or "unknown")


def card(subject: Subject) -> str:
    """The text of README.md."""
    parts = [
        _front(subject),
        _about(subject),
        *_measured(subject.result),
        *_serving(subject),
        _recipe(subject),
    ]
    return "\n\n".join(parts) + "\n"


def _front(subject: Subject) -> str:
    lines = [f"license: {json.dumps(subject.licence)}", "library_name: transformers"]
    if subject.builtin is None and not Path(subject.target).is_dir():
        lines.append(f"base_model: {json.dumps(subject.target)}")
    tags = ["speculative-decoding", "draft-model", subject.algorithm, f"deepspec-{subject.form}"]
    return "\n".join(["---", *lines, "tags:", *(f"- {tag}" for tag in tags), "---"])


def _about(subject: Subject) -> str:
    made_for = subject.manifest.get("target") or {}
    lines = [
        f"# {subject.name}: an {subject.algorithm} draft for {made_for.get('name', subject.target)}",
        f"A draft model for speculative decoding. It proposes tokens, {made_for.get('name', 'the target')} checks "
        "them: the text is the target's own. It is of use with that target only.",
        f"Licence of the target: {subject.licence}. Layout: `{subject.form}`. Its weights were written by deepspec, "
        "read back, and gave the same logits.",
    ]
    warnings = [*subject.notes, *(subject.manifest.get("warnings") or [])]
    return "\n\n".join([*lines, *(f"Note: {note}" for note in warnings)])


def _measured(result: EvaluationResult | None) -> list[str]:
    if result is None:
        return ["## Measured\n\nNothing yet: `python -m deepspec.evaluate` measures it."]
    summary, conditions = result.summary, result.conditions
    machine = conditions.machine
    rows = [
        f"| acceptance length τ at K = {conditions.k} | {_number(summary.tau)} |",
        f"| speedup over {conditions.fastest_plain} | {_number(summary.speedup)} |",
        f"| speedup over plain decoding by the same loop | {_number(summary.speedup_same_loop)} |",
    ]
    rows += [
        f"| acceptance at position {one.position} | {_number(one.conditional)} |"
        for one in summary.acceptance
    ]
    where = (
        f"{summary.prompts} prompts ({conditions.prompt_source}), batch {conditions.batch_size}, temperature "
        f"{conditions.temperature}, {conditions.dtype}, {machine.threads} threads on {machine.cpu}, {machine.device}; "
        f"{conditions.noise.words} Intervals: 95 %, over prompts."
    )
    equal = summary.equality
    text = f"Greedy outputs equal to plain decoding: {equal.equal} of {equal.compared}, {equal.proven_ties} proven ties."
    return ["\n".join(["## Measured", "", "| | |", "|---|---|", *rows, "", f"{where} {text}"])]


def _number(metric: Metric) -> str:
    if metric.value is None:
        return f"none ({metric.reason})"
    if metric.low is None or metric.high is None:
        return f"{metric.value:.2f} (no interval: {metric.reason})"
    return f"{metric.value:.2f} ({metric.low:.2f} to {metric.high:.2f})"


def serving_commands(subject: Subject) -> list[str]:
    """The shell commands that serve the target with the draft, for the formats that engines load.

    A built-in target has no name that engines know, and its folder lies elsewhere on every machine: deepspec says it.
    """
    target, folder, k = shlex.quote(subject.target), shlex.quote(subject.folder), subject.k
    found = []
    if subject.builtin is not None:
        ask = (
            f"from deepspec.target.builtin import builtin_folder; print(builtin_folder({subject.builtin!r}))"
        )
        found, target = [f'TARGET=$(python -c "{ask}" | tail -n 1)'], '"$TARGET"'
    if subject.form == "vllm" or (subject.form == "speculators" and subject.algorithm in ALSO_VLLM):
        settings = {**METHODS.get(subject.algorithm, {"method": subject.algorithm}), "model": subject.folder}
        text = json.dumps({**settings, "num_speculative_tokens": k})
        return [*found, f"vllm serve {target} --speculative-config {shlex.quote(text)}"]
    if subject.form == "sglang":
        steps = (
            f" --speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1}"
        )
        return [
            *found,
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {subject.algorithm.upper()} "
            f"--speculative-draft-model-path {folder}" + (steps if subject.algorithm in CHAINED else ""),
        ]
    return []


def _serving(subject: Subject) -> list[str]:
    commands = serving_commands(subject)
    if subject.form == "hf":
        target = subject.target if subject.builtin is None else BUILTIN_PREFIX + subject.builtin
        use = (
            "from deepspec import SpeculativeDecoder\n\n"
            f"decoder = SpeculativeDecoder.from_pretrained({target!r}, {subject.folder!r}, k={subject.k})\n"
            'print(decoder.generate("...", max_new_tokens=128))'
        )
        return [f"## Use\n\n```python\n{use}\n```"]
    shown = "\n".join(commands)
    return [f"## Use\n\n```bash\n{shown}\n```"] if commands else []


def _recipe(subject: Subject) -> str:
    kept = {key: value for key, value in subject.manifest.items() if key not in (SUMS, "training")}
    text = json.dumps(kept, indent=2, ensure_ascii=False)
    return f"## How it was made\n\n```json\n{text}\n```"
