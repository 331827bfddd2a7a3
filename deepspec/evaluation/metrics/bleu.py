"""BLEU (Papineni et al. 2002) as sacrebleu computes it, in the `evaluate` library's format. 0 to 100."""

from typing import Any

import datasets
import evaluate
import sacrebleu


class Bleu(evaluate.Metric):
    """Each prediction may have several references, and each as many as it likes."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Corpus BLEU by sacrebleu (tokenizer 13a, mixed case).",
            citation="Papineni et al. 2002; Post 2018",
            inputs_description="predictions: list of texts; references: list of lists of texts",
            features=datasets.Features(
                {
                    "predictions": datasets.Value("string"),
                    "references": datasets.Sequence(datasets.Value("string")),
                }
            ),
        )

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, float]:
        most = max(len(texts) for texts in references)
        # sacrebleu wants the k-th reference of every prediction side by side, None where there is none.
        streams: list[Any] = [
            [texts[k] if k < len(texts) else None for texts in references] for k in range(most)
        ]
        # One short text alone has no 4-grams: its order is cut to what it has.
        score = sacrebleu.BLEU(effective_order=len(predictions) == 1).corpus_score(predictions, streams)
        return {"bleu": float(score.score)}
