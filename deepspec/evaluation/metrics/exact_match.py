"""Exact match, in the `evaluate` library's format: the share of predictions that equal a reference."""

import datasets
import evaluate


class ExactMatch(evaluate.Metric):
    """White space at both ends and runs of it do not count; nothing else is forgiven."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Share of predictions equal to one of their references, white space apart.",
            citation="",
            inputs_description="predictions: list of texts; references: list of lists of texts",
            features=datasets.Features(
                {
                    "predictions": datasets.Value("string"),
                    "references": datasets.Sequence(datasets.Value("string")),
                }
            ),
        )

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, float]:
        hits = [
            " ".join(prediction.split()) in {" ".join(text.split()) for text in texts}
            for prediction, texts in zip(predictions, references, strict=True)
        ]
        return {"exact_match": sum(hits) / len(hits)}
