"""`python -m deepspec.plan +recipe=X`: what a run will take, and whether it fits, before anything runs."""

if __name__ == "__main__":
    from deepspec.config.app import start

    start("plan")  # before the imports below, which take seconds

import gc
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from deepspec.artifacts import MANIFEST, read_manifest, write_json
from deepspec.capture import store_folder
from deepspec.config.app import command
from deepspec.config.schema import (
    Config,
    Dtype,
    FeatureSource,
    KeepFeatures,
    Optimiser,
    Precision,
    StoreFormat,
)
from deepspec.data import gather
from deepspec.drafts.registry import check_loss_parts, untrained_draft
from deepspec.errors import UserError
from deepspec.evaluation.sources import check_prompts
from deepspec.planning import measure, times
from deepspec.planning.findings import PlanFindings, duration, lines, size
from deepspec.planning.memory import GIB, Parts, Situation, remedies, stage_memory
from deepspec.planning.sizes import DraftSizes, TargetSizes, draft_sizes, processes_of, target_sizes
from deepspec.planning.speeds import Decoding, Speeds, described
from deepspec.planning.training_work import TrainingWork, training_work
from deepspec.planning.workload import Workload, facts_of, first_prompts, hazard_of, prepared, sampled
from deepspec.prepared import draft_vocab, stale
from deepspec.simulation.costs import check_described
from deepspec.target import Target, load_target
from deepspec.target.features.estimate import chosen
from deepspec.target.features.store import recipe_of
from deepspec.target.fit import same_dtype
from deepspec.target.load import load_outline, resolve_dtype
from deepspec.target.outline import Outline
from deepspec.training.launch import precision_of

TIGHT = 0.85  # of a device's memory, above which a plan warns: activations are known to a fifth only
SPARE = 1.25  # of the target's weights, which must be free here for it to be loaded and measured
SIZES = (
    "the numbers of layers, attention heads and key-value heads, the hidden, feed-forward and vocabulary sizes "
    "(config.json) and the tokenizer"
)


def run(config: Config) -> Path:
    """Print the plan and write `<out>/plan.json`; its path. `UserError` where something does not fit, after that."""
    check_described(config.hardware)
    if config.hardware.name != "here" and not config.hardware.memory_gib:
        raise UserError(f"hardware={config.hardware.name} lacks hardware.memory_gib (of one device).")
    check_prompts(config)
    check_loss_parts(config.draft, config.train.loss)
    Path(config.out).mkdir(parents=True, exist_ok=True)
    found = make_plan(config)
    path = Path(config.out) / "plan.json"
    write_json(path, {**asdict(found), "total_seconds": found.total})
    print("\n".join([*lines(found), f"plan      {path}"]), flush=True)
    if found.problems:
        raise UserError("This does not fit. " + " ".join(found.problems))
    return path


def make_plan(config: Config) -> PlanFindings:
    """The whole plan; what does not fit stands in it."""
    manifest, notes = _data_there(config)
    here = config.hardware.name == "here"
    outline = _outline(config, manifest)
    target = target_sizes(outline)
    untrained = untrained_draft(config.draft) is not None
    draft = None if untrained else draft_sizes(config.draft, outline)
    devices = _devices(config)
    config = times.accumulated(config, processes_of(config, devices))
    with (
        tempfile.TemporaryDirectory(prefix="deepspec-") as scratch,
        _measuring(config, outline, target, here) as model,
    ):
        plan = _Plan(config, outline, target, draft, devices, notes, Path(scratch), manifest, model)
        return plan.made()


def _data_there(config: Config) -> tuple[dict[str, Any] | None, list[str]]:
    """The manifest of data that can be used as they are."""
    folder = Path(config.out) / "data"
    if not (folder / MANIFEST).is_file():
        return None, []
    if difference := stale(config, folder):
        return None, [
            f"{folder} was made with other settings ({difference}): planned as if it were made anew."
        ]
    return read_manifest(folder, command("prepare")), []


def _outline(config: Config, manifest: dict[str, Any] | None) -> Outline:
    """The target's shapes; `UserError` that says what is missing where its configuration cannot be had."""
    target = same_dtype(config.target, manifest["inputs"]["target"]) if manifest else config.target

    def dtype(model_config: Any) -> torch.dtype:
        if target.dtype is Dtype.auto and config.hardware.name != "here":
            return torch.bfloat16
        device = "cuda" if target.device == "auto" and torch.cuda.is_available() else target.device
        return resolve_dtype(target.dtype, torch.device("cpu" if device == "auto" else device), model_config)

    try:
        return load_outline(target, dtype)
    except UserError as error:
        if "hub cannot be reached" not in str(error):
            raise
        raise UserError(
            f"{error} What the plan lacks of it: {SIZES}; a folder with its config.json and tokenizer files, without "
            "weights, is enough (target.path=./FOLDER)."
        ) from error


def _devices(config: Config) -> int:
    if config.hardware.name != "here":
        return config.hardware.devices
    return max(1, torch.cuda.device_count()) if _on_gpu(config) else 1


def _on_gpu(config: Config) -> bool:
    return config.target.device.startswith("cuda") or (
        config.target.device == "auto" and torch.cuda.is_available()
    )


@dataclass(frozen=True)
class _Loaded:
    """target: None where it does not fit, or another machine is meant. load: seconds until it was ready."""

    target: Target | None
    load: float


@contextmanager
def _measuring(config: Config, outline: Outline, sizes: TargetSizes, here: bool) -> Iterator[_Loaded]:
    if not here or SPARE * sizes.weights > _capacity(config)[0]:
        yield _Loaded(None, 0.0)
        return
    dtype = Dtype(str(outline.dtype).removeprefix("torch."))
    begun = time.perf_counter()
    target = load_target(replace(config.target, dtype=dtype))
    target.require("chain")
    try:
        yield _Loaded(target, time.perf_counter() - begun)
    finally:
        del target
        gc.collect()


def _capacity(config: Config) -> tuple[int, str]:
    """Bytes of memory that one device has for a run, and what they are."""
    if config.hardware.name != "here":
        return round(config.hardware.memory_gib * GIB), f"{config.hardware.name}'s"
    if _on_gpu(config):
        return torch.cuda.mem_get_info()[0], "free on the GPU"
    return psutil.virtual_memory().available, "free here"


class _Plan:
    """One plan as it is made: read `made` downwards."""

    def __init__(
        self,
        config: Config,
        outline: Outline,
        target: TargetSizes,
        draft: DraftSizes | None,
        devices: int,
        notes: list[str],
        scratch: Path,
        manifest: dict[str, Any] | None,
        loaded: _Loaded,
    ) -> None:
        self.config, self.outline, self.target, self.draft = config, outline, target, draft
        self.devices, self.notes, self.scratch, self.manifest = devices, notes, scratch, manifest
        self.loaded, self.here = loaded, config.hardware.name == "here"
        # before anything of this is in memory but the target, which a run has too
        self.capacity = _capacity(config)[0] + (target.weights if loaded.target is not None else 0)
        self.precision = precision_of(outline.dtype)
        if config.train.precision is not Precision.auto:
            self.precision = config.train.precision
        self.processes = processes_of(config, devices)
        self.ids = None
        if (vocab := getattr(config.draft, "vocab_size", None)) is not None:
            self.ids = torch.arange(vocab)
        self._work: dict[tuple[int, bool], TrainingWork] = {}

    def made(self) -> PlanFindings:
        decoding, workload, text_seconds = self._workload()
        source = self._source(workload)
        self.store = source is FeatureSource.store
        self.workload = workload
        memory = self._memory(self.config)
        checkpoint, disk = self._disk(workload)
        speeds = self._speeds(decoding, workload, checkpoint)
        seconds, training = self._seconds(speeds, workload, text_seconds, source)
        free = shutil.disk_usage(Path(self.config.out)).free if self.here else None
        found = PlanFindings(
            name=self.config.name,
            command=command("plan"),
            hardware=self.config.hardware.name,
            devices=self.devices,
            data_exist=workload.done,
            counts=workload.counts,
            generated_tokens=round(workload.scale * sum(sum(one.answers) for one in workload.batches)),
            parameters=self._parameters(),
            disk=disk,
            formats=self._formats(workload),
            checkpoint=checkpoint,
            free=free,
            memory=memory,
            capacity=self.capacity,
            steps=self._steps(speeds, training),
            seconds=seconds,
            training_steps=training.steps if training else None,
            notes=self.notes,
        )
        self._judge(found)
        return found

    # ------------------------------------------------------------------ what there is to do

    def _workload(self) -> tuple[Decoding | None, Workload, float]:
        """How fast answers come here (None: not measured), the data, and seconds that their text takes."""
        folder, model = Path(self.config.out) / "data", self.loaded.target
        if self.manifest is not None:
            self.ids = draft_vocab(folder, self.manifest)
            workload = prepared(folder, self.manifest)
            return self._decoding(workload.prompts) if model else None, workload, 0.0
        begun = time.perf_counter()
        gathered = gather(self.config.data)
        facts = facts_of(model or self.outline)
        gathering = time.perf_counter() - begun
        prompts = first_prompts(gathered, self.config.data, facts, max(2, self.config.data.batch_size))
        decoding = self._decoding(prompts) if model and prompts else None
        longest, asked = self.config.data.max_new_tokens, self.config.plan.answer_tokens
        hazard = decoding.hazard if decoding else 0.0
        if asked is not None:
            hazard = hazard_of(asked, longest)
        elif hazard == 0.0 and self.config.data.answers.value != "given":
            self.notes.append(
                f"Answers are taken to be as long as they may be, {longest} tokens (plan.answer_tokens says otherwise)."
            )
        if decoding:
            decoding = replace(decoding, hazard=hazard)
        self.hazard = hazard
        begun = time.perf_counter()
        vocab = getattr(self.config.draft, "vocab_size", None)
        workload = sampled(gathered, self.config.data, facts, vocab, hazard, self.scratch)
        return decoding, workload, gathering + workload.scale * (time.perf_counter() - begun)

    def _decoding(self, prompts: list[list[int]]) -> Decoding:
        """Measured here."""
        model, config = self.loaded.target, self.config
        assert model is not None
        print("Measuring how fast the target answers here ...", flush=True)
        draft = measure.fresh_draft(config, model, self.ids)
        together = prompts[: config.data.batch_size] if self.manifest is None else prompts[:1]
        ks = config.evaluate.sweep or [config.decode.k]
        return measure.decoding(model, draft, config, together or [[1] * 16], ks)

    def _source(self, workload: Workload) -> FeatureSource:
        """Online, a store or a server; what `auto` would come to, by the rule that decides it."""
        if self.draft is None:
            return FeatureSource.online
        estimate = workload.stored(self._recipe(self.config.features.format), self.target.hidden)
        train = self.config.train
        source, why = chosen(
            self.config.features, estimate, store_folder(self.config), train.epochs, train.keep_features_gib
        )
        if self.config.features.source is FeatureSource.auto:
            self.notes.append(f"features.source=auto would be {source.value}: {why}.")
        return source

    def _recipe(self, format: StoreFormat) -> Any:
        assert self.draft is not None
        reach = self.draft.reach
        everything = self.config.features.keep is KeepFeatures.all
        return recipe_of(
            {
                "layers": self.draft.capture_layers,
                "positions": "all" if everything else "needed" if reach is None else reach,
                "format": format.value,
                "target": {"num_layers": self.target.layers},
            },
            None,
        )

    # ------------------------------------------------------------------ bytes

    def _formats(self, workload: Workload) -> dict[str, int]:
        if self.draft is None:
            return {}
        return {
            one.value: workload.stored(self._recipe(one), self.target.hidden).bytes for one in StoreFormat
        }

    def _disk(self, workload: Workload) -> tuple[int, dict[str, int]]:
        """Bytes of one checkpoint, and of everything by what it is for."""
        disk = {"data": workload.bytes}
        if self.draft is None:
            return 0, disk
        if self.store:
            format = self.config.features.format
            disk["features"] = workload.stored(self._recipe(format), self.target.hidden).bytes
        train, draft = self.config.train, self.draft
        moments = 2 if train.optimizer is Optimiser.adamw else 1
        checkpoint = draft.saved + 4 * draft.trained * (moments + (train.ema > 0))
        best = draft.saved if train.eval_rows and train.keep_best.value != "none" else 0
        disk["checkpoints"] = (
            train.keep_last + 1
        ) * checkpoint + 2 * best  # a new one is whole before an old one goes
        disk["draft"] = draft.saved
        return checkpoint, disk

    def _memory(self, config: Config) -> dict[str, Parts]:
        work = self._training_work(config)
        store = self.store or config.features.source is FeatureSource.store
        at = Situation(
            target=self._target_in(config),
            draft=self.draft,
            step_bytes=work.bytes if work else 0.0,
            longest=self._longest(),
            store=store,
            precision=self.precision,
            rows=self.workload.counts["rows"],
            devices=self.devices,
            on_cpu=self.here and not _on_gpu(self.config),
        )
        return stage_memory(config, at)

    def _target_in(self, config: Config) -> TargetSizes:
        """A narrower format, where a remedy asks for one."""
        if config.target.dtype is self.config.target.dtype:
            return self.target
        width = torch.empty(0, dtype=getattr(torch, config.target.dtype.value)).element_size()
        part = width / self.target.itemsize
        return replace(
            self.target,
            weights=round(part * self.target.weights),
            edges=round(part * self.target.edges),
            cached=round(part * self.target.cached),
            itemsize=width,
        )

    def _longest(self) -> int:
        prompts = [prompt for batch in self.workload.batches for prompt in batch.prompts]
        return max([*prompts, *map(len, self.workload.prompts)], default=self.config.data.max_length)

    def _training_work(self, config: Config) -> TrainingWork | None:
        if self.draft is None:
            return None
        length, checkpointing = config.data.max_length, config.train.gradient_checkpointing
        if (length, checkpointing) not in self._work:
            row = {name: column[None, :length] for name, column in self.workload.rows[0].items()}
            low = torch.bfloat16 if self.precision is not Precision.no else None
            self._work[length, checkpointing] = training_work(
                config.draft, self.outline, config.train.loss, row, low, checkpointing
            )
        return self._work[length, checkpointing]

    # ------------------------------------------------------------------ seconds

    def _speeds(self, decoding: Decoding | None, workload: Workload, checkpoint: int) -> Speeds | None:
        if not self.here:
            return described(
                self.config.hardware,
                self.config,
                self.target,
                self.draft,
                self._training_work(self.config),
                context=self._longest() + self.config.data.max_new_tokens // 2,
                hazard=getattr(self, "hazard", 0.0),
                checkpoint=checkpoint,
            )
        model = self.loaded.target
        if model is None or decoding is None:
            return None
        training = None
        if self.draft is not None:
            print("Measuring training steps ...", flush=True)
            training = measure.training(model, self.config, workload.rows, self.ids)
        return Speeds(self.loaded.load, decoding, training)

    def _seconds(
        self, speeds: Speeds | None, workload: Workload, text: float, source: FeatureSource
    ) -> tuple[dict[str, float | None], times.TrainingTime | None]:
        stages = [
            "prepare",
            *(["capture"] if self.store else []),
            *(["train"] if self.draft else []),
            "evaluate",
        ]
        if speeds is None:
            self.notes.append(
                "The target cannot be loaded here, so that nothing could be measured; hardware=NAME plans for another "
                "machine."
            )
            return dict.fromkeys(stages), None
        found: dict[str, float | None] = {
            "prepare": 0.0
            if workload.done
            else speeds.load + text + times.regeneration(workload, speeds.decoding)
        }
        if self.config.data.regenerate.value == "servers" and not workload.done:
            found["prepare"] = None
            self.notes.append(
                "How fast data.servers answer is not known; without their answers: " + duration(text) + "."
            )
        training = None
        if self.draft and speeds.training:
            if self.store:
                rows = workload.counts["rows"] + workload.counts["held_out_rows"]
                found["capture"] = speeds.load + rows / self.processes * speeds.training.capture
            row = self.config.data.max_length * (len(self.draft.capture_layers) + 1) * self.target.hidden
            training = times.training(
                self.config,
                workload,
                speeds.training,
                self.processes,
                online=source is FeatureSource.online,
                row_bytes=row * self.target.itemsize,
            )
            found["train"] = speeds.load + training.seconds
        found["evaluate"] = self._evaluation(speeds)
        return found, training

    def _evaluation(self, speeds: Speeds) -> float:
        settings, prompts = self.config.evaluate, self.workload.prompts
        count = settings.max_prompts
        if settings.prompts is None and not settings.tasks:
            count = min(count, self.workload.counts["held_out_prompts"])
        typical = sum(map(len, prompts)) // max(1, len(prompts)) if prompts else self._longest()
        acceptance = self.config.plan.acceptance
        self.notes.append(
            f"Evaluation takes each drafted token to be accepted with {acceptance:g} (plan.acceptance)."
        )
        on_cpu = self.here and not _on_gpu(self.config)
        return speeds.load + times.evaluation(self.config, speeds, typical, count, acceptance, on_cpu)

    def _steps(self, speeds: Speeds | None, training: times.TrainingTime | None) -> dict[str, float]:
        if speeds is None:
            return {}
        rows = self.config.data.batch_size
        found = {"plain step": speeds.decoding.step(1)}
        if not self.workload.done:
            found[f"plain step of {rows} rows"] = speeds.decoding.step(rows)
        if speeds.training and training:
            found |= {"capture of a row": speeds.training.capture, "training step": training.step}
        if not self.here:
            self.notes.append(
                f"{self.config.hardware.name} was not measured: times are its data sheet's at "
                f"{self.config.hardware.efficiency:.0%} of the operations, "
                f"{1e3 * self.config.hardware.launch_seconds:g} ms "
                "a forward beside, and nothing for the network between devices. At small batches a real engine is slower "
                "(hardware.launch_seconds says by how much)."
            )
        return found

    def _parameters(self) -> dict[str, int]:
        counted = self.target.parameters
        found = {"target": counted.total}
        if counted.active != counted.total:
            found["active a token"] = counted.active
        return found | ({"draft": self.draft.parameters} if self.draft else {})

    # ------------------------------------------------------------------ verdicts

    def _judge(self, found: PlanFindings) -> None:
        needed = sum(found.disk.values()) - (found.disk["data"] if found.data_exist else 0)
        if found.free is not None and needed > found.free:
            found.problems.append(self._about_disk(found, needed))
        for stage, parts in found.memory.items():
            peak = sum(parts.values())
            if peak <= TIGHT * self.capacity:
                continue
            knob = self._knob(stage)
            what = f"{stage} takes {size(peak)} of {size(self.capacity)} of memory a device"
            if peak > self.capacity:
                found.problems.append(f"{what}: {knob}.")
            else:
                found.warnings.append(f"{what}, which is tight: {knob}.")

    def _about_disk(self, found: PlanFindings, needed: int) -> str:
        assert found.free is not None
        largest = max(found.disk, key=lambda name: found.disk[name])
        less = {
            "features": "features.source=online stores none, features.format=int8 the least",
            "checkpoints": "train.keep_last=1 keeps fewer",
        }.get(largest, "data.max_prompts takes fewer prompts")
        return f"The run takes {size(needed)} of disk, and {size(found.free)} are free: {less}, out=... is another disk."

    def _knob(self, stage: str) -> str:
        """The first setting with which the stage fits comfortably."""
        for words, changed in remedies(stage, self.config, self.devices):
            peak = sum(self._memory(changed)[stage].values())
            if peak <= TIGHT * self.capacity:
                return f"{words} would take {size(peak)}"
        if stage == "prepare":
            return "data.regenerate=servers lets other machines answer (data.servers=[...])"
        if stage == "train":
            return "features.source=server runs the target elsewhere (python -m deepspec.serve_features)"
        return "it needs a machine with more memory, or target.device_map over several devices"
