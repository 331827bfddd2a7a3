"""Masks under templates written as those of real families, found again by unique words in the plain rendering.

The reference knows nothing of our method: every assistant text is a run of words that occurs nowhere else, the
template renders each turn's whole history once, and what the mask shows must be that run, what the family is
known to put around it, and nothing else.
"""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from deepspec.config.schema import Thinking
from deepspec.data.conversation import BadRow, Message
from deepspec.data.template import ChatTemplate, Row, given_turns, join_turns
from tests.data.toy_tokenizers import CHATML, SPECIALS, byte_level, chatml

# Thinking is shown after the last question only; tool results are a user's turn; calls are JSON in tags.
QWEN3 = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif -%}
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(searching=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}{% set index = (messages | length - 1) - loop.index0 %}
{%- if ns.searching and message.role == 'user' %}{% set ns.searching = false %}{% set ns.last = index %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}
{%- set content = message.content %}{% set thought = '' %}
{%- if message.reasoning_content is string %}{% set thought = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant
{% if loop.index0 > ns.last and (loop.last or thought) %}<think>
{{ thought.strip('\n') }}
</think>

{{ content.lstrip('\n') }}{% else %}{{ content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- if loop.first and content or not loop.first %}{{ '\n' }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""

# The generation prompt opens the thought; a history never shows one.
DEEPSEEK = """\
{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
{%- for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}
{%- elif m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|Assistant|><think>
{% endif %}"""

# No system turn of its own (it goes in front of the last question); blanks around an answer are stripped.
MISTRAL = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}{{ bos_token }}
{%- for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}[INST] {% if loop.last and system %}{{ system + '\n\n' }}{% endif %}{{ m.content }} [/INST]
{%- elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"""

LLAMA3 = """\
{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>

{% for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}<|eot_id|>{% endif %}
{%- for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif -%}
<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

GEMMA = """\
{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}
{%- set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{% if loop.first %}{{ first }}{% endif %}{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""


def qwen3() -> PreTrainedTokenizerBase:
    return chatml(QWEN3)


def deepseek() -> PreTrainedTokenizerBase:
    specials = ["<bos>", "<|end|>", "<|User|>", "<|Assistant|>"]
    return byte_level(specials, DEEPSEEK, bos="<bos>", eos="<|end|>", words=("<think>", "</think>"))


def mistral() -> PreTrainedTokenizerBase:
    return byte_level(["<s>", "</s>", "[INST]", "[/INST]"], MISTRAL, bos="<s>", eos="</s>")


def llama3() -> PreTrainedTokenizerBase:
    return byte_level(SPECIALS["llama3"], LLAMA3, bos="<|begin_of_text|>", eos="<|end_of_text|>")


def gemma() -> PreTrainedTokenizerBase:
    return byte_level(SPECIALS["gemma"], GEMMA, bos="<bos>", eos="<eos>")


# family → (tokenizer, what ends a turn, what stands before a plain answer)
FAMILIES: dict[str, tuple[PreTrainedTokenizerBase, str, str]] = {
    "chatml": (chatml(CHATML), "<|im_end|>", ""),
    "qwen3": (qwen3(), "<|im_end|>", "<think>\n\n</think>\n\n"),
    "llama3": (llama3(), "<|eot_id|>", ""),
    "gemma": (gemma(), "<end_of_turn>", ""),
    "mistral": (mistral(), "</s>", " "),
}


def reader(tokenizer: PreTrainedTokenizerBase, **options: Any) -> ChatTemplate:
    return ChatTemplate(tokenizer, [tokenizer.eos_token_id], **options)


def rows_of(template: ChatTemplate, talk: list[Message], tools: Any = (), **options: Any) -> list[Row]:
    return join_turns(given_turns(template, talk, tools, **options), template.eos)


def runs(template: ChatTemplate, rows: list[Row]) -> list[str]:
    found = []
    for row in rows:
        assert len(row.tokens) == len(row.loss_mask)
        current: list[int] = []
        for token, mask in [*zip(row.tokens, row.loss_mask, strict=True), (0, 0)]:
            if mask:
                current.append(token)
            elif current:
                found.append(template.decode(current))
                current = []
    return found


WORDS = ["alpha", "beta", "2 + 2", "naïve", "漢字", "a\n\nb", "x = [1]\n    y", "🙂", "<b>"]


@st.composite
def talks(draw: st.DrawFn) -> list[Message]:
    """Questions that repeat the answers' own words around unique ones."""
    talk: list[Message] = []
    if draw(st.booleans()):
        talk.append({"role": "system", "content": "Be brief."})
    for turn in range(draw(st.integers(1, 3))):
        words = " ".join(draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=3)))
        talk.append({"role": "user", "content": f"Say: {words} again and again"})
        talk.append({"role": "assistant", "content": f"{words} answer{turn}no{turn}"})
    return talk


@pytest.mark.parametrize("family", list(FAMILIES))
@settings(max_examples=25, deadline=None)
@given(talk=talks())
def test_the_mask_is_each_answer_and_its_end(family: str, talk: list[Message]) -> None:
    tokenizer, end, before = FAMILIES[family]
    template = reader(tokenizer)
    if family == "mistral" and talk[0]["role"] == "system":
        # it stands before the last question only while there is no answer: what decoding reads, no history shows
        with pytest.raises(BadRow, match="does not continue the prompt"):
            rows_of(template, talk)
        talk = talk[1:]
    rows = rows_of(template, talk)
    answers = [message["content"] for message in talk if message["role"] == "assistant"]
    assert runs(template, rows) == [before + answer + end for answer in answers]
    ends = [index + 1 for index, message in enumerate(talk) if message["role"] == "assistant"]
    texts = [template.decode(row.tokens) for row in rows]
    for upto, answer in zip(ends, answers, strict=True):
        whole = tokenizer.apply_chat_template(talk[:upto], tokenize=False)
        stop = whole.rindex(answer) + len(answer) + len(end)  # of the last run of these words: the answer
        assert any(text.startswith(whole[:stop]) for text in texts)
    (last,) = rows_of(template, talk, only_last=True)
    assert runs(template, [last]) == [before + answers[-1] + end]


THOUGHTS: list[Message] = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "<think>\nfirst thought\n</think>\n\nHi."},
    {"role": "user", "content": "two plus two?"},
    {"role": "assistant", "content": "Four.", "reasoning_content": "second thought"},
]


def test_thinking_is_kept_masked_or_dropped() -> None:
    shown = [
        "<think>\nfirst thought\n</think>\n\nHi.<|im_end|>",
        "<think>\nsecond thought\n</think>\n\nFour.<|im_end|>",
    ]
    keep, mask, drop = (reader(qwen3(), thinking=Thinking(name)) for name in ("keep", "mask", "drop"))
    assert runs(keep, rows_of(keep, THOUGHTS)) == shown
    masked = rows_of(mask, THOUGHTS)
    assert runs(mask, masked) == ["\n\nHi.<|im_end|>", "\n\nFour.<|im_end|>"]
    assert [row.tokens for row in masked] == [row.tokens for row in rows_of(keep, THOUGHTS)]
    bare = drop.without_thoughts(THOUGHTS)
    assert "thought" not in json.dumps(bare) and drop.without_thoughts(bare) == bare
    assert runs(drop, rows_of(drop, bare)) == [
        "<think>\n\n</think>\n\nHi.<|im_end|>",
        "<think>\n\n</think>\n\nFour.<|im_end|>",
    ]
    with pytest.raises(BadRow, match="only a thought"):
        drop.without_thoughts([{"role": "assistant", "content": "<think>\nhm</think>"}])


def test_the_templates_own_arguments_reach_it() -> None:
    template = reader(qwen3(), arguments={"enable_thinking": False})
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    assert runs(template, rows_of(template, talk)) == ["Hi.<|im_end|>"]


def test_a_thought_the_template_leaves_out_is_noted_and_never_masked_by_guess() -> None:
    talk = [THOUGHTS[2], THOUGHTS[3]]
    keep = reader(chatml(CHATML))
    (turn,) = given_turns(keep, talk)
    assert turn.thought_lost and keep.decode(turn.answer) == "Four.<|im_end|>"
    with pytest.raises(BadRow, match="thought not found"):
        given_turns(reader(chatml(CHATML), thinking=Thinking.mask), talk)


def test_a_generation_prompt_that_opens_a_thought_is_refused_unless_the_answer_goes_on_from_it() -> None:
    template = reader(deepseek())
    with pytest.raises(BadRow, match="does not continue the prompt"):
        rows_of(template, THOUGHTS[:2])


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALLED: list[Message] = [
    {"role": "user", "content": "Sun in Paris?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "resultword 21", "name": "weather"},
    {"role": "assistant", "content": "Yes, 21."},
]


@pytest.mark.parametrize("family", ["qwen3", "llama3"])
def test_calls_are_learned_and_their_results_are_not(family: str) -> None:
    tokenizer, end, _ = FAMILIES[family]
    template = reader(tokenizer)
    rows = rows_of(template, CALLED, TOOLS)
    first, second = runs(template, rows)
    assert re.search(r'"name": "weather", "\w+": {"city": "Paris"}', first) and first.endswith(end)
    assert second.endswith("Yes, 21." + end)
    assert "resultword" not in first + second
    assert "resultword" in template.decode(rows[-1].tokens)
    assert '"type": "object"' in template.decode(rows[0].tokens)


def test_a_template_without_tools_refuses_them() -> None:
    template = reader(chatml(CHATML))
    with pytest.raises(BadRow, match="tools the chat template does not read"):
        rows_of(template, CALLED, TOOLS)
    with pytest.raises(BadRow, match="tool calls the chat template does not write"):
        rows_of(template, CALLED)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            CHATML.replace("{{ m['content'] }}", "{{ m['content'] | replace('word', 'term') }}"),
            "rewrites this answer",
        ),
        (CHATML.replace("{{ m['content'] }}", "{{ m['content'][:4] }}"), "does not render answers|rewrites"),
        (
            CHATML.replace("{{ m['role'] }}\n{{ m['content'] }}", "{{ m['role'] }}\n"),
            "does not render answers",
        ),
        (
            "{% for m in messages[::-1] %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}",
            "does not continue",
        ),
        (
            CHATML.replace("{{ m['content'] }}", "{{ m['content'].nothing.more }}"),
            "refused by the chat template",
        ),
        (CHATML.replace("{{ m['content'] }}", "{{ m['content'] + 1 }}"), "refused by the chat template"),
        (
            CHATML.replace("{{ m['content'] }}", "{{ m['content'] | length / 0 }}"),
            "refused by the chat template",
        ),
    ],
)
def test_where_the_answer_is_not_certain_it_is_refused(template: str, reason: str) -> None:
    talk = [{"role": "user", "content": "Say word"}, {"role": "assistant", "content": "a word and more"}]
    with pytest.raises(BadRow, match=reason):
        rows_of(reader(chatml(template)), talk)
