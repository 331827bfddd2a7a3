"""Which prompts to take, which to hold out, which the target answers anew. Seeded hashes, no stream."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from deepspec.data.conversation import Conversation, Tally, hash_order
from deepspec.data.questions import question_prompts
from deepspec.data.stdlib import stdlib_prompts
from deepspec.data.store import Store
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


def hold_out(store: Store, count: int, tally: Tally) -> int:
    """Move `count` conversations to the held-out side, spread evenly over categories, whole groups apart.

    In the order of the store's draw. Groups already touched are used up first; what is left of them then
    belongs to neither side and is counted. No more than a quarter of the prompts is held out, and no
    ready-made tokens. Returns how many were.
    """
    if count == 0:
        return 0
    there = store.count("NOT ready")
    count = min(count, there // 4)
    if count == 0:
        raise UserError(
            f"{'1 prompt is' if there == 1 else f'{there} prompts are'} too few to hold any out for evaluation: four "
            "are the least. "
            "Add prompts, or set data.held_out_prompts=0 and give evaluate.prompts a file of its own."
        )
    pending = [name for (name,) in store.rows("SELECT DISTINCT category FROM conversation ORDER BY category")]
    held = 0
    while held < count:
        for category in list(pending):
            n = _next_held(store, category)
            if n is None:
                pending.remove(category)
            elif held < count:
                store.run("INSERT OR IGNORE INTO held_group SELECT grp FROM conversation WHERE n = ?", (n,))
                store.run("UPDATE conversation SET side = 'held_out', anew = 1 WHERE n = ?", (n,))
                held += 1
    shared = "side = 'train' AND grp IN (SELECT grp FROM held_group)"
    for n, conversation in store.conversations(shared):
        tally.drop_conversation(conversation, "shares its group with a held-out prompt")
        store.remove(n)
    if store.count("side = 'train'") == 0:
        raise UserError(
            "Every prompt shares its group with a held-out prompt, so none is left for training. "
            "Give the prompts more groups, or lower data.held_out_prompts."
        )
    return held


def _next_held(store: Store, category: str) -> int | None:
    """The next row of a category to hold out: of a group already touched, else the first."""
    free = "SELECT n FROM conversation WHERE category = ? AND side = 'train' AND NOT ready"
    for more in (" AND grp IN (SELECT grp FROM held_group)", ""):
        n = store.one(f"{free}{more} ORDER BY draw, n LIMIT 1", (category,))
        if n is not None:
            return int(n)
    return None


def to_regenerate(store: Store, count: int, seed: int) -> None:
    """Mark `count` of the training conversations: those without a given answer first, evenly over categories
    within each kind."""
    store.run("CREATE TEMP TABLE lot (n INTEGER PRIMARY KEY, draw INTEGER)")
    for n, key in store.rows("SELECT n, key FROM conversation WHERE side = 'train' AND NOT ready"):
        store.run("INSERT INTO lot VALUES (?, ?)", (n, hash_order(seed, f"regenerate {key}")))
    store.run(
        "UPDATE conversation SET anew = 1 WHERE n IN (SELECT n FROM (SELECT n, answered, category, row_number()"
        " OVER (PARTITION BY answered, category ORDER BY lot.draw, n) AS place FROM lot JOIN conversation"
        " USING (n)) ORDER BY answered, place, category LIMIT ?)",
        (count,),
    )
