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


class Supervise(Enum):
    """Which answers of a conversation are learned: all, or the last with the others as context."""

    all = "all"
    last = "last"


class Thinking(Enum):
    """Given thoughts: learned as the template shows them, taken out beforehand, or read but not learned."""

    keep = "keep"
    drop = "drop"
    mask = "mask"


class Regenerate(Enum):
    """Where the target answers: in this process, or behind OpenAI-compatible servers."""

    engine = "engine"
    servers = "servers"


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
    """`muon` is torch's Muon for inner matrices and AdamW for heads, tables, norms and biases."""

    adamw = "adamw"
    sgd = "sgd"
    muon = "muon"


class KeepBest(Enum):
    """Which draft is exported: the newest, or the one best at an evaluation on held-out rows."""

    none = "none"
    tau = "tau"
    loss = "loss"


class Rule(Enum):
    """How drafted tokens are accepted; `auto` is greedy at temperature 0, and above it block verification of
    chains and token rejection down the branches of trees."""

    auto = "auto"
    greedy = "greedy"
    token = "token"
    block = "block"


class Tree(Enum):
    """What a draft that can branch proposes: `none` is a chain, `static` a given shape, `dynamic` one that follows
    the draft's probabilities (EAGLE-2)."""

    none = "none"
    static = "static"
    dynamic = "dynamic"


class Children(Enum):
    """Of a static tree's node: the most probable tokens, or tokens drawn without replacement."""

    deterministic = "deterministic"
    sampled = "sampled"


class Format(Enum):
    """Whose layout an exported draft has; `hf` is our own, with a model card. vLLM serves that of speculators."""

    vllm = "vllm"
    speculators = "speculators"
    sglang = "sglang"
    deepspec = "deepspec"
    hf = "hf"


class ScheduleKind(Enum):
    """How many drafted tokens a round verifies: all; those before the first of low confidence; as many as pay."""

    fixed = "fixed"
    threshold = "threshold"
    hardware = "hardware"


class Fallback(Enum):
    """`auto` decodes plainly while speculation loses by the times measured, and tries again later."""

    off = "off"
    auto = "auto"


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
class HubConfig:
    subset: str | None = None  # the data set's configuration, where it has several
    split: str = "train"
    revision: str | None = None  # the commit
    streaming: bool = False  # read over the network, store nothing


@dataclass
class DataConfig:
    # a file (.jsonl .json .csv .tsv .parquet .arrow .txt; .gz and .zst too), a folder, a pattern, or hf:NAME;
    # null = built-in prompts only
    prompts: str | None = None
    hub: HubConfig = field(default_factory=HubConfig)  # of hf:NAME
    max_prompts: int | None = None  # of the source: its first so many good rows; null = all
    columns: dict[str, str] = field(default_factory=dict)  # our field: your column, e.g. {prompt: query}
    builtin_prompts: int = 0  # how many built-in prompts to add (standard-library tasks, everyday questions)
    answers: Answers = Answers.regenerated
    regenerated_prompts: int | None = None  # with answers=mixed: how many get the target's own answer
    held_out_prompts: int = 32  # never trained on, kept for evaluation; split by source group; 0 = none
    system: str | None = None  # a system prompt put before every conversation that has none
    # hygiene; exact duplicates are always left out
    near_duplicates: float | None = None  # leave out prompts whose Jaccard similarity to another is higher
    decontaminate: list[str] = field(default_factory=list)  # files of evaluation prompts not to be trained on
    decontaminate_words: int = 13  # so many words in a row, shared with one of them, are too many
    min_characters: int = 0  # of what the user says
    max_characters: int | None = None
    redact: bool = False  # e-mail addresses, keys, card numbers → [EMAIL], [SECRET], [NUMBER]
    # prompts rewritten and added to the training side; each {name, probability, seed, options of its own}
    augment: list[dict[str, Any]] = field(default_factory=list)
    # template and loss mask
    supervise: Supervise = Supervise.all
    thinking: Thinking = Thinking.keep
    thinking_tags: tuple[str, str] = ("<think>", "</think>")
    template_args: dict[str, Any] = field(
        default_factory=dict
    )  # the chat template's own, e.g. enable_thinking
    max_length: int = 1024  # tokens in a training row; documents are packed, longer ones cut (counted)
    # regeneration
    regenerate: Regenerate = Regenerate.engine
    max_new_tokens: int = 256  # longest answer
    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1  # answers to each training prompt
    batch_size: int = 16  # engine: conversations at a time
    servers: list[str] = field(default_factory=list)  # base URLs; the key comes from $OPENAI_API_KEY
    server_model: str | None = None  # its name there; null = the first that each server lists
    server_args: dict[str, Any] = field(default_factory=dict)  # more of the request's body, e.g. top_k
    concurrency: int = 32  # requests at a time, to each server
    timeout: float = 600.0  # seconds without an answer
    retries: int = 6  # of one request, after 429, 5xx, time-outs and dropped connections
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
    tree: Tree = Tree.none  # its size then stands below, and k and evaluate.sweep do not matter
    # static: each node's parent, -1 = the pending token; this default is a shape for trying, tuned to no draft
    tree_parents: list[int] = field(default_factory=lambda: [-1, -1, -1, 0, 0, 0, 1, 3, 3, 4, 7, 7, 10])
    children: Children = Children.deterministic  # static
    tree_depth: int = 5  # dynamic: levels
    tree_top_k: int = 4  # dynamic: nodes a level that grow on, and children of each
    tree_total_tokens: int = 24  # dynamic: nodes verified
    schedule: ScheduleKind = ScheduleKind.fixed
    # schedule=threshold: verify up to the first confidence below it; of a draft without a confidence head, up to
    # the first position whose acceptance over past rounds (0.9 before there were any) is below it
    confidence_threshold: float = 0.5
    max_candidates: int | None = None  # schedule=threshold and hardware: verify no more than this; null = k
    utilization_threshold: float | None = None  # while the device is busier (0..1), as schedule=threshold
    fallback: Fallback = Fallback.off
    # every forward at one shape: greedy text equals plain decoding's with exact=true, token for token in bfloat16 too
    exact: bool = False
    compile: bool = (
        False  # torch.compile the target's rounds, at one shape; the first take seconds to minutes
    )
    temperature: float = 0.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # of tokens in prompt and answer; 1 = off
    stop: list[str] = field(default_factory=list)  # strings that end an answer, beside the end tokens
    max_new_tokens: int = 128
    seed: int = 0


@dataclass
class EvaluateConfig:
    prompts: str | None = None  # a file of prompts with optional `category`; null = the held-out prompts
    # evaluation sets instead: gsm8k, humaneval, mtbench, math500, ... or files of prompts
    tasks: list[str] = field(default_factory=list)
    task_files: dict[str, str] = field(default_factory=dict)  # a set's local file, by its name
    hub: bool = False  # sets that no installed package or file has come from the Hub
    # of answers that have a reference: bleu, rouge, exact_match, or a file or folder of your own
    metrics: list[str] = field(default_factory=list)
    allow_code_execution: bool = False  # run what the model wrote against a set's unit tests, confined
    code_seconds: float = 10.0  # at most so long a program
    calibrate: bool = (
        False  # keep temperatures for the draft's confidences in its config, for decode.schedule
    )
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
class VerifyConfig:
    prompts: int = 8  # held-out prompts decoded greedily and compared
    rounds: int = 8  # recorded rounds whose (p, q) the rule is tried on
    draws: int = 100000  # verdicts drawn from the rule at each of them
    temperature: float = 1.0  # of those rounds, where decode.temperature is 0
    significance: float = 0.001  # chance that a sound decoder is complained of, over all tests together


@dataclass
class HardwareConfig:
    """A machine as plans and simulations see it: hardware=here measures this one, the others are described."""

    name: str = "here"
    flops: float = 0.0  # operations a second of one device, dense, in the format of the weights
    bandwidth: float = 0.0  # bytes a second between one device and its memory
    memory_gib: float = 0.0  # of one device
    devices: int = 1
    efficiency: float = 0.6  # part of `flops` that large multiplications reach
    launch_seconds: float = 5e-4  # that a forward takes whatever it computes


@dataclass
class SimulateConfig:
    result: str | None = None  # the recorded run: a result.json; null = the one in `out`
    policies: list[str] = field(default_factory=lambda: ["plain", "fixed", "threshold", "hardware"])
    k: int | None = None  # drafted tokens of `fixed`; null = as recorded
    users: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    # requests a second instead of users, at random times
    rates: list[float] = field(default_factory=list)
    max_rows: int = 512  # rates: rows decoded at once, others wait
    requests: int = 256  # rates: of them
    measured_rows: int = 16  # hardware=here: largest batch that is timed; beyond lies a straight line
    round_trip: float = 0.0  # seconds to a draft that runs on another machine, each round
    # hardware=..., without loading the models: their parameters, and bytes of keys and values a token
    target_parameters: int | None = None
    draft_parameters: int | None = None
    cached_bytes: int | None = None
    # the same model behind an API: seconds of a network round trip, to a first token, and for each further one
    api_round_trip: float | None = None
    api_ttft: float = 0.0
    api_tpot: float | None = None
    # batch sizes at which the real engine decodes the recorded run's prompts, beside the simulation of that
    validate: list[int] = field(default_factory=list)
    seed: int = 0


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
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    simulate: SimulateConfig = field(default_factory=SimulateConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    prompt: str | None = None  # generate: what to answer, put into the target's chat template
    compare: bool = False  # generate: decode plainly too
    out: str = "runs/${name}"  # data/, draft/, checkpoints/, evaluation/ live below it
    auto_prepare: bool = False  # a stage whose input is missing makes it
    overwrite: bool = False  # replace what lies in `out`, made with other settings; else a stage refuses
    audit: bool = False  # prepare: also write audit.html, rows coloured by their loss mask
    retry_errors: bool = False  # prepare: ask the servers again for answers that failed in an earlier run
    format: Format = Format.vllm  # export: whose layout
    out_dir: str | None = None  # export: the folder written; null = export/<format> in `out`
    import_from: str | None = (
        None  # import_draft: the folder of another project's draft; from=... sets it too
    )
