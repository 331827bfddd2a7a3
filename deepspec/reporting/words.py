"""The result in words: what a person reads first, in the terminal and at the top of the page."""

from deepspec.evaluation.quality.findings import Quality
from deepspec.evaluation.quality.two_sample import TwoSample
from deepspec.evaluation.result import Baseline, Conditions, EvaluationResult, Metric, Summary


def number(value: float, digits: int = 2) -> str:
    """Fixed decimals with a thousands separator."""
    return f"{value:,.{digits}f}"


def interval(metric: Metric, digits: int = 2, unit: str = "") -> str:
    """`1.21× (95% 1.15–1.27)`, or why there is none."""
    if metric.value is None:
        return f"none: {metric.reason}"
    if metric.low is None or metric.high is None:
        return f"{number(metric.value, digits)}{unit} (no interval: {metric.reason})"
    low, high = number(metric.low, digits), number(metric.high, digits)
    return f"{number(metric.value, digits)}{unit} (95% {low}–{high})"


def parameters(count: int) -> str:
    """`7.7 M parameters`, `9,216 parameters`."""
    return f"{count / 1e6:,.1f} M parameters" if count >= 1e5 else f"{count:,} parameters"


def share(metric: Metric) -> str:
    """`26% (95% 20–32)`, or why there is none."""
    if metric.value is None or metric.low is None or metric.high is None:
        return f"{metric.value:.0%}" if metric.value is not None else interval(metric)
    return f"{metric.value:.0%} (95% {metric.low * 100:.0f}–{metric.high * 100:.0f})"


def direction(speedup: Metric) -> str:
    """`faster`, `slower` or `unclear` (the interval has 1 in it, or there is none)."""
    if speedup.value is None or speedup.low is None or speedup.high is None:
        return "unclear"
    if speedup.low > 1:
        return "faster"
    return "slower" if speedup.high < 1 else "unclear"


def verdict(result: EvaluationResult) -> str:
    """The one sentence: how much faster or slower decoding is, and than what."""
    speedup, against = result.summary.speedup, result.conditions.fastest_plain
    if speedup.value is None:
        return f"The speed was not measured: {speedup.reason}."
    if speedup.low is None or speedup.high is None:
        return (
            f"Decoding ran at {number(speedup.value)}× the speed of {against}, on too few prompts to be sure "
            f"({speedup.reason})."
        )
    found, sure = f"{number(speedup.value)}×", f"(95% {number(speedup.low)}–{number(speedup.high)})"
    match direction(speedup):
        case "faster":
            return f"Decoding is faster with the draft: {found} the speed {sure} of {against}."
        case "slower":
            return f"Decoding is slower with the draft: {found} the speed {sure} of {against}."
        case _:
            return f"No difference can be told: {found} the speed {sure} of {against}."


def alarm(result: EvaluationResult) -> str | None:
    """The sentence that must come first when an output differs and rounding does not explain it."""
    equality = result.summary.equality
    if not equality.unproven:
        return None
    return (
        f"Not lossless: {equality.unproven} of {equality.compared} greedy outputs differ from plain decoding "
        "and rounding does not explain it. Do not use these numbers."
    )


# What our own measures of answers are; those of libraries and of the user have their own names.
MEASURES = {
    "repetition": "Repetition: the share of an answer's sequences of 4 tokens that occurred in the 128 tokens before.",
    "solved": "Solved: the final answer is right, or the program passes its unit tests.",
}


def measures(quality: Quality) -> list[str]:
    """What the measures in a table of qualities mean."""
    shown = {row.metric for row in quality.rows}
    return [meaning for name, meaning in MEASURES.items() if name in shown]


def tau_words(result: EvaluationResult) -> str:
    """τ, with K."""
    return f"{interval(result.summary.tau)} tokens a round, K = {result.conditions.k}"


def equality_words(summary: Summary, temperature: float) -> str:
    """How many outputs equal plain decoding."""
    if temperature > 0:
        return f"not compared: sampled outputs (temperature {temperature:g}) differ by chance"
    equality = summary.equality
    words = f"{equality.equal} of {equality.compared} greedy outputs equal plain decoding token for token"
    if equality.proven_ties:
        words += f", {equality.proven_ties} differ{'s' if equality.proven_ties == 1 else ''} at a proven tie"
    if equality.unproven:
        words += f", {equality.unproven} differ{'s' if equality.unproven == 1 else ''} WITHOUT A PROOF"
    return words


def baseline_note(baseline: Baseline) -> str:
    """What the table of plain decoders says beside one."""
    said = ["the headline's denominator"] if baseline.chosen else []
    said += [baseline.note] if baseline.note else []
    if baseline.differing:
        prompts = baseline.tokens_per_second.prompts
        said.append(
            f"{baseline.differing} of {prompts} greedy answers differ from the same loop's in {baseline.dtype}"
        )
    return "; ".join(said)


def fastest_text(result: EvaluationResult) -> str | None:
    """How often the fastest plain decoding said something else than the same loop; None where it is the loop."""
    pairs = [(record.plain, record.fastest) for record in result.records if record.fastest]
    if not pairs or result.conditions.temperature > 0:
        return None
    other = sum([d.tokens for d in plain] != [d.tokens for d in fastest] for plain, fastest in pairs)
    if not other:
        return "The fastest plain decoding gave the same text as the same loop on every prompt."
    return (
        f"The fastest plain decoding gave another greedy text than the same loop on {other} of {len(pairs)} prompts: "
        "it rounds otherwise, and its time is for its own tokens."
    )


def conditions_lines(result: EvaluationResult) -> list[str]:
    """On what it was measured: target, draft, decoding, machine."""
    c, machine = result.conditions, result.conditions.machine
    return [
        f"Target {result.target.get('name', '?')}, {c.dtype}, {c.attention} attention; draft "
        f"{result.draft.get('algorithm', '?')}, {parameters(result.draft.get('parameters') or 0)}.",
        f"{c.rule} acceptance, temperature {c.temperature:g}, K = {c.k}, batch {c.batch_size}, at most "
        f"{c.max_new_tokens} new tokens, seed {c.seed}; {result.summary.prompts} prompts ({c.prompt_source}).",
        f"{machine.cpu}, {machine.device}, {machine.threads} torch threads, {machine.memory_gib:g} GiB, "
        f"{machine.system}; load {', '.join(f'{load:g}' for load in machine.load_before)} before. {c.noise.words}",
        f"Measured {result.created}.",
    ]


def resources(result: EvaluationResult) -> list[str]:
    """Memory, cold start and processor use, a sentence each."""
    found, noise = result.resources, result.conditions.noise
    said = []
    if found is not None and found.peak_plain is not None and found.peak_speculative is not None:
        whose = "the device's memory" if found.kind == "device" else "the process' memory"
        said.append(
            f"Peak of {whose} in one more decoding of the longest prompt: {_gib(found.peak_plain)} without the draft, "
            f"{_gib(found.peak_speculative)} with it, its weights taking {_gib(found.draft_weights)}."
        )
    if found is not None and found.load_draft_seconds is not None:
        said.append(
            f"Loading the draft took {found.load_draft_seconds:.2f} s, once; no number here has it in."
        )
    if found is not None and found.cpu_plain is not None and found.cpu_speculative is not None:
        said.append(
            f"The whole machine had {found.cpu_plain:g} logical cores at work then without the draft, "
            f"{found.cpu_speculative:g} with it."
        )
    if found is not None and found.gpu_plain is not None and found.gpu_speculative is not None:
        said.append(
            f"The GPU was in use {found.gpu_plain:.0%} of that time without it, {found.gpu_speculative:.0%} with it."
        )
    if noise.cores_used is not None:
        said.append(f"In the measured decodings this process kept {noise.cores_used:g} cores at work.")
    return said


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _threads(conditions: Conditions) -> str:
    number = conditions.machine.threads
    words = f"Every way ran with the same {number} torch thread{'s' if number != 1 else ''}"
    if not conditions.threads:
        return f"{words}; other numbers of threads were not tried."
    tried = ", ".join(
        f"{one.threads}: {one.tokens_per_second:.1f}" for one in conditions.threads if one.tokens_per_second
    )
    return (
        f"{words}, with which plain decoding of one prompt was fastest (tokens a second by threads: {tried})."
    )


def method(result: EvaluationResult) -> list[str]:
    """How it was measured, a sentence each."""
    conditions, third = result.conditions, any(record.fastest for record in result.records)
    often = "once" if conditions.repeats == 1 else f"{conditions.repeats} times"
    found = [
        f"Every prompt was decoded {often} by each way, the ways taking turns at going first: speculatively, "
        "and plainly by the same loop with nothing drafted"
        + ("; and by the fastest plain decoding found." if third else "."),
        "Speed is total seconds over total tokens of the same prompts; an answer's first token belongs to "
        "the prefill and is counted apart.",
        _threads(conditions),
        f"Intervals are 95% bootstrap intervals over prompts ({conditions.resamples:,} resamples), widened "
        "for their number; below 8 prompts there is none.",
    ]
    found += prompt_words(result)
    if conditions.sweep_prompts:
        shared = conditions.sweep_overlap
        among = f"{shared} of them also" if shared else "none of them"
        found.append(
            f"K was chosen beforehand on {conditions.sweep_prompts} prompts, {among} among those measured."
        )
    if conditions.temperature > 0:
        found.append(f"Answers were {equality_words(result.summary, conditions.temperature)}.")
    else:
        found.append(f"{equality_words(result.summary, conditions.temperature)}.")
    if text := fastest_text(result):
        found.append(text)
    if conditions.processes > 1:
        found.append(
            f"{conditions.processes} processes shared the prompts; what is said of noise is of the first one."
        )
    if conditions.resumed:
        found.append(
            f"{conditions.resumed} prompts had been measured before this run went on; what is said of noise is not of "
            "them."
        )
    for reason, count in conditions.excluded.items():
        found.append(f"Left out: {count} prompt{'s' if count != 1 else ''} ({reason}).")
    return found


def prompt_words(result: EvaluationResult) -> list[str]:
    """How the prompts were put to the target, where that is not the chat template's usual way, a sentence each."""
    data = result.settings.get("data") or {}
    found = []
    if system := data.get("system"):
        found.append(f"System prompt, where a conversation had none: {system!r}.")
    if arguments := data.get("template_args"):
        given = ", ".join(f"{name}={value}" for name, value in sorted(arguments.items()))
        found.append(f"The chat template was given {given}.")
    return found


def summary_lines(result: EvaluationResult) -> list[str]:
    """What a terminal shows: warnings, if there are any, and three lines."""
    conditions = result.conditions
    speed = f"{interval(result.summary.speedup, unit='×')} against {conditions.fastest_plain}"
    return [
        *(f"warning   {warning}" for warning in result.warnings),
        *([f"warning   {conditions.noise.words}"] if conditions.noise.noisy else []),
        f"τ         {tau_words(result)}, {result.summary.prompts} prompts",
        f"speedup   {speed}",
        f"equality  {equality_words(result.summary, conditions.temperature)}",
    ]


def two_sample(found: TwoSample) -> str:
    """Whether sampled answers of the two ways can be told apart, and what would have been."""
    told = "can be told apart" if found.p_value < 0.05 else "cannot be told apart"
    seen = (
        f"a replacement of {found.detectable:.0%} of the tokens would have been seen in 4 of 5 cases"
        if found.detectable is not None
        else "with so few answers not even half of the tokens replaced would have been seen in 4 of 5 cases"
    )
    return (
        f"Plain and speculative samples {told} (permutation test over {found.prompts} prompts, p = {found.p_value:.3f}); "
        f"{seen}."
    )
