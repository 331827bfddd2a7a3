"""Is a mathematical answer right? Final answers are found in the text and compared by value where they have one."""

import re
from fractions import Fraction

NUMBER = re.compile(r"[-+]?\d(?:[\d,]*\d)?(?:\.\d+)?(?:\s*/\s*\d+)?")
FRACTION = re.compile(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}")
SHORT_FRACTION = re.compile(r"\\[dt]?frac(\d)(\d)")
DECORATION = (
    r"\left", r"\right", r"\!", r"\,", r"\;", r"\ ", r"\$", "$", r"\%", "%", r"^\circ", r"^{\circ}", "\\displaystyle",
)  # fmt: skip
TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\{([^{}]*)\}")


def is_right(answer: str, expected: str, kind: str) -> bool:
    """Does the text's final answer equal `expected`? kind: "number" or "math".

    The final answer is the last \\boxed{…}; without one, for "number" the last number of the text, and for
    "math" what stands after the last "answer is". Numbers are equal by value (0.5 = 1/2 = \\frac12), all else
    by form after decoration is taken off.
    """
    found = final_answer(answer, kind)
    return found is not None and same(found, expected)


def final_answer(text: str, kind: str) -> str | None:
    """The final answer as it stands in the text, or None."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    if kind == "number":
        numbers = NUMBER.findall(text)
        return numbers[-1] if numbers else None
    said = re.findall(r"answer is:?\s*(.+?)(?:\.\s|\.?$|\n)", text, re.IGNORECASE)
    return said[-1] if said else None


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{…}, braces balanced; None without one, or where it is cut off."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for place in range(begin - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place]
    return None


def same(one: str, other: str) -> bool:
    """Equal by value where both are numbers, else by form."""
    first, second = normal(one), normal(other)
    if first == second:
        return bool(first)
    values = value(first), value(second)
    return values[0] is not None and values[0] == values[1]


def normal(text: str) -> str:
    """The expression without what only decorates it."""
    text = text.strip().rstrip(".")
    for part in DECORATION:
        text = text.replace(part, "")
    text = TEXT.sub(r"\1", text)
    text = SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = FRACTION.sub(lambda m: f"{m[1]}/{m[2]}", text)
    text = re.sub(r"^[a-zA-Z]\s*=\s*", "", text.strip())
    return re.sub(r"\s+", "", text)


def value(text: str) -> Fraction | None:
    """The exact value of `12`, `-1,234.5` or `3/4`; None for anything else."""
    if not re.fullmatch(r"[-+]?[\d,]*\.?\d+(/\d+)?", text) or len(text) > 100:
        return None
    if re.search(r",(?!\d{3})", text):  # a list or a pair, not a thousands separator
        return None
    try:
        return Fraction(text.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None
