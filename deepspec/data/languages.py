"""Which language a prompt is in: by py3langid, whose model lies in its package (Lui and Baldwin 2012)."""

from collections.abc import Sequence

from deepspec.errors import UserError

SURE = 0.5  # probability from which the language counts as known
LEAST_LETTERS = 20  # a shorter text can be anything
UNKNOWN = "language not certain"


class Languages:
    """wanted: ISO 639-1 codes; `UserError` for one that is not known, or where the package is missing."""

    def __init__(self, wanted: Sequence[str]) -> None:
        try:
            from py3langid.langid import MODEL_FILE, LanguageIdentifier
        except ImportError as error:
            raise UserError("data.languages needs a package more: pip install py3langid") from error
        self.wanted = set(wanted)
        self.identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        known = self.identifier.labels
        if unknown := sorted(self.wanted - set(known)):
            raise UserError(
                f"data.languages: {unknown[0]!r} is no language that can be told. Known are {', '.join(sorted(known))}."
            )

    def of(self, text: str) -> str | None:
        """The language's code; None where it is not certain."""
        if sum(char.isalpha() for char in text) < LEAST_LETTERS:
            return None
        language, sure = self.identifier.classify(text)
        return str(language) if sure >= SURE else None
