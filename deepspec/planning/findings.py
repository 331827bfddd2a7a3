"""What a plan says, as `plan.json` has it and as a table for the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from deepspec.planning.memory import GIB, Parts


@dataclass
class PlanFindings:
    """disk: bytes by what they are for; checkpoint: of one; free: on the run's disk, None where that is elsewhere.
    formats: bytes of a feature store by format. memory: bytes by stage and use, on one device; capacity: of a device.
    seconds: by stage, None where they cannot be known; steps: what some single steps take. problems: what does not
    fit, each with the setting that would; warnings: what nearly does not."""

    name: str
    command: str
    hardware: str
    devices: int
    data_exist: bool
    counts: dict[str, int]
    generated_tokens: int
    parameters: dict[str, int]
    disk: dict[str, int]
    formats: dict[str, int]
    checkpoint: int
    free: int | None
    memory: dict[str, Parts]
    capacity: int | None
    steps: dict[str, float]
    seconds: dict[str, float | None]
    training_steps: int | None
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def total(self) -> float | None:
        """Of all stages; None where one is not known."""
        known = [one for one in self.seconds.values() if one is not None]
        return sum(known) if len(known) == len(self.seconds) else None


def lines(found: PlanFindings) -> list[str]:
    """The whole plan for a terminal."""
    counts = found.counts
    state = "prepared already" if found.data_exist else "estimated from a sample"
    devices = f", {found.devices} devices" if found.devices > 1 else ""
    parameters = ", ".join(f"{name} {_count(number)}" for name, number in found.parameters.items())
    said = [
        f"plan      {found.name} on {found.hardware}{devices}; parameters: {parameters}",
        f"data      {state}: {counts['rows']:,} rows, {counts['tokens']:,} tokens, {counts['supervised_tokens']:,} of "
        f"them supervised; held out {counts['held_out_rows']:,} rows; "
        f"the target writes {found.generated_tokens:,} tokens",
    ]
    disk = [(name, size(number)) for name, number in found.disk.items()]
    free = "" if found.free is None else f" ({size(found.free)} free)"
    said += ["", *_table([("disk" + free, ""), *disk, ("together", size(sum(found.disk.values())))])]
    if found.formats:
        formats = ", ".join(f"{name} {size(number)}" for name, number in found.formats.items())
        said.append(f"  a feature store would take: {formats}")
    said += ["", *_memory(found)]
    said += ["", *_times(found), ""]
    said += [f"note      {one}" for one in found.notes]
    said += [f"warning   {one}" for one in found.warnings]
    return said


def _memory(found: PlanFindings) -> list[str]:
    parts = list(dict.fromkeys(name for stage in found.memory.values() for name in stage))
    of = "" if found.capacity is None else f" (of {size(found.capacity)})"
    rows = [("memory a device" + of, "peak", *parts)]
    for stage, taken in found.memory.items():
        shown = [size(taken[name]) if taken.get(name) else "" for name in parts]
        rows.append((stage, size(sum(taken.values())), *shown))
    return _table(rows)


def _times(found: PlanFindings) -> list[str]:
    rows = [("time", "", "")]
    for stage, seconds in found.seconds.items():
        more = f"{found.training_steps:,} steps" if stage == "train" and found.training_steps else ""
        rows.append((stage, duration(seconds), more))
    rows.append(("together", duration(found.total), ""))
    steps = ", ".join(f"{name} {_short(seconds)}" for name, seconds in found.steps.items())
    return [*_table(rows), *([f"  one at a time: {steps}"] if steps else [])]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    width = max(map(len, rows))
    full = [(*row, *[""] * (width - len(row))) for row in rows]
    widths = [max(len(row[column]) for row in full) for column in range(width)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in full
    ]


def size(number: float) -> str:
    """`1.25 GiB`, `3.1 MiB`, `2.00 TiB`."""
    for unit, least in (("TiB", 1024 * GIB), ("GiB", GIB)):
        if number >= 0.1 * least:
            return f"{number / least:.2f} {unit}"
    return f"{number / 2**20:.1f} MiB"


def duration(seconds: float | None) -> str:
    """`7 s`, `3 min`, `1 h 02 min`, `4 d 03 h`; a question mark where it is not known."""
    if seconds is None:
        return "?"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24:02d} h"


def _short(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"
