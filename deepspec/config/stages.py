"""What each stage is for, for its --help and the documentation; a test keeps this list and the programs together."""

from collections.abc import Iterable
from dataclasses import dataclass

from deepspec.config.settings import Section

RUN = ("name", "out", "auto_prepare", "overwrite")


@dataclass(frozen=True)
class Stage:
    """purpose: two lines at most. examples: what is written after `python -m deepspec.<stage>`. keys: sections, and
    keys that belong to none, which it reads; empty: all."""

    purpose: str = ""
    examples: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


STAGES: dict[str, Stage] = {
    "plan": Stage(
        "Says before anything runs what it will take: rows, tokens, disk, memory of each device, seconds of each stage, "
        "on this machine or a described one, and which setting to change where it does not fit. Writes <out>/plan.json.",
        ("+recipe=quickstart", "+recipe=quickstart hardware=a100x8"),
        (
            *("name", "out", "target", "draft", "data", "features", "train", "decode", "evaluate"),
            *("plan", "hardware"),
        ),
    ),
    "prepare": Stage(
        "Prompts become training rows: the target writes its own answers (or given ones are taken), the chat "
        "template and the loss mask are applied, the draft vocabulary is counted. Writes <out>/data.",
        (
            "+recipe=quickstart",
            "+recipe=example_own_prompts data.prompts=prompts.jsonl audit=true",
            "+recipe=quickstart out=runs/redacted data.redact=true",
        ),
        ("name", "out", "overwrite", "target", "draft", "data", "audit", "retry_errors"),
    ),
    "capture": Stage(
        "Writes the target's features of <out>/data to a store, once, for training to read: any number of processes "
        "may do it together, and a run that was stopped goes on. Writes <out>/features.",
        (
            "+recipe=quickstart features.source=store",
            "+recipe=quickstart features.source=store features.format=bf16 features.folder=features",
        ),
        (*RUN, "target", "draft", "features", "train"),
    ),
    "train": Stage(
        "Trains the draft on <out>/data and the target's captured features. Writes <out>/draft; checkpoints and "
        "history.jsonl beside it. The settings of data must be those that prepare had.",
        ("+recipe=quickstart", "+recipe=quickstart out=runs/longer train.epochs=4 auto_prepare=true"),
        (*RUN, "target", "draft", "features", "train", "hardware"),
    ),
    "evaluate": Stage(
        "Decodes the same prompts plainly and with <out>/draft, in turns, and says how much faster the draft makes "
        "it, with intervals. Writes <out>/evaluation/result.json and report.html; with tune=true, after that, the "
        "fastest settings of decode into <out>/tuning.",
        (
            "+recipe=quickstart",
            "+recipe=quickstart_ngram",
            "+recipe=quickstart out=runs/short 'evaluate.sweep=[1,2]'",
            "+recipe=quickstart tune=true tuning.batch_size=4",
        ),
        (*RUN, "target", "draft", "decode", "evaluate", "tune", "tuning"),
    ),
    "pipeline": Stage(
        "prepare, train and evaluate in one process; what is done already is skipped.",
        ("+recipe=quickstart", "+recipe=quickstart out=runs/longer train.epochs=4"),
        (*RUN, "target", "draft", "data", "features", "train", "decode", "evaluate", "audit", "retry_errors"),
    ),
    "generate": Stage(
        "Answers one prompt with <out>/draft, token by token: drafted tokens that were kept are green, and the "
        "acceptance length and speed stand below.",
        (
            '+recipe=quickstart prompt="Why is the sky blue?"',
            '+recipe=quickstart prompt="Why is the sky blue?" compare=true',
        ),
        (*RUN[:3], "target", "draft", "decode", "prompt", "compare"),
    ),
    "verify": Stage(
        "Tests that decoding with <out>/draft is lossless for this target on this machine: greedy text against plain "
        "decoding, and the acceptance rule alone on recorded rounds. Exit status 0 or 1.",
        ("+recipe=quickstart", "+recipe=quickstart decode.temperature=0.8"),
        (*RUN[:3], "target", "draft", "decode", "verify"),
    ),
    "simulate": Stage(
        "Replays a recorded evaluation under load, by measured or described costs and the engine's own scheduler: "
        "throughput against a user's speed for every policy. Writes <out>/simulation/simulation.html and .json.",
        (
            "+recipe=quickstart 'simulate.users=[1,4,16]' 'simulate.validate=[1,4]'",
            "+recipe=quickstart hardware=h100",
            "+recipe=quickstart simulate.api_round_trip=0.08 simulate.api_tpot=0.02",
        ),
        (*RUN[:3], "target", "draft", "decode", "simulate", "hardware"),
    ),
    "serve": Stage(
        "Puts <out>/draft behind an OpenAI-compatible server on this machine, batched, with the schedule live: to be "
        "tried from any client. Clients' key: $DEEPSPEC_API_KEY.",
        (
            "+recipe=quickstart",
            "+recipe=quickstart decode.schedule=hardware decode.fallback=auto serve.port=8001",
        ),
        (*RUN[:3], "target", "draft", "decode", "serve"),
    ),
    "serve_features": Stage(
        "Runs the target on this machine and gives its features to trainers elsewhere (features.source=server), any "
        "number of them. Clients' key: $DEEPSPEC_API_KEY.",
        (
            "+recipe=quickstart feature_server.port=8001",
            "target=hf target.path=Qwen/Qwen3-4B target.dtype=bfloat16 feature_server.host=0.0.0.0",
            "+recipe=cluster/qwen3_4b_eagle3 feature_server.engine=http://127.0.0.1:8000/v1 feature_server.port=8001",
        ),
        ("name", "out", "target", "draft", "feature_server"),
    ),
    "bench_endpoint": Stage(
        "Measures any OpenAI-compatible server from outside: round trips, time to the first token and for each further "
        "one, tokens a second at several concurrencies; two servers in turns. Writes <out>/endpoints.html.",
        (
            "url=http://127.0.0.1:8000/v1",
            "url=http://127.0.0.1:8000/v1 other_url=https://api.example.com/v1 other_model=theirs",
        ),
        ("name", "out", "overwrite", "decode", "endpoint", "url", "model", "other_url", "other_model"),
    ),
    "export": Stage(
        "Writes <out>/draft in the layout that a serving engine loads, reads it back and compares the logits.",
        ("+recipe=quickstart format=vllm", "+recipe=quickstart format=sglang out_dir=served"),
        (
            *("name", "out", "overwrite", "target", "draft"),
            *("format", "out_dir", "serve_target", "push_to_hub", "hub_repo", "hub_private"),
        ),
    ),
    "import_draft": Stage(
        "Reads another project's draft, its format recognised, and writes it as <out>/draft, to be measured, trained "
        "further or exported again.",
        ("name=theirs from=path/to/draft target=hf target.path=path/to/target",),
        ("name", "out", "overwrite", "target", "import_from"),
    ),
}


def of_stage(stage: str, sections: Iterable[Section]) -> list[Section]:
    """The sections, and of the keys that belong to none those, that a stage reads; a stage not listed reads all."""
    keys = STAGES.get(stage, Stage()).keys
    found = []
    for section in sections:
        if not section.name:
            chosen = tuple(one for one in section.settings if not keys or one.key in keys)
            found.append(Section("", "", chosen))
        elif not keys or section.name in keys:
            found.append(section)
    return found
