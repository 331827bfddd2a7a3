"""`python -m deepspec.capture +recipe=…`: a data artifact and a target to a store of the target's features.

Any number of processes may make it together (torchrun, `accelerate launch`).
"""

if __name__ == "__main__":
    from deepspec.config.app import start

    start("capture")  # before the imports below, which take seconds

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from deepspec.artifacts import MANIFEST, check_whole, only_process_in, without_name
from deepspec.config.app import command
from deepspec.config.schema import Config, FeatureSource, KeepFeatures
from deepspec.data.dataset import load_rows
from deepspec.data.sharing import Group
from deepspec.drafts.contract import TrainableDraft
from deepspec.drafts.registry import new_draft
from deepspec.prepared import draft_vocab, prepared_data
from deepspec.target import Target, load_target
from deepspec.target.features import Order, chosen, complete, make_store
from deepspec.target.fit import check_fit, same_dtype
from deepspec.training.launch import Processes, processes


def run(config: Config) -> Path | None:
    """Make the store that `features` describes, or add to it what it lacks; its folder.

    None where `features.source=auto` finds that a store does not pay or does not fit. `UserError` for what a person
    can mend.
    """
    with processes(config.target.device, config.train.parallel) as joined:
        return capture(config, joined)


def store_folder(config: Config) -> Path:
    """Where the run's store is, or would be."""
    return Path(config.features.folder) if config.features.folder else Path(config.out) / "features"


def capture(config: Config, joined: Processes) -> Path | None:
    """`run`, in a group of processes that know of each other already."""
    state, data_folder, folder = joined.state, Path(config.out) / "data", store_folder(config)
    data = prepared_data(config, data_folder, state)
    if state.is_main_process:
        check_whole(data_folder, data, command("prepare"))
    settings = same_dtype(config.target, data["inputs"]["target"])
    with state.main_process_first():
        target = load_target(settings, getattr(config.draft, "capture_layers", None) or ())
    allow, what = config.target.allow_other_target, f"The data in {data_folder}"
    notes = check_fit(data["inputs"]["target"], target.identity(), allow, what)
    say: Callable[[str], None] = _say if state.is_main_process else lambda line: None
    draft = new_draft(config.draft, target, draft_vocab(data_folder, data))
    wanted = order(config, data, target, draft)
    del draft  # it was asked what it reads; it is made anew when it is trained
    for line in notes:
        say(line)
    source, why = chosen(
        config.features, wanted.size(), folder, config.train.epochs, config.train.keep_features_gib
    )
    if source is not FeatureSource.store and config.features.source is FeatureSource.auto:
        say(f"features.source=auto: online, as {why}.")
        return None
    if config.features.source is FeatureSource.auto:
        say(f"features.source=auto: a store, as {why}.")
    if complete(wanted):
        say(f"{folder} is complete already.")
        return folder
    with (
        only_process_in(folder),
        tqdm(
            total=sum(map(len, wanted.splits.values())),
            unit="row",
            desc="capture",
            disable=not (state.is_main_process and sys.stderr.isatty()),
        ) as bar,
    ):
        group = Group(state.process_index, state.num_processes, state.wait_for_everyone)
        make_store(wanted, target, group, say, lambda count: _advance(bar, count * state.num_processes))
    return folder


def order(config: Config, data: dict[str, Any], target: Target, draft: TrainableDraft) -> Order:
    """The store that this run's draft needs. data: the data's manifest."""
    folder = Path(config.out) / "data"
    everything = config.features.keep is KeepFeatures.all
    reach = draft.feature_reach
    template = str(getattr(target.tokenizer, "chat_template", None))
    made_of = {
        "target": without_name(target.identity()),
        "template": hashlib.sha256(template.encode()).hexdigest()[:16],
        "layers": list(draft.capture_layers),
        "format": config.features.format.value,
        "positions": "all" if everything else "needed" if reach is None else reach,
    }
    return Order(
        folder=store_folder(config),
        made_of=made_of,
        data=data["fingerprint"],
        splits={split: load_rows(folder, split) for split in ("train", "held_out")},
        settings=config.features,
        made_by=command("capture"),
        overwrite=config.overwrite,
    )


def store_is_there(config: Config) -> bool:
    """Whether a whole store lies in its folder; whose it is, nobody has looked."""
    return (store_folder(config) / MANIFEST).is_file()


def _advance(bar: Any, count: int) -> None:
    bar.update(min(count, bar.total - bar.n))


def _say(line: str) -> None:
    print(line, flush=True)
