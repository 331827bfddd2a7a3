"""Which prompts to take, which to hold out, which the target answers anew. Seeded hashes, no stream."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from deepspec.data.conversation import Conversation, Tally, hash_order
from deepspec.data.questions import question_prompts
from deepspec.data.stdlib import stdlib_prompts
from deepspec.errors import UserError


def builtin_prompts(
    count: int, most_unanswered: int | None, seed: int
) -> tuple[list[Conversation], dict[str, str]]:
    """`count` built-in prompts, and the content hashes of their sources.

    Questions (no given answer) are half of them, fewer where there are not so many; the rest are tasks on the
    standard library. most_unanswered: at most so many without a given answer (None: no limit). `UserError`
    if there are not `count`.
    """
    if count == 0:
        return [], {}
    questions, questions_hash = question_prompts(seed)
    tasks, library_hash = stdlib_prompts(seed)
    limit = count if most_unanswered is None else most_unanswered
    chosen = list(spread(questions))[: min((count + 1) // 2, limit)]
    room = limit - len(chosen)
    for task in spread(tasks):
        if len(chosen) == count:
            break
        if not task.has_answer:
            if room == 0:
                continue
            room -= 1
        chosen.append(task)
    if len(chosen) < count:
        raise UserError(
            f"data.builtin_prompts={count} asks for more than there are: "
            f"{len(chosen)} with data.answers as it is. Lower it."
        )
    return chosen, {"questions": questions_hash, "stdlib": library_hash}


def spread(conversations: Sequence[Conversation]) -> Iterator[Conversation]:
    """All of them, categories in turn, the given order within each."""
    queues: dict[str, list[Conversation]] = defaultdict(list)
    for conversation in conversations:
        queues[conversation.category].append(conversation)
    pending = [iter(queues[category]) for category in sorted(queues)]
    while pending:
        left = []
        for queue in pending:
            item = next(queue, None)
            if item is not None:
                yield item
                left.append(queue)
        pending = left


def hold_out(
    conversations: Sequence[Conversation], count: int, seed: int, tally: Tally
) -> tuple[list[Conversation], list[Conversation]]:
    """Split into (train, held out): `count` held out, spread evenly over categories, whole groups apart.

    Groups already touched are used up first; what is left of them then belongs to neither side and is
    counted. No more than a quarter of the prompts is held out.
    """
    if count == 0:
        return list(conversations), []
    count = min(count, len(conversations) // 4)
    if count == 0:
        raise UserError(
            f"{len(conversations)} prompts are too few to hold any out for evaluation: four are the least. "
            "Add prompts, or set data.held_out_prompts=0 and give evaluate.prompts a file of its own."
        )
    held: list[Conversation] = []
    groups: set[str] = set()
    queues: dict[str, list[Conversation]] = defaultdict(list)
    for conversation in sorted(conversations, key=lambda item: hash_order(seed, f"hold out {item.key}")):
        queues[conversation.category].append(conversation)
    while len(held) < count:
        for category in sorted(queues):
            queue = queues[category]
            if queue and len(held) < count:
                index = _first(queue, lambda item: item.group in groups)
                taken = queue.pop(index or 0)
                groups.add(taken.group)
                held.append(taken)
    names = {conversation.id for conversation in held}
    train = []
    for conversation in conversations:
        if conversation.group not in groups:
            train.append(conversation)
        elif conversation.id not in names:
            tally.drop_conversation(conversation, "shares its group with a held-out prompt")
    if not train:
        raise UserError(
            "Every prompt shares its group with a held-out prompt, so none is left for training. "
            "Give the prompts more groups, or lower data.held_out_prompts."
        )
    return train, sorted(held, key=lambda conversation: conversation.id)


def _first(queue: Sequence[Conversation], wanted: Callable[[Conversation], bool]) -> int | None:
    return next((index for index, item in enumerate(queue) if wanted(item)), None)


def to_regenerate(conversations: Sequence[Conversation], count: int, seed: int) -> set[str]:
    """Ids of `count` prompts: those without a given answer first, evenly over categories within each kind."""
    shuffled = sorted(conversations, key=lambda item: hash_order(seed, f"regenerate {item.key}"))
    unanswered = spread([item for item in shuffled if not item.has_answer])
    answered = spread([item for item in shuffled if item.has_answer])
    return {item.id for item in [*unanswered, *answered][:count]}
