"""A tuning's page, its lines for the terminal, and its settings as a recipe."""

import shlex
from pathlib import Path

import yaml

from deepspec.evaluation.metric import Metric
from deepspec.evaluation.tuning.findings import Tuned
from deepspec.reporting.html import environment
from deepspec.reporting.tables import write_text

RECIPE = "tuned"


def write_recipe(tuned: Tuned, folder: Path) -> Path | None:
    """`recipe/tuned.yaml` below `folder`, which goes behind another recipe; none where the default stays."""
    path = folder / "recipe" / f"{RECIPE}.yaml"
    if not tuned.worth:
        path.unlink(missing_ok=True)
        return None
    path.parent.mkdir(exist_ok=True)
    head = (
        "# @package _global_\n"
        f"# Of {tuned.name}, {tuned.created}: {tuned.chosen_words}; {_number(tuned.gain)} the default's speed at batch "
        f"{tuned.batch_size}\n# on {tuned.machine.cpu}, {tuned.machine.device}, {tuned.machine.threads} threads.\n"
    )
    # the sweep would replace K
    content = {"decode": tuned.settings, "evaluate": {"sweep": []}}
    return write_text(path, head + yaml.safe_dump(content, sort_keys=False))


def write_page(tuned: Tuned, path: Path) -> Path:
    """Self-contained HTML; returns `path`."""
    template = environment().get_template("tuning.html.j2")
    return write_text(
        path, template.render(t=tuned, verdict=verdict(tuned), number=_number, overrides=overrides(tuned))
    )


def lines(tuned: Tuned, recipe: Path | None) -> list[str]:
    """For the terminal."""
    found = [verdict(tuned)]
    found += [f"warning   Noisy: {words}. Tune again on an idle machine." for words in tuned.disturbances]
    if recipe is not None:
        found.append(f"settings  {overrides(tuned)}")
        found.append(f"or        '+recipe=[...,{RECIPE}]' --config-dir {recipe.parent.parent}")
    return found


def overrides(tuned: Tuned) -> str:
    """The settings as they are written behind a command."""
    words = []
    for name, value in tuned.settings.items():
        shown = f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
        words.append(f"decode.{name}={shown}")
    return shlex.join([*words, "evaluate.sweep=[]"])


def verdict(tuned: Tuned) -> str:
    """What it came to, in a sentence."""
    where = f"at batch {tuned.batch_size}, temperature {tuned.temperature:g}"
    if tuned.worth:
        words = f"{tuned.chosen_words} is {_number(tuned.gain)} as fast as the default {where}"
    elif tuned.chosen == tuned.default:
        words = f"nothing that was tried is faster than the default {where}"
    else:
        words = (
            f"keep the default {where}: the best that was tried ({tuned.chosen_words}) is {_number(tuned.gain)} as fast, "
            "which is not proven to be a gain"
        )
    best = tuned.over_plain if tuned.worth else tuned.default_over_plain
    words += f"; it is {_number(best)} as fast as plain decoding"
    if best.low is not None and best.high is not None and best.high < 1:
        words += ", so that this draft should not be used here"
    return words[0].upper() + words[1:] + "."


def _number(one: Metric) -> str:
    if one.value is None:
        return f"not measured ({one.reason})"
    ends = f" (95% {one.low:.2f}–{one.high:.2f})" if one.low is not None else f" ({one.reason})"
    return f"{one.value:.2f}×{ends}"
