"""What a store takes, before anything is captured, and whether features should come from one."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from deepspec.config.schema import FeaturesConfig, FeatureSource
from deepspec.errors import UserError
from deepspec.target.features.codec import bytes_of
from deepspec.target.features.documents import spans
from deepspec.target.features.writer import Recipe, Rows

SAMPLED = 1024  # rows; of more, every so-manieth is counted
SPARE = 1 << 30  # bytes left free for checkpoints and the draft
SHARE = 0.5  # of the free disk that `auto` fills with features


@dataclass(frozen=True)
class Estimate:
    """Of a store or a part of it. feature_rows, teacher_rows: stored positions, each of all layers or of the last
    hidden state alone. bytes: of all shards."""

    rows: int = 0
    tokens: int = 0
    feature_rows: int = 0
    teacher_rows: int = 0
    bytes: int = 0

    def __add__(self, other: "Estimate") -> "Estimate":
        return Estimate(
            self.rows + other.rows,
            self.tokens + other.tokens,
            self.feature_rows + other.feature_rows,
            self.teacher_rows + other.teacher_rows,
            self.bytes + other.bytes,
        )


def estimated(rows: Rows, recipe: Recipe, hidden_size: int) -> Estimate:
    """Exact up to `SAMPLED` rows, else from rows at even distances."""
    count = min(SAMPLED, len(rows))
    tokens = stored = taught = documents = 0
    for index in range(count):
        row = rows[index * len(rows) // count]
        for span in spans(0, row["tokens"], row["loss_mask"], row["documents"]):
            documents += 1
            tokens += span.end - span.start
            stored += int(recipe.chosen("features", span).sum()) if recipe.layers else 0
            taught += int(recipe.chosen("last", span).sum()) if recipe.last else 0
    feature, last = (bytes_of(recipe.format_of(part), hidden_size) for part in ("features", "last"))
    size = stored * (len(recipe.layers) * feature + 4) + taught * (last + 4) + 32 * documents
    scale = len(rows) / max(count, 1)
    return Estimate(len(rows), *(round(scale * number) for number in (tokens, stored, taught, size)))


def check_disk(estimate: Estimate, written: int, folder: Path) -> None:
    """`UserError` unless what is still to be written fits. written: bytes that lie there already."""
    wanted = estimate.bytes - written + SPARE // 16
    free = shutil.disk_usage(_there(folder)).free
    if wanted > free:
        raise UserError(
            f"{folder} would take {gib(estimate.bytes)} for {estimate.tokens} tokens, and {gib(free)} are free there. "
            "Make room, put it elsewhere (features.folder=...), store less (features.format=int8, "
            "features.keep=needed, fewer draft.capture_layers), or capture while training (features.source=online)."
        )


def chosen(
    config: FeaturesConfig, estimate: Estimate, folder: Path, passes: float, memory_gib: float
) -> tuple[FeatureSource, str]:
    """What `features.source=auto` is, and why in words. passes: over the data; memory_gib: `train.keep_features_gib`."""
    if config.source is not FeatureSource.auto:
        return config.source, f"features.source={config.source.value}"
    free = shutil.disk_usage(_there(folder)).free
    size = gib(estimate.bytes)
    if passes <= 1:
        return FeatureSource.online, "each row is seen once: a store would only be written and read again"
    if estimate.bytes > SHARE * max(0, free - SPARE):
        return FeatureSource.online, f"a store would take {size}, more than half of the {gib(free)} free"
    if 2 * estimate.bytes <= memory_gib * 2**30:
        return FeatureSource.online, f"all features fit into train.keep_features_gib={memory_gib:g}"
    return FeatureSource.store, f"it takes {size} of the {gib(free)} free, and rows are seen {passes:g} times"


def gib(size: float) -> str:
    """`1.20 GiB`, or MiB below a tenth of one."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"


def _there(folder: Path) -> Path:
    """The nearest folder above that exists."""
    return next(one for one in (folder, *folder.absolute().parents) if one.is_dir())


def written_bytes(folder: Path) -> int:
    """Of the shards that lie in `folder`."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) if folder.is_dir() else 0
