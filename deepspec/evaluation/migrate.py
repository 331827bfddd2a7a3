"""Result files of older schemas: their records are kept, their summaries computed again."""

from dataclasses import asdict
from typing import Any

from deepspec.evaluation.detail import acceptance_detail
from deepspec.evaluation.result import SCHEMA_VERSION, EvaluationResult, check_records
from deepspec.evaluation.summary import summarise, summarise_result
from deepspec.evaluation.typed_json import build


def migrated(content: dict[str, Any]) -> EvaluationResult:
    """Versions 1 and 2 had no end-to-end latencies and no 95th percentiles, and fewer keys, which have defaults.

    ValueError as `build`'s.
    """
    for part in ("summary", "categories"):
        if part not in content:
            raise ValueError(f"{part} is missing")
    kept = {key: value for key, value in content.items() if key not in ("summary", "categories")}
    kept |= {
        "schema_version": SCHEMA_VERSION,
        "summary": asdict(summarise([], resamples=100)),
        "categories": {},
    }
    result: EvaluationResult = build(EvaluationResult, kept)
    check_records(result)
    result.summary, result.categories = summarise_result(result)
    result.detail = acceptance_detail(result.records, result.conditions.resamples, result.conditions.seed)
    return result
