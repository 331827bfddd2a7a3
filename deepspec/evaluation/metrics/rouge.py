"""ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004) as rouge-score computes them, in the `evaluate` library's format."""

import datasets
import evaluate
from rouge_score import rouge_scorer

KINDS = ("rouge1", "rouge2", "rougeL")


class Rouge(evaluate.Metric):
    """Mean F-measure over predictions, 0 to 1; of several references the one that fits best counts."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Mean ROUGE F-measures by rouge-score, without stemming.",
            citation="Lin 2004",
            inputs_description="predictions: list of texts; references: list of lists of texts",
            features=datasets.Features(
                {
                    "predictions": datasets.Value("string"),
                    "references": datasets.Sequence(datasets.Value("string")),
                }
            ),
        )

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, float]:
        scorer = rouge_scorer.RougeScorer(list(KINDS), use_stemmer=False)
        found = [
            scorer.score_multi(list(texts), prediction)
            for prediction, texts in zip(predictions, references, strict=True)
        ]
        return {kind: sum(float(score[kind].fmeasure) for score in found) / len(found) for kind in KINDS}
