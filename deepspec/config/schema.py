"""The typed configuration of every stage: one tree, unknown keys are errors.

A field's comment, beside it or in the lines directly above it, is its documentation: `--help` and
docs/configuration.md are made of it (`deepspec.config.meaning`), of the field's type and default, and of its bounds
in `ranges.py`. Without a comment it is the docstring of the field's type. A comment `# -- words` is a heading over
the fields that follow. A draft's own hyper-parameters are not here but in `deepspec.drafts.options`, documented the
same way, and arrive as `draft`.
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
    """Where curves are shown besides history.jsonl; wandb is offline unless WANDB_MODE=online."""

    none = "none"
    wandb = "wandb"
    tensorboard = "tensorboard"
    trackio = "trackio"


class FeatureSource(Enum):
    """Where training reads the target's features: from the target as it runs beside the draft, or from a store that
    `deepspec.capture` has made, or from servers that run the target elsewhere (`deepspec.serve_features`); `auto` decides
    between the first two by size, free disk and epochs, and says so."""

    auto = "auto"
    online = "online"
    store = "store"
    server = "server"


class StoreFormat(Enum):
    """Of stored features: exact (in bf16, where the target runs in bfloat16), or one byte a number with two scales, or
    half a byte (int4; the last hidden state int8)."""

    int8 = "int8"
    fp8 = "fp8"
    int4 = "int4"
    bf16 = "bf16"
    fp32 = "fp32"


class KeepFeatures(Enum):
    """Which positions are stored: those that a supervised one can look back at, or all."""

    needed = "needed"
    all = "all"


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
    """What takes the steps: AdamW; SGD with momentum; or Muon (torch's, for inner matrices, with AdamW for heads,
    tables, norms and biases)."""

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
    the draft's probabilities (EAGLE-2). With a tree, k and evaluate.sweep do not matter."""

    none = "none"
    static = "static"
    dynamic = "dynamic"


class Children(Enum):
    """Of a static tree's node: the most probable tokens, or tokens drawn without replacement (`sampled`)."""

    deterministic = "deterministic"
    sampled = "sampled"


class Format(Enum):
    """Whose layout an exported draft has; `hf` is our own, with a model card. vLLM serves that of speculators. `gguf` is
    not written yet, and says why."""

    vllm = "vllm"
    speculators = "speculators"
    sglang = "sglang"
    deepspec = "deepspec"
    gguf = "gguf"
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


class DeviceMap(Enum):
    """How a target's layers are spread: over all devices alike, or one device after the other."""

    balanced = "balanced"
    sequential = "sequential"


@dataclass
class TargetConfig:
    """The frozen model that the draft is made for."""

    name: str = MISSING  # exactly what the weights are; stands beside every number
    path: str = MISSING  # a hub name, a local folder, or builtin:smollm2_135m
    revision: str | None = None  # with a hub name: the commit; null = the newest
    dtype: Dtype = Dtype.auto
    device: str = "auto"  # where it runs, as torch names it; auto = cuda where there is one, else cpu
    # spread over all devices, memory and disk where one device is too small: balanced or sequential; null = one device
    device_map: DeviceMap | None = None
    max_memory: dict[str, str] = field(default_factory=dict)  # with device_map: {0: 70GiB, cpu: 200GiB}
    offload_folder: str | None = (
        None  # with device_map: where layers go that fit nowhere else; null = not copied
    )
    attention: str = "auto"  # which attention code runs; auto = sdpa where the family has it, else eager
    chat_template: str | None = None  # a Jinja file in place of the tokenizer's own template
    trust_remote_code: bool = False  # run the checkpoint's own code; recorded in every manifest
    allow_other_target: bool = False  # use a draft or data made for other weights of the same shape; recorded


@dataclass
class HubConfig:
    """How data.prompts=hf:NAME is read."""

    subset: str | None = None  # the data set's configuration, where it has several
    split: str = "train"  # which split is read
    revision: str | None = None  # the commit; null = the newest
    streaming: bool = False  # read over the network, store nothing


@dataclass
class DataConfig:
    """Prompts, answers, and the packed training rows made of them."""

    # -- prompts
    # a file (.jsonl .json .csv .tsv .parquet .arrow .txt; .gz and .zst too), a folder, a pattern, or hf:NAME;
    # null = built-in prompts only
    prompts: str | None = None
    max_prompts: int | None = None  # of the source: its first so many good rows; null = all
    columns: dict[str, str] = field(default_factory=dict)  # our field: your column, e.g. {prompt: query}
    builtin_prompts: int = 0  # how many built-in prompts to add (standard-library tasks, everyday questions)
    on_error: OnError = OnError.strict
    answers: Answers = Answers.regenerated
    regenerated_prompts: int | None = None  # with answers=mixed: how many get the target's own answer
    # never trained on, kept for evaluation; rows of one group stay on one side; 0 = none
    held_out_prompts: int = 32
    system: str | None = None  # a system prompt put before every conversation that has none
    seed: int = 0  # of the split, of what is regenerated, and of sampled answers
    hub: HubConfig = field(default_factory=HubConfig)
    # -- hygiene; exact duplicates are always left out
    near_duplicates: float | None = None  # leave out prompts whose Jaccard similarity to another is higher
    decontaminate: list[str] = field(default_factory=list)  # files of evaluation prompts not to be trained on
    decontaminate_words: int = 13  # so many words in a row, shared with one of them, are too many
    min_characters: int = 0  # leave out a prompt whose user says less
    max_characters: int | None = None  # leave out a prompt whose user says more
    # leave out prompts whose user writes another language, e.g. [en, de]; [] = none. Short texts stay
    languages: list[str] = field(default_factory=list)
    redact: bool = False  # e-mail addresses, keys, card numbers → [EMAIL], [SECRET], [NUMBER]
    # prompts rewritten and added to the training side; each {name, probability, seed, options of its own}
    augment: list[dict[str, Any]] = field(default_factory=list)
    # -- template and loss mask
    supervise: Supervise = Supervise.all
    thinking: Thinking = Thinking.keep
    # what opens and closes a thought in given answers
    thinking_tags: tuple[str, str] = ("<think>", "</think>")
    # the chat template's own arguments, e.g. {enable_thinking: false}
    template_args: dict[str, Any] = field(default_factory=dict)
    max_length: int = 1024  # tokens in a training row; documents are packed, longer ones cut (counted)
    # -- regeneration: the target's own answers
    regenerate: Regenerate = Regenerate.engine
    max_new_tokens: int = 256  # longest answer
    temperature: float = 0.0  # of the target's answers; 0 = greedy
    top_p: float = 1.0  # nucleus of sampled answers; 1 = off
    samples: int = 1  # answers to each training prompt
    batch_size: int = 16  # with regenerate=engine: conversations decoded together
    # with regenerate=servers: base URLs, e.g. [http://host:8000/v1]; the key comes from $OPENAI_API_KEY
    servers: list[str] = field(default_factory=list)
    server_model: str | None = None  # the target's name there; null = the first that each server lists
    server_args: dict[str, Any] = field(default_factory=dict)  # more of the request's body, e.g. {top_k: 20}
    concurrency: int = 32  # requests at a time, to each server
    timeout: float = 600.0  # seconds without an answer after which a request has failed
    retries: int = 6  # of one request, after 429, 5xx, time-outs and dropped connections


@dataclass
class FeaturesConfig:
    """Where training takes the target's features from, and how a store holds them."""

    source: FeatureSource = FeatureSource.online
    # with source=server: base URLs of feature servers (http://host:8000/v1); $DEEPSPEC_API_KEY is their key
    servers: list[str] = field(default_factory=list)
    server_seconds: float = 600.0  # how long all of them may be away before training stops
    folder: str | None = None  # of the store, which several runs may share; null = features/ in `out`
    format: StoreFormat = StoreFormat.int8
    keep: KeepFeatures = KeepFeatures.needed
    # rows that the target runs at a time. Capture: null = 8. Else: null = as many as the draft, and one by one where
    # train.keep_features_gib keeps them
    batch_size: int | None = None
    shard_mib: int = 256  # of a shard, about
    max_kl: float = (
        0.05  # nats; capture refuses a format that moves the teacher's distributions more than this
    )
    prefetch: int = 2  # optimiser steps read ahead of the draft; online only with devices of the target's own
    # online: the target's own device for each process of a machine, e.g. [cuda:4,cuda:5]; [] = the draft's
    devices: list[str] = field(default_factory=list)


@dataclass
class StopWhen:
    """Ends training before the epochs do."""

    # reached at an evaluation: the decoded τ where train.decode_every > 0, else offline τ
    tau: float | None = None


@dataclass
class TrainConfig:
    """How the draft is trained."""

    # -- length and batches
    parallel: Parallel = Parallel.auto
    epochs: float = 1.0  # passes over the training rows
    max_steps: int | None = None  # stops (and ends the schedule) here if that is before the epochs end
    batch_size: int = 1  # packed rows a micro-batch and process
    accumulation: int = 1  # micro-batches an optimiser step
    # rows an optimiser step over all processes; sets accumulation, so that any number of them learns the same
    global_batch: int | None = None
    seed: int = 0  # of the draft's first weights, the order of rows and what the draft draws
    # -- optimiser and loss
    optimizer: Optimiser = Optimiser.adamw
    learning_rate: float = 1e-3  # after the warm-up; from there it falls towards 0 as half a cosine
    warmup: float = 0.05  # fraction of the steps in which the learning rate rises
    weight_decay: float = 0.0  # of matrices; norms and biases do not decay
    betas: tuple[float, float] = (0.9, 0.95)  # adamw's decay rates; the first is sgd's momentum
    eps: float = 1e-8  # adamw's, added to the denominator
    clip: float = 1.0  # a larger gradient is scaled down to this norm; 0 = off
    ema: float = 0.0  # decay of a running mean of the weights, which is evaluated and exported; 0 = off
    precision: Precision = Precision.auto
    # weights of the draft's loss parts, e.g. {soft_ce: 0, tv: 1}; {} = its defaults
    loss: dict[str, float] = field(default_factory=dict)
    # -- evaluation and the end
    eval_every: int = 100  # steps between evaluations: offline acceptance on held-out rows
    eval_rows: int = 8  # packed held-out rows of an evaluation
    eval_steps: int = 7  # K of the offline walk, and of decoding by decode_every
    # steps between decodings of held-out prompts, which give the real τ; at evaluations only; 0 = never
    decode_every: int = 0
    decode_prompts: int = 8  # held-out prompts decoded then
    keep_best: KeepBest = KeepBest.tau
    patience: int | None = None  # evaluations without a better one, by keep_best, after which training ends
    max_not_finite: int = 10  # steps in a row without a finite loss and gradient, after which training stops
    stop_when: StopWhen = field(default_factory=StopWhen)
    # -- records
    log_every: int = 10  # steps between lines of history.jsonl
    tracker: Tracker = Tracker.none
    checkpoint_every: int = 200  # steps between checkpoints
    keep_last: int = 2  # newest checkpoints that stay
    resume: str = "auto"  # auto = from the newest checkpoint of this run; never = start over
    # -- speed
    keep_features_gib: float = 1.0  # memory for features of rows seen before, held-out ones too; 0 = none
    compile: bool = False  # torch.compile the draft's forward
    # keep less of the draft's forward and compute it again for the gradients: slower, for long rows and deep drafts
    gradient_checkpointing: bool = False
    profile: bool = False  # write a Chrome trace of a few steps into <out>/profile


@dataclass
class DecodeConfig:
    """How the draft and the target decode together."""

    # -- what is drafted
    rule: Rule = Rule.auto
    k: int = 5  # drafted tokens a round; evaluate uses it only when evaluate.sweep is []
    tree: Tree = Tree.none
    # with tree=static: each node's parent, -1 = the pending token; the default is a shape for trying, tuned to no
    # draft
    tree_parents: list[int] = field(default_factory=lambda: [-1, -1, -1, 0, 0, 0, 1, 3, 3, 4, 7, 7, 10])
    children: Children = Children.deterministic
    tree_depth: int = 5  # with tree=dynamic: levels
    tree_top_k: int = 4  # with tree=dynamic: nodes a level that grow on, and children of each
    tree_total_tokens: int = 24  # with tree=dynamic: nodes verified
    # -- how much of it is verified
    schedule: ScheduleKind = ScheduleKind.fixed
    # with schedule=threshold: verify up to the first confidence below it; of a draft without a confidence head, up to
    # the first position whose acceptance over past rounds (0.9 before there were any) is below it
    confidence_threshold: float = 0.5
    # with schedule=threshold or hardware: verify no more than this; null = k
    max_candidates: int | None = None
    # while the device is busier than this fraction, decode as with schedule=threshold; null = never
    utilization_threshold: float | None = None
    fallback: Fallback = Fallback.off
    # -- how a forward runs
    # every forward at one shape: greedy text equals plain decoding's with exact=true, token for token in bfloat16 too
    exact: bool = False
    # torch.compile the target's rounds, at one shape; the first take seconds to minutes
    compile: bool = False
    # -- sampling and the end of an answer
    temperature: float = 0.0  # of sampling; 0 = greedy
    top_k: int = 0  # draw among so many of the most probable tokens; 0 = off
    top_p: float = 1.0  # draw among the most probable tokens that have this much together; 1 = off
    min_p: float = 0.0  # draw among tokens at least this fraction as probable as the likeliest; 0 = off
    repetition_penalty: float = 1.0  # of tokens in prompt and answer; 1 = off
    stop: list[str] = field(default_factory=list)  # strings that end an answer, beside the end tokens
    max_new_tokens: int = 128  # longest answer
    seed: int = 0  # of sampling


@dataclass
class EvaluateConfig:
    """What is measured, and how."""

    # -- prompts
    prompts: str | None = None  # a file of prompts with optional `category`; null = the held-out prompts
    # evaluation sets instead: gsm8k, humaneval, mtbench, math500, ... or files of prompts
    tasks: list[str] = field(default_factory=list)
    task_files: dict[str, str] = field(default_factory=dict)  # a set's local file, by its name
    hub: bool = False  # take sets that no installed package or file has from the Hub
    max_prompts: int = 32  # at most so many are decoded, spread evenly over categories
    # -- quality
    # how answers that have a reference are judged: bleu, rouge, exact_match, or a file or folder of your own
    metrics: list[str] = field(default_factory=list)
    allow_code_execution: bool = False  # run what the model wrote against a set's unit tests, confined
    code_seconds: float = 10.0  # seconds after which a program that the model wrote is stopped
    # -- speed
    # keep temperatures for the draft's confidences in its config, for decode.schedule
    calibrate: bool = False
    # K values to try before the main run, which takes the fastest, of equals (2%) the smallest; [] = none
    sweep: list[int] = field(default_factory=lambda: [2, 3, 5, 7])
    sweep_prompts: int = 8  # how many prompts the sweep decodes
    repeats: int = 1  # how often every prompt is decoded plainly and speculatively, in turns
    # numbers of requests at once whose tokens a second, per stream and in total, are measured too; [] = none
    batch_sizes: list[int] = field(default_factory=list)
    warmup_prompts: int = 1  # decoded both ways and not counted
    bootstrap: int = 2000  # resamples of the 95% intervals
    baselines: bool = True  # also time transformers' own generate and the other dtype, for the headline
    threads: int = 0  # torch's; 0 = the fastest of all, half and a quarter, tried on plain decoding
    price_per_hour: float | None = None  # of this machine; adds the cost of a million output tokens


@dataclass
class VerifyConfig:
    """How python -m deepspec.verify tests that decoding is lossless."""

    prompts: int = 8  # held-out prompts decoded greedily and compared
    rounds: int = 8  # recorded rounds whose (p, q) the rule is tried on
    draws: int = 100000  # verdicts drawn from the rule at each of them
    temperature: float = 1.0  # of those rounds, where decode.temperature is 0
    significance: float = 0.001  # chance that a sound decoder is complained of, over all tests together


@dataclass
class HardwareConfig:
    """A machine as plans and simulations see it: hardware=here measures this one, the others are described."""

    name: str = "here"  # of the machine; set by hardware=NAME
    flops: float = 0.0  # operations a second of one device, dense, in the format of the weights
    bandwidth: float = 0.0  # bytes a second between one device and its memory
    memory_gib: float = 0.0  # of one device
    devices: int = 1  # devices that share the work
    efficiency: float = 0.6  # part of flops that large multiplications reach
    launch_seconds: float = 5e-4  # that a forward takes whatever it computes


@dataclass
class PlanConfig:
    """What a plan cannot know before a run."""

    answer_tokens: int | None = (
        None  # mean length of the target's answers; null = measured here, else the longest
    )
    acceptance: float = 0.5  # chance that a drafted token is accepted, for the time of evaluation


@dataclass
class TuningConfig:
    """How `evaluate tune=true` looks for the fastest settings of decoding."""

    batch_size: int = 1  # requests at once that the settings are for
    trials: int = 6  # batches on which candidates are tried against each other; after each heat half fall out
    confirmations: int = (
        12  # batches on which the best is compared with the default; below 8 nothing is proven
    )


@dataclass
class SimulateConfig:
    """A recorded run under load: which loads, which ways of drafting, and what is known of the machine."""

    # -- what is simulated
    result: str | None = None  # the recorded run: a result.json; null = the one in out
    # ways of drafting that are compared, of plain, fixed, threshold and hardware
    policies: list[str] = field(default_factory=lambda: ["plain", "fixed", "threshold", "hardware"])
    k: int | None = None  # drafted tokens of the policy fixed; null = as recorded
    # how many requests are under way all the time
    users: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    rates: list[float] = field(default_factory=list)  # requests a second instead of users, at random times
    max_rows: int = 512  # with rates: rows decoded at once, others wait
    requests: int = 256  # with rates: how many requests arrive
    # batch sizes at which the real engine decodes the recorded run's prompts, beside the simulation of that
    validate: list[int] = field(default_factory=list)
    seed: int = 0  # of what is drawn: which recorded requests come, and when
    # -- what a step takes
    measured_rows: int = 16  # with hardware=here: largest batch that is timed; beyond lies a straight line
    round_trip: float = 0.0  # seconds to a draft that runs on another machine, each round
    # parameters of the target, to simulate a described machine without loading the models; null = load them
    target_parameters: int | None = None
    draft_parameters: int | None = None  # of the draft, with target_parameters; it runs once for each token
    cached_bytes: int | None = None  # bytes of keys and values a token, with target_parameters
    # -- the same model behind an API
    api_round_trip: float | None = None  # seconds of a network round trip; null = leave the API out
    api_ttft: float = 0.0  # seconds to a first token there
    api_tpot: float | None = None  # seconds for each further token there


@dataclass
class ServeConfig:
    """What a request leaves out (temperature, ...) is as in `decode`."""

    host: str = "127.0.0.1"  # 0.0.0.0 = every network: then set a key, $DEEPSPEC_API_KEY
    port: int = 8000  # 0 = any that is free
    model: str | None = None  # what clients call it; null = `name`
    plain: bool = False  # decode without the draft, to compare with
    max_batch_size: int = 8  # answers decoded at once
    queue: int = 64  # answers that may wait; more are refused with 429
    max_new_tokens: int = 1024  # longest answer a request can ask for
    max_body: int = 1048576  # bytes of a request; longer ones are refused with 413
    timeout: float = 600.0  # seconds from a request's arrival to its end
    grace: float = 30.0  # seconds that running requests have when the server is told to stop


@dataclass
class FeatureServerConfig:
    """The feature server, which runs the target for trainers elsewhere."""

    host: str = "127.0.0.1"  # 0.0.0.0 = every network: then set a key, $DEEPSPEC_API_KEY
    port: int = 8000  # 0 = any that is free
    queue: int = 32  # batches that may wait; more are refused with 429, and trainers come again
    max_body: int = 67108864  # bytes of a question
    max_tokens: int = 262144  # of a batch, padding included
    grace: float = 30.0  # seconds that batches in work have when the server is told to stop
    # a vLLM server that extracts hidden states runs the target (http://host:8000/v1): only its edges are loaded here
    engine: str | None = None


@dataclass
class EndpointConfig:
    """How a server is measured. temperature, top_p, seed, stop and the longest answer are those of `decode`."""

    prompts: str | None = None  # a file of prompts; null = built-in questions
    requests: int = 32  # at each concurrency, to each server
    # requests under way at a time, one value after the other
    concurrency: list[int] = field(default_factory=lambda: [1, 4, 16])
    warmup: int = 2  # requests to each server that are not counted
    timeout: float = 300.0  # seconds of one answer
    retries: int = 3  # of one request, after 429, 5xx and failed connections
    tokenizer: str | None = None  # a folder or hub name, to count tokens where a server does not
    args: dict[str, Any] = field(default_factory=dict)  # more of the request's body, e.g. ignore_eos
    key_variable: str = "OPENAI_API_KEY"  # environment variable with the key of `url`
    other_key_variable: str = "OTHER_API_KEY"  # of `other_url`, which never sees the first one's


@dataclass
class Config:
    """The whole configuration. `draft` is the chosen draft's own option class."""

    # -- this run
    name: str = MISSING  # of this run; names its folder
    out: str = "runs/${name}"  # the run's folder: data/, draft/, checkpoints/, evaluation/ live in it
    auto_prepare: bool = False  # a stage whose input is missing makes it
    overwrite: bool = False  # replace what lies in out, made with other settings; else a stage refuses
    # -- rooms
    target: TargetConfig = field(default_factory=TargetConfig)
    draft: Any = MISSING  # the draft's algorithm; its options follow from it
    data: DataConfig = field(default_factory=DataConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    simulate: SimulateConfig = field(default_factory=SimulateConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    feature_server: FeatureServerConfig = field(default_factory=FeatureServerConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    # -- of one stage alone
    url: str | None = None  # bench_endpoint: the server, http://host:8000/v1
    model: str | None = None  # bench_endpoint: its name there; null = the first that the server lists
    other_url: str | None = None  # bench_endpoint: a second server, measured in turns with the first
    other_model: str | None = None  # bench_endpoint: null = model
    tune: bool = False  # evaluate: find the fastest settings of decode, starting from a finished evaluation
    audit: bool = False  # prepare: also write audit.html, rows coloured by their loss mask
    retry_errors: bool = False  # prepare: ask the servers again for answers that failed in an earlier run
    prompt: str | None = None  # generate: what to answer, put into the target's chat template
    compare: bool = False  # generate: decode plainly too
    format: Format = Format.vllm
    out_dir: str | None = None  # export: the folder written; null = export/<format> in out
    # export: the target's hub name or folder where it is served; null = target.path
    serve_target: str | None = None
    # export: also upload it to the Hub as hub_repo; the token comes from $HF_TOKEN alone
    push_to_hub: bool = False
    hub_repo: str | None = None  # export: owner/name
    hub_private: bool = True  # export: of a repository that is new
    # import_draft: the folder of another project's draft; from=... sets it too
    import_from: str | None = None
