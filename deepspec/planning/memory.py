"""Most memory that each stage takes on one device, and which setting makes it less where that is too much."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from deepspec.config.schema import Config, DeviceMap, Dtype, FeatureSource, Optimiser, Parallel, Precision
from deepspec.planning.sizes import DraftSizes, TargetSizes, processes_of
from deepspec.target.features.making import BATCH
from deepspec.training.parallel import ZERO

FLOAT = 4  # bytes of a weight that learns
HIDDEN_COPIES = (
    6  # of a layer's stream, alive at once in a forward without gradients: residual, normed, mixed, ...
)
GIB = 2**30
Parts = dict[str, int]


@dataclass(frozen=True)
class Situation:
    """What memory depends on beside the configuration.

    step_bytes: of the draft's forward and backward over one packed row. longest: prompt tokens. store: features come
    from a store. row_features: bytes of a row's features in memory; rows: of the data.
    """

    target: TargetSizes
    draft: DraftSizes | None
    step_bytes: float
    longest: int
    store: bool
    precision: Precision
    rows: int
    devices: int
    on_cpu: bool


def stage_memory(config: Config, at: Situation) -> dict[str, Parts]:
    """Bytes by stage and by what they are for, on the fullest device."""
    found = {"prepare": _prepare(config, at)}
    if at.draft is None:
        return found | {"evaluate": _evaluate(config, at)}
    if at.store:
        found["capture"] = _capture(config, at)
    return found | {"train": _train(config, at), "evaluate": _evaluate(config, at)}


def _weights(config: Config, at: Situation) -> int:
    """Of the whole target; spread over devices, what stays on the first and its share of the rest."""
    if config.target.device_map is None or at.devices == 1:
        return at.target.weights
    return at.target.edges + (at.target.weights - at.target.edges) // at.devices


def forward_bytes(target: TargetSizes, rows: int, length: int, captured: int = 0) -> int:
    """Beside weights and cache, of a forward without gradients over [rows, length]. captured: hidden states kept."""
    a_token = HIDDEN_COPIES * target.hidden + target.attended + 3 * target.inner + captured * target.hidden
    mask = rows * length * length * (target.itemsize + 1)  # additive, and the comparison it is made of
    return rows * length * a_token * target.itemsize + mask


def _decoding(config: Config, at: Situation, rows: int, answer: int) -> Parts:
    length = at.longest + answer + 1
    return {
        "target": _weights(config, at),
        "keys and values": (rows + 1) * length * at.target.cached,  # one more: the prompt that enters
        "activations": forward_bytes(at.target, 1, at.longest) + rows * at.target.vocab * FLOAT * 2,
    }


def _prepare(config: Config, at: Situation) -> Parts:
    if config.data.regenerate.value == "servers":
        return {"target": _weights(config, at)}
    return _decoding(config, at, config.data.batch_size, config.data.max_new_tokens)


def _capture(config: Config, at: Situation) -> Parts:
    captured = len(at.draft.capture_layers) + 1 if at.draft else 1
    rows = config.features.batch_size or BATCH
    return {
        "target": _weights(config, at),
        "activations": forward_bytes(at.target, rows, config.data.max_length, captured),
    }


def _evaluate(config: Config, at: Situation) -> Parts:
    rows = max(1, *config.evaluate.batch_sizes) if config.evaluate.batch_sizes else 1
    draft = at.draft.parameters * at.target.itemsize if at.draft else 0
    return _decoding(config, at, rows, config.decode.max_new_tokens) | {"draft": draft}


def _train(config: Config, at: Situation) -> Parts:
    draft, train = at.draft, config.train
    if draft is None:
        return {}
    elsewhere = at.store or config.features.source is FeatureSource.server
    whole = (not elsewhere and not config.features.devices) or bool(train.decode_every)
    layers = len(draft.capture_layers) + 1
    row = config.data.max_length * layers * at.target.hidden * at.target.itemsize
    parts = {"target": _weights(config, at) if whole else at.target.edges}
    parts |= learning_bytes(config, draft, at.precision, processes_of(config, at.devices))
    parts["activations"] = round(train.batch_size * at.step_bytes)
    parts["features"] = train.batch_size * max(train.accumulation, 1) * row
    if not elsewhere:
        one_by_one = train.keep_features_gib > 0
        rows = 1 if one_by_one else config.features.batch_size or train.batch_size
        # of the target and of the draft, one after the other: the larger counts
        parts["activations"] = max(
            parts["activations"], forward_bytes(at.target, rows, config.data.max_length, layers)
        )
        if at.on_cpu:
            parts["features"] += min(at.rows * row, round(train.keep_features_gib * GIB))
    return parts


def learning_bytes(config: Config, draft: DraftSizes, precision: Precision, processes: int) -> Parts:
    """The draft's weights, gradients and optimiser on one of the processes.

    DeepSpeed in half precision holds 2-byte weights and gradients and a share of the float32 weights; all others hold
    float32 weights, which autocast copies into 2 bytes for the length of a step.
    """
    train, kind, number = config.train, config.train.parallel, max(1, processes)
    learnt, low = draft.trained, precision is not Precision.no
    moments = 2 if train.optimizer is Optimiser.adamw else 1
    stage = ZERO.get(kind, 3 if kind is Parallel.fsdp2 else 0)
    share = [number if stage >= least else 1 for least in (1, 2, 3)]  # of optimiser, gradients, weights
    zero_low = kind in ZERO and low
    width = 2 if zero_low else FLOAT
    weights = width * draft.parameters // share[2]
    if kind in ZERO:
        weights += FLOAT * learnt // share[0]  # its own float32 copy
    elif low or kind is Parallel.fsdp2:
        weights += (2 if low else FLOAT) * draft.parameters  # whole, for the length of a step
    gradients = width * learnt // share[1]
    if number > 1 and stage == 0:
        gradients *= 2  # and the buckets in which they travel
    if train.ema:
        weights += FLOAT * learnt
    return {"draft": weights, "gradients": gradients, "optimiser": moments * FLOAT * learnt // share[0]}


def remedies(stage: str, config: Config, devices: int) -> Iterator[tuple[str, Config]]:
    """Settings that take less memory in that stage, the mildest first; each on top of those before it of its kind."""
    target, data, train = config.target, config.data, config.train
    rows = data.batch_size
    while stage == "prepare" and rows > 1 and data.regenerate.value == "engine":
        rows //= 2
        yield f"data.batch_size={rows}", replace(config, data=replace(data, batch_size=rows))
    if stage == "train":
        yield from _less_training(config, devices)
    if stage == "capture":
        yield "features.batch_size=1", replace(config, features=replace(config.features, batch_size=1))
    if stage == "evaluate" and config.evaluate.batch_sizes:
        alone = replace(config.evaluate, batch_sizes=[])
        yield "evaluate.batch_sizes=[]", replace(config, evaluate=alone)
    if target.dtype in (Dtype.float32, Dtype.float64):
        yield "target.dtype=bfloat16", replace(config, target=replace(target, dtype=Dtype.bfloat16))
    if devices > 1 and target.device_map is None and stage != "train":
        spread = replace(target, device_map=DeviceMap.balanced)
        yield "target.device_map=balanced", replace(config, target=spread)
    if stage == "train" and data.max_length > 512:
        yield (
            f"data.max_length={data.max_length // 2}",
            replace(
                config,
                data=replace(data, max_length=data.max_length // 2),
                train=replace(train, batch_size=1),
            ),
        )


def _less_training(config: Config, devices: int) -> Iterator[tuple[str, Config]]:
    train, size = config.train, config.train.batch_size
    while size > 1:
        size //= 2
        times = train.accumulation * train.batch_size // size
        more = "" if train.global_batch else f" train.accumulation={times}"
        yield (
            f"train.batch_size={size}{more}",
            replace(config, train=replace(train, batch_size=size, accumulation=times)),
        )
    if not train.gradient_checkpointing:
        yield (
            "train.gradient_checkpointing=true",
            replace(config, train=replace(train, gradient_checkpointing=True)),
        )
    if devices > 1 and train.parallel not in (
        Parallel.deepspeed_zero2,
        Parallel.deepspeed_zero3,
        Parallel.fsdp2,
    ):
        yield (
            "train.parallel=deepspeed_zero2",
            replace(config, train=replace(train, parallel=Parallel.deepspeed_zero2)),
        )
    if config.features.source in (FeatureSource.online, FeatureSource.auto):
        store = replace(config.features, source=FeatureSource.store)
        yield "features.source=store", replace(config, features=store)
        yield (
            "features.source=store train.batch_size=1",
            replace(config, features=store, train=replace(train, batch_size=1)),
        )
