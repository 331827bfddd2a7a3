"""The result in words: what a person reads first, in the terminal and at the top of the page."""

from deepspec.evaluation.result import EvaluationResult, Metric, Summary


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
    found = f"{number(speedup.value)}× (95% {number(speedup.low)}–{number(speedup.high)})"
    match direction(speedup):
        case "faster":
            return f"Decoding is {found} faster than {against}."
        case "slower":
            return f"Decoding is slower with the draft: it runs at {found} the speed of {against}."
        case _:
            return f"No difference can be told: decoding runs at {found} the speed of {against}."


def alarm(result: EvaluationResult) -> str | None:
    """The sentence that must come first when an output differs and rounding does not explain it."""
    equality = result.summary.equality
    if not equality.unproven:
        return None
    return (
        f"Not lossless: {equality.unproven} of {equality.compared} greedy outputs differ from plain decoding and "
        "rounding does not explain it. Do not use these numbers."
    )


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
        words += f", {equality.unproven} DIFFER WITHOUT A PROOF"
    return words


def summary_lines(result: EvaluationResult) -> list[str]:
    """The three lines a terminal shows."""
    conditions = result.conditions
    speed = f"{interval(result.summary.speedup, unit='×')} against {conditions.fastest_plain}"
    return [
        f"τ         {tau_words(result)}, {result.summary.prompts} prompts",
        f"speedup   {speed}",
        f"equality  {equality_words(result.summary, conditions.temperature)}",
    ]
