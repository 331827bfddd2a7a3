"""`python -m deepspec.doctor`: what this machine has, what is missing, and what to do about it.

Every check is a function that returns its findings; a missing essential makes the exit status 1.
"""

import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from deepspec.artifacts import cache_dir

OK, WARNING, MISSING = "OK", "warning", "missing"
ESSENTIAL = (
    "torch",
    "transformers",
    "datasets",
    "accelerate",
    "tokenizers",
    "safetensors",
    "hydra-core",
    "omegaconf",
    "numpy",
    "gguf",
)
OPTIONAL = ("deepspeed", "wandb", "tensorboard", "trackio", "evaluate", "sacrebleu", "rouge-score")
INSTRUCTIONS = {
    "x86": ("avx2", "avx512f", "avx512_bf16", "amx_bf16"),
    "arm": ("asimd", "bf16", "i8mm", "sve"),
}
HUB = "huggingface.co"
HUB_SECONDS = 5.0
NOISE_SECONDS = 1.0
GIB = 2**30
NEEDED_DISK = 2 * GIB  # the built-in target, its wheel and one run
NEEDED_MEMORY = 4 * GIB


@dataclass
class Finding:
    """One line: OK, warning or missing, what was found, and what to do where that is not OK."""

    state: str
    what: str
    found: str
    do: str = ""


def python() -> list[Finding]:
    version = platform.python_version()
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    do = "" if fits else "Use Python 3.11 to 3.13: PYTHON=python3.12 bash scripts/setup.sh"
    return [Finding(OK if fits else MISSING, "python", f"{version} on {platform.platform()}", do)]


def packages() -> list[Finding]:
    found = {name: _version(name) for name in ESSENTIAL}
    absent = [name for name, version in found.items() if version is None]
    have = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    do = f"Not installed: {', '.join(absent)}. Run bash scripts/setup.sh" if absent else ""
    extras = {name: _version(name) for name in OPTIONAL}
    some = ", ".join(f"{name} {version}" for name, version in extras.items() if version) or "none"
    clash = _other_deepspec()
    return [
        Finding(MISSING if absent else OK, "packages", have or "none", do),
        Finding(OK, "optional packages", some),
        *([clash] if clash else []),
    ]


def devices() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        driver = shutil.which("nvidia-smi")
        if driver and torch.version.cuda is None:
            do = "A GPU is here but torch is the CPU build. Delete .venv and run bash scripts/setup.sh again."
            return [Finding(WARNING, "devices", "cpu", do)]
        return [Finding(OK, "devices", "cpu")]
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(f"cuda:{index} {properties.name}, {properties.total_memory / GIB:.0f} GiB")
    return [Finding(OK, "devices", "; ".join(found))]


def processor() -> list[Finding]:
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = f"{torch.get_num_threads()} torch threads on {usable} usable cores"
    set_by = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY") if name in os.environ}
    if set_by:
        threads += f" ({', '.join(f'{name}={value}' for name, value in set_by.items())})"
    return [Finding(OK, "threads", threads), Finding(OK, "instruction sets", _instructions())]


def memory() -> list[Finding]:
    import psutil

    now = psutil.virtual_memory()
    found = f"{now.available / GIB:.1f} of {now.total / GIB:.1f} GiB free"
    short = now.available < NEEDED_MEMORY
    do = "The quickstart needs about 4 GiB: close something, or lower data.batch_size." if short else ""
    return [Finding(WARNING if short else OK, "memory", found, do)]


def disk() -> list[Finding]:
    place = cache_dir()
    existing = next(parent for parent in (place, *place.parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        return [
            Finding(
                MISSING, "cache", f"{place} cannot be written", "Set XDG_CACHE_HOME to a folder that can."
            )
        ]
    free = shutil.disk_usage(existing).free
    short = free < NEEDED_DISK
    do = "Free some space, or set XDG_CACHE_HOME to a folder on another disk." if short else ""
    return [Finding(WARNING if short else OK, "disk", f"{free / GIB:.1f} GiB free at {place}", do)]


def builtin_target() -> list[Finding]:
    converted = sorted(path.parent for path in (cache_dir() / "targets").glob("smollm2_135m*/config.json"))
    if converted:
        return [Finding(OK, "built-in target", f"ready in {converted[0]}")]
    return [Finding(OK, "built-in target", "not there yet; the first run downloads and converts it (93 MB)")]


def hub() -> list[Finding]:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return [Finding(OK, "hub", "off (HF_HUB_OFFLINE); only targets on this disk can be used")]
    host = os.environ.get("HF_ENDPOINT", f"https://{HUB}").partition("://")[2].partition("/")[0]
    name, _, port = host.partition(":")
    # getaddrinfo has no time limit of its own, so it waits in a process that can be stopped
    probe = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2]))).close()"
    command = [sys.executable, "-c", probe, name, port or "443"]
    try:
        reached = (
            subprocess.run(command, capture_output=True, timeout=HUB_SECONDS, check=False).returncode == 0
        )
    except subprocess.TimeoutExpired:
        reached = False
    if reached:
        return [Finding(OK, "hub", f"{name} answers")]
    do = "Hub targets cannot be downloaded; target=smollm2_135m and local folders work without it."
    return [Finding(WARNING, "hub", f"{name} does not answer within {HUB_SECONDS:.0f} s", do)]


def noise() -> list[Finding]:
    """What else the machine does during a second of a two-thread matmul loop."""
    import torch

    from deepspec.evaluation.machine import NoiseMeter

    usable = torch.get_num_threads()
    torch.set_num_threads(min(2, usable))
    left, right = torch.rand(512, 512), torch.rand(512, 512)
    left @ right
    meter = NoiseMeter()
    with meter():
        end = time.perf_counter() + NOISE_SECONDS
        while time.perf_counter() < end:
            left @ right
    torch.set_num_threads(usable)
    load = f", load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    found = f"others kept {meter.others} of {os.cpu_count()} cores at work{load}"
    disturbances = meter.disturbances()
    do = f"{' and '.join(disturbances)}: do not trust speeds measured now." if disturbances else ""
    return [Finding(WARNING if disturbances else OK, "noise", found, do)]


def number_formats() -> list[Finding]:
    """Time of the same matmul in float32 and bfloat16; `auto` settings measure again by themselves."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rate = {}
    for dtype in (torch.float32, torch.bfloat16):
        left = torch.rand(256, 1024, device=device).to(dtype)
        right = torch.rand(1024, 1024, device=device).to(dtype)
        best = float("inf")
        for _ in range(6):
            start = time.perf_counter()
            (left @ right).sum().item()
            best = min(best, time.perf_counter() - start)
        rate[dtype] = 2 * 256 * 1024 * 1024 / best / 1e9
    single, brain = rate[torch.float32], rate[torch.bfloat16]
    faster = "bfloat16" if brain > single else "float32"
    found = f"float32 {single:.0f}, bfloat16 {brain:.0f} GFLOP/s on {device}: {faster} is faster here"
    return [Finding(OK, "number formats", found)]


def compiler() -> list[Finding]:
    """DeepSpeed compiles an operator on first use: a C++ compiler and ninja must work."""
    name = os.environ.get("CXX") or next(
        (one for one in ("c++", "g++", "clang++") if shutil.which(one)), None
    )
    if name is None:
        do = "Install a C++ compiler (g++ or clang); only DeepSpeed and torch.compile need it."
        return [Finding(WARNING, "C++ compiler", "none", do)]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "one.cpp")
        source.write_text('#include <vector>\nextern "C" int one() { return std::vector<int>{1}[0]; }\n')
        made = _run(
            [
                *name.split(),
                "-shared",
                "-fPIC",
                "-std=c++17",
                str(source),
                "-o",
                str(source.with_suffix(".so")),
            ]
        )
    ninja = shutil.which("ninja") or importlib.util.find_spec("ninja")
    if made is not None:
        do = "It cannot compile three lines of C++17; reinstall it."
        return [Finding(WARNING, "C++ compiler", f"{name}: {made}", do)]
    if not ninja:
        return [Finding(WARNING, "C++ compiler", f"{name} works, ninja is missing", "pip install ninja")]
    return [Finding(OK, "C++ compiler", f"{name} compiles, ninja is here")]


def deepspeed() -> list[Finding]:
    if sys.platform != "linux":
        return [Finding(OK, "deepspeed", "not used on this system; plain data-parallel training works")]
    if _version("deepspeed") is None:
        return [
            Finding(
                WARNING,
                "deepspeed",
                "not installed",
                "Only ZeRO needs it: DS_BUILD_OPS=0 pip install deepspeed",
            )
        ]
    variables = {} if shutil.which("nvidia-smi") else {"DS_ACCELERATOR": "cpu"}
    failed = _run([sys.executable, "-c", "import deepspeed"], seconds=120, **variables)
    if failed is not None:
        return [
            Finding(WARNING, "deepspeed", f"does not import: {failed}", "Only ZeRO needs it; reinstall it.")
        ]
    return [Finding(OK, "deepspeed", f"{_version('deepspeed')} imports")]


def wandb() -> list[Finding]:
    if _version("wandb") is None:
        return [Finding(WARNING, "wandb", "not installed", "pip install wandb, or keep train.tracker=none")]
    mode = os.environ.get("WANDB_MODE")
    if mode:
        return [Finding(OK, "wandb", f"WANDB_MODE={mode}")]
    key = "WANDB_API_KEY" in os.environ or "api.wandb.ai" in _netrc()
    return [Finding(OK, "wandb", "online: a key is set" if key else "offline: no key is set")]


CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    python,
    packages,
    devices,
    processor,
    memory,
    disk,
    builtin_target,
    hub,
    noise,
    number_formats,
    compiler,
    deepspeed,
    wandb,
)


def diagnose(checks: tuple[Callable[[], list[Finding]], ...] = CHECKS) -> int:
    """Print every finding as it is made; the number of missing essentials."""
    missing = 0
    for check in checks:
        try:
            findings = check()
        except (ImportError, OSError, RuntimeError) as error:
            findings = [
                Finding(
                    MISSING, check.__name__.replace("_", " "), f"failed: {error}", "Run bash scripts/setup.sh"
                )
            ]
        for one in findings:
            print(f"{one.state:8} {one.what:18} {one.found}", flush=True)
            if one.do:
                print(f"{'':8} {'':18} → {one.do}", flush=True)
            missing += one.state == MISSING
    print("\nNothing essential is missing." if not missing else f"\n{missing} essential things are missing.")
    return missing


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _other_deepspec() -> Finding | None:
    """Another project's package has the same import name; installed together they overwrite each other."""
    owners = sorted(set(metadata.packages_distributions().get("deepspec", [])) - {"deepspec"})
    if not owners:
        return None
    do = "Both are imported as `deepspec`; keep them in separate environments."
    return Finding(WARNING, "import name", f"also provided by {', '.join(owners)}", do)


def _instructions() -> str:
    """What this processor has of the instruction sets that make bfloat16 or wide vectors fast."""
    import torch

    arm = platform.machine().lower() in ("arm64", "aarch64")
    wanted = INSTRUCTIONS["arm" if arm else "x86"]
    flags: set[str] = set()
    described = Path("/proc/cpuinfo")
    if described.is_file():
        for line in described.read_text(errors="replace").splitlines():
            if line.lower().startswith(("flags", "features")):
                flags.update(line.partition(":")[2].split())
                break
    elif sys.platform == "darwin":
        flags = _mac_flags()
    have = ", ".join(name for name in wanted if name in flags) or f"none of {', '.join(wanted)}"
    return f"{platform.machine()}: {have}; torch uses {torch.backends.cpu.get_cpu_capability()}"


def _mac_flags() -> set[str]:
    """Apple's names in the words of /proc/cpuinfo."""
    names = {
        "hw.optional.arm.FEAT_BF16": "bf16",
        "hw.optional.arm.FEAT_I8MM": "i8mm",
        "hw.optional.AdvSIMD": "asimd",
    }
    found = set()
    for name, flag in names.items():
        answer = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
        if answer.stdout.strip() == "1":
            found.add(flag)
    return found


def _run(command: list[str], seconds: float = 60, **variables: str) -> str | None:
    """None if the command succeeds, else the last line of what it said."""
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {seconds:.0f} s"
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return None
    return ((done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def _netrc() -> str:
    path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        return path.read_text()
    except OSError:
        return ""


def main() -> None:
    if set(sys.argv[1:]) & {"-h", "--help"}:
        print(__doc__)
        return
    print(f"deepspec on {socket.gethostname()}, {time.strftime('%Y-%m-%d %H:%M')}\n")
    sys.exit(1 if diagnose() else 0)


if __name__ == "__main__":
    main()
