"""Example of a metric of your own: does the answer use a domain's terms where the reference does?

Copy this file, put your terms in, and name the copy: `evaluate.metrics=[bleu,my_terms.py]`. What is asked of it
is the `evaluate` library's usual form: one subclass of `evaluate.Metric` whose `_compute` returns numbers by name.
"""

import re

import datasets
import evaluate

# Yours: the words that must be right in your domain.
TERMS = ("refund", "invoice", "tracking number", "warranty", "delivery date")


class TermAccuracy(evaluate.Metric):
    """Of the terms that a reference uses, the share that the prediction uses too; 1 where it uses none."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Share of the references' domain terms that the predictions use.",
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
        scores = []
        for prediction, texts in zip(predictions, references, strict=True):
            wanted = set().union(*(terms(text) for text in texts))
            scores.append(len(wanted & terms(prediction)) / len(wanted) if wanted else 1.0)
        return {"term_accuracy": sum(scores) / len(scores)}


def terms(text: str) -> set[str]:
    """The terms that stand in the text as whole words."""
    return {term for term in TERMS if re.search(rf"\b{re.escape(term)}s?\b", text, re.IGNORECASE)}
