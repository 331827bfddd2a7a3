"""Speculative decoding for a program that uses transformers: a target, a draft, `generate`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from deepspec.artifacts import MANIFEST, read_manifest
from deepspec.config.schema import Dtype, TargetConfig
from deepspec.decoding.engine import Engine
from deepspec.decoding.request import Request, Result, Sampling
from deepspec.drafts.contract import StaticTree
from deepspec.errors import UserError
from deepspec.target import Target, load_target
from deepspec.target.fit import check_fit
from deepspec.training.saved_draft import load_draft

# Of a model's generation config: what would change the text and is not done here.
NOT_HERE = {"num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1.0, "penalty_alpha": None}
HARMLESS = (
    "use_cache",
    "tokenizer",
    "token_type_ids",
)  # further arguments of `generate` that change no token


class SpeculativeDecoder:
    """Decodes with a draft; the text (or, sampled, its distribution) is the target's own.

    results: of the last `generate`, one a row, with every round's counts and seconds.
    """

    def __init__(
        self,
        target: Target,
        draft: Any,
        *,
        k: int = 5,
        tree: StaticTree | None = None,
        max_batch_size: int = 8,
    ) -> None:
        self.target, self.draft = target, draft
        self.settings: dict[str, Any] = {"k": k, "tree": tree}
        self.max_batch_size = max_batch_size
        self.results: list[Result] = []

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | PreTrainedModel,
        draft: str | Path,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: str = "auto",
        device: str = "auto",
        trust_remote_code: bool = False,
        allow_other_target: bool = False,
        **settings: Any,
    ) -> "SpeculativeDecoder":
        """target: a hub name, a folder, "builtin:smollm2_135m", or a model that is loaded already (with its
        `tokenizer`, for text). draft: the folder that deepspec.train, import_draft or export format=hf wrote.
        dtype: auto measures the faster of bfloat16 and float32. settings: of the class.

        `UserError` where target and draft do not belong together.
        """
        head = load_draft(Path(draft))
        if isinstance(target, PreTrainedModel):
            loaded = Target(target, tokenizer, target.config._name_or_path or type(target).__name__)
            loaded.check_layers(head.capture_layers)
        else:
            config = TargetConfig(
                name=str(target),
                path=str(target),
                dtype=_dtype(dtype),
                device=device,
                trust_remote_code=trust_remote_code,
            )
            loaded = load_target(config, head.capture_layers)
        _check_fit(Path(draft), head, loaded, allow_other_target)
        module: Any = head
        return cls(loaded, module.to(loaded.device, loaded.dtype), **settings)

    def generate(
        self,
        inputs: Tensor | str | Sequence[str] | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        stop_strings: str | Sequence[str] = (),
        streamer: Any = None,
        seed: int | None = None,
        **others: Any,
    ) -> Any:
        """As transformers' `generate`: what is not given is `generation_config`'s, or else the model's own.

        inputs (or input_ids, as a tokenizer's output has it): [B, P] token ids (with `attention_mask` where rows are
        padded on the left) → [B, P + new] on the target's device, padded on the right; a text → its continuation,
        texts → theirs. streamer: gets the tokens as they are committed, one row only. max_length: of prompt and answer
        together, where max_new_tokens is not given. seed: of sampling, None draws one from torch's generator.
        `UserError` for arguments that would change the text and are not followed here.
        """
        given = generation_config or self.target.model.generation_config or GenerationConfig()
        _check_known(given)
        _check_others(others)
        inputs = _one_of(inputs, input_ids)
        sample = _first(do_sample, given.do_sample, False)
        sampling = Sampling(
            temperature=_first(temperature, given.temperature, 1.0) if sample else 0.0,
            top_k=_first(top_k, given.top_k, 50) if sample else 0,
            top_p=_first(top_p, given.top_p, 1.0) if sample else 1.0,
            min_p=_first(min_p, given.min_p, 0.0) if sample else 0.0,
            repetition_penalty=_first(repetition_penalty, given.repetition_penalty, 1.0),
        )
        ends = self.target.eos if eos_token_id is None else eos_token_id
        eos = tuple(ends) if isinstance(ends, Sequence) else (ends,)
        if seed is None:
            seed = int(torch.randint(2**31, ()).item()) if sample else 0
        rows = self._rows(inputs, attention_mask)
        if not rows:
            raise UserError("There is nothing to continue: inputs has no rows.")
        limit = _limit(inputs, rows, max_new_tokens, max_length, given)
        requests = [
            Request(
                row,
                limit,
                sampling,
                seed + place,
                eos,
                stop=(stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings),
            )
            for place, row in enumerate(rows)
        ]
        if streamer is not None:
            answers = [self._stream(requests, streamer)]
        else:
            engine = self._engine(min(len(requests), self.max_batch_size))
            self.results = engine.generate(requests)
            answers = [result.tokens for result in self.results]
        if isinstance(inputs, Tensor):
            return self._padded(inputs, answers, _first_or_none(pad_token_id, given.pad_token_id), eos)
        texts = [self.target.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in answers]
        return texts[0] if isinstance(inputs, str) else texts

    def _engine(self, rows: int) -> Engine:
        return Engine(self.target, self.draft, max_batch_size=rows, **self.settings)

    def _rows(self, inputs: Any, attention_mask: Tensor | None) -> list[list[int]]:
        if isinstance(inputs, Tensor):
            return _ids(inputs, attention_mask)
        texts = [inputs] if isinstance(inputs, str) else inputs
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
            raise UserError(
                "inputs is neither a text, nor a list of texts, nor a tensor of token ids [rows, tokens]; "
                "lists of ids go in as torch.tensor([ids])."
            )
        if self.target.tokenizer is None:
            raise UserError(
                "There is no tokenizer to read text with; give token ids, or a tokenizer at loading."
            )
        return [self.target.tokenizer(text)["input_ids"] for text in texts]

    def _stream(self, requests: list[Request], streamer: Any) -> list[int]:
        if len(requests) != 1:
            raise UserError(f"A streamer takes one row; there are {len(requests)}.")
        streamer.put(torch.tensor([requests[0].tokens]))
        answer: list[int] = []
        self.results = []
        for tokens, _ in self._engine(1).stream(requests[0]):
            answer += tokens
            for token in tokens:
                streamer.put(torch.tensor([token]))
        streamer.end()
        return answer

    def _padded(
        self, inputs: Tensor, answers: list[list[int]], pad: int | None, eos: tuple[int, ...]
    ) -> Tensor:
        fill = pad if pad is not None else (eos[0] if eos else 0)
        width = max(len(answer) for answer in answers)
        new = torch.full((len(answers), width), fill, dtype=torch.long)
        for row, answer in zip(new, answers, strict=True):
            row[: len(answer)] = torch.tensor(answer)
        return torch.cat([inputs.to(self.target.device), new.to(self.target.device)], 1)


def _check_fit(folder: Path, draft: Any, target: Target, allow_other_target: bool) -> None:
    """By the identities where both are known, else by sizes."""
    identity = target.identity()
    if (folder / MANIFEST).is_file() and identity:
        made_for = read_manifest(folder, "python -m deepspec.train").get("target") or {}
        check_fit(made_for, identity, allow_other_target, f"The draft in {folder}")
    sizes = {"target_hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    for key, size in sizes.items():
        if getattr(draft.config, key, size) != size:
            raise UserError(
                f"The draft in {folder} was made for a target with {key.removeprefix('target_')} "
                f"{getattr(draft.config, key)}, {target.name} has {size}: they cannot work together."
            )


def _dtype(name: str) -> Dtype:
    try:
        return Dtype(name)
    except ValueError:
        known = ", ".join(one.value for one in Dtype)
        raise UserError(f"dtype={name!r} is none that a target is loaded in: {known}.") from None


def _ids(inputs: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Each row's tokens, without the padding."""
    if inputs.dim() != 2 or inputs.is_floating_point():
        raise UserError(
            f"inputs is a tensor of shape {list(inputs.shape)}, {inputs.dtype}; token ids are whole numbers "
            "[rows, tokens]."
        )
    mask = torch.ones_like(inputs) if attention_mask is None else attention_mask
    if mask.shape != inputs.shape:
        raise UserError(
            f"attention_mask has shape {list(mask.shape)} and inputs {list(inputs.shape)}; both need the same."
        )
    rows = zip(inputs, mask.to(inputs.device).bool(), strict=True)
    return [row[kept].tolist() for row, kept in rows]


def _check_known(config: GenerationConfig) -> None:
    for key, neutral in NOT_HERE.items():
        value = getattr(config, key, None)
        if value not in (None, neutral):
            raise UserError(
                f"The target's generation config has {key}={value}, which is not done here; set it back first."
            )


def _check_others(others: Mapping[str, Any]) -> None:
    """Further arguments of transformers' `generate`: those that change nothing pass."""
    for name, value in others.items():
        if name not in HARMLESS and not (name in NOT_HERE and value in (None, NOT_HERE[name])):
            raise UserError(f"generate({name}={value!r}) is not done here; leave it out.")


def _one_of(inputs: Any, input_ids: Any) -> Any:
    if (inputs is None) == (input_ids is None):
        raise UserError("Give either inputs or input_ids: token ids [rows, tokens], a text or texts.")
    return input_ids if inputs is None else inputs


def _limit(
    inputs: Any,
    rows: list[list[int]],
    max_new_tokens: int | None,
    max_length: int | None,
    given: GenerationConfig,
) -> int:
    """New tokens a row; of padded rows the padding counts for `max_length`, as in transformers."""
    if max_new_tokens is None and max_length is not None:
        width = inputs.shape[1] if isinstance(inputs, Tensor) else max(map(len, rows))
        if max_length <= width:
            raise UserError(
                f"max_length={max_length} leaves nothing for an answer: the prompt has {width} tokens."
            )
        return max_length - width
    return int(_first(max_new_tokens, given.max_new_tokens, 20))


def _first_or_none(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
