"""The typed configuration of every stage: one tree, unknown keys are errors.

A comment beside a field is its documentation; a draft's own hyper-parameters are not here but in the draft's
file, and arrive as `draft` (see `deepspec.drafts.registry`).
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING


class Dtype(Enum):
    """Weights' and activations' number format; `auto` takes the faster of bfloat16 and float32, measured."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float64 = "float64"


class Answers(Enum):
    """Whose words the draft learns from: the target's own, the prompts file's, or both."""

    regenerated = "regenerated"
    given = "given"
    mixed = "mixed"


class OnError(Enum):
    """What a bad row does: `strict` stops with its line number, `skip` counts it and keeps a rejects file."""

    strict = "strict"
    skip = "skip"


class Tracker(Enum):
    none = "none"
    wandb = "wandb"
    tensorboard = "tensorboard"
    trackio = "trackio"


class Precision(Enum):
    """The draft's arithmetic in training: `no` is float32; `auto` is bf16 where the target runs in bfloat16."""

    auto = "auto"
    no = "no"
    bf16 = "bf16"
    fp16 = "fp16"


class Parallel(Enum):
    """How training is spread over processes; `auto` is what the launcher asks for, else ddp, alone single."""

    auto = "auto"
    single = "single"
    ddp = "ddp"
    deepspeed_zero1 = "deepspeed_zero1"
    deepspeed_zero2 = "deepspeed_zero2"
    deepspeed_zero3 = "deepspeed_zero3"
    fsdp2 = "fsdp2"


class Optimiser(Enum):
    adamw = "adamw"
    sgd = "sgd"


class KeepBest(Enum):
    """Which draft is exported: the newest, or the one best at an evaluation on held-out rows."""

    none = "none"
    tau = "tau"
    loss = "loss"


class Rule(Enum):
    """How drafted tokens are accepted; `auto` is greedy at temperature 0 and token rejection above it."""

    auto = "auto"
    greedy = "greedy"
    token = "token"


@dataclass
class TargetConfig:
    name: str = MISSING  # exactly what the weights are; stands beside every number
    path: str = MISSING  # a hub name, a local folder, or "builtin:smollm2_135m"
    revision: str | None = None  # hub only: the commit
    dtype: Dtype = Dtype.auto
    device: str = "auto"  # auto = cuda where there is one, else cpu
    attention: str = "auto"  # auto = sdpa where the family has it, else eager
    trust_remote_code: bool = False  # run the checkpoint's own code; recorded in every manifest
    allow_other_target: bool = False  # use a draft or data made for other weights of the same shape; recorded


@dataclass
class DataConfig:
    prompts: str | None = None  # a JSONL or text file of your own prompts; null = built-in prompts only
    builtin_prompts: int = 0  # how many built-in prompts to add (standard-library tasks, everyday questions)
    answers: Answers = Answers.regenerated
    regenerated_prompts: int | None = None  # with answers=mixed: how many get the target's own answer
    held_out_prompts: int = 32  # never trained on, kept for evaluation; split by source group; 0 = none
    system: str | None = None  # a system prompt put before every conversation that has none
    max_length: int = 1024  # tokens in a training row; documents are packed, longer ones cut (counted)
    max_new_tokens: int = 256  # regeneration: longest answer
    temperature: float = 0.0  # regeneration
    batch_size: int = 16  # regeneration: conversations at a time
    on_error: OnError = OnError.strict
    seed: int = 0


@dataclass
class StopWhen:
    """Ends training before the epochs do."""

    tau: float | None = (
        None  # reached at an evaluation: the decoded τ where train.decode_every > 0, else offline τ
    )


@dataclass
class TrainConfig:
    parallel: Parallel = Parallel.auto
    epochs: float = 1.0
    max_steps: int | None = None  # stops (and ends the schedule) here if that is before the epochs end
    batch_size: int = 1  # packed rows a step and process
    accumulation: int = 1  # micro-batches an optimiser step
    # rows an optimiser step over all processes; sets `accumulation`, so that any number of them learns the same
    global_batch: int | None = None
    optimizer: Optimiser = Optimiser.adamw
    learning_rate: float = 1e-3
    warmup: float = 0.05  # fraction of the steps
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)  # the first is sgd's momentum
    eps: float = 1e-8  # of adamw
    clip: float = 1.0  # gradient norm; 0 = off
    ema: float = 0.0  # decay of a running mean of the weights, which is evaluated and exported; 0 = off
    precision: Precision = Precision.auto
    # weights of the draft's loss parts; {} = its defaults
    loss: dict[str, float] = field(default_factory=dict)
    log_every: int = 10  # steps
    eval_every: int = 100  # steps; offline acceptance on held-out rows
    eval_rows: int = 8  # held-out rows (packed) for it
    eval_steps: int = 7  # K of the offline walk
    decode_every: int = 0  # steps; real τ by decoding held-out prompts, at evaluations only; 0 = never
    decode_prompts: int = 8  # for it
    keep_best: KeepBest = KeepBest.tau
    patience: int | None = None  # evaluations without a better one, by keep_best, after which training ends
    stop_when: StopWhen = field(default_factory=StopWhen)
    max_not_finite: int = (
        10  # steps in a row whose loss or gradient is not finite, after which training stops
    )
    checkpoint_every: int = 200  # steps
    keep_last: int = 2  # checkpoints
    resume: str = "auto"  # auto = from the newest checkpoint of this run; never = start over
    tracker: Tracker = Tracker.none
    keep_features_gib: float = 1.0  # memory for features of rows seen before, held-out ones too; 0 = none
    compile: bool = False  # torch.compile the draft's forward
    profile: bool = False  # write a Chrome trace of a few steps into <out>/profile
    seed: int = 0


@dataclass
class DecodeConfig:
    rule: Rule = Rule.auto
    k: int = 5  # drafted tokens a round; evaluate uses it only when evaluate.sweep is []
    temperature: float = 0.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 128
    seed: int = 0


@dataclass
class EvaluateConfig:
    prompts: str | None = None  # a file of prompts with optional `category`; null = the held-out prompts
    max_prompts: int = 32  # spread evenly over categories
    # K values to try before the main run; [] = none
    sweep: list[int] = field(default_factory=lambda: [2, 3, 5, 7])
    sweep_prompts: int = 8
    repeats: int = 1  # plain and speculative runs of every prompt, alternating
    warmup_prompts: int = 1  # decoded both ways and not counted
    bootstrap: int = 2000  # resamples of the 95% intervals
    baselines: bool = True  # also time transformers' own generate and the other dtype, for the headline
    threads: int = 0  # torch threads; 0 = torch's choice
    price_per_hour: float | None = None  # of this machine; adds the cost of a million output tokens


@dataclass
class Config:
    """The whole configuration. `draft` is the chosen draft's own option class."""

    name: str = MISSING  # of the experiment; names its folder
    target: TargetConfig = field(default_factory=TargetConfig)
    draft: Any = MISSING
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    out: str = "runs/${name}"  # data/, draft/, checkpoints/, evaluation/ live below it
    auto_prepare: bool = False  # a stage whose input is missing makes it
