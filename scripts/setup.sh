#!/usr/bin/env bash
# Makes the virtual environment (.venv) with the pinned set of packages. Running it again is instant once it is
# done, and continues where it was interrupted otherwise.
#
#   PYTHON=python3.12                  which Python to use (3.11 to 3.13)
#   DEEPSPEC_VENV=/path                another place for the environment
#   DEEPSPEC_TORCH_INDEX=https://...   where to look for PyTorch's CPU build first; empty: only the default index

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

torch_index=${DEEPSPEC_TORCH_INDEX-https://download.pytorch.org/whl/cpu}
reach_seconds=20
stamp=$venv/deepspec-installed
lock=$venv.lock
want=$(cat constraints.txt pyproject.toml | cksum)
want="$want $root"

suits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        suits "$PYTHON" || fail "PYTHON=$PYTHON is not a Python from 3.11 to 3.13. Name another one."
        command -v "$PYTHON"
        return
    fi
    local name
    for name in python3.12 python3.11 python3.13 python3 python; do
        if suits "$name"; then
            command -v "$name"
            return
        fi
    done
    fail "No Python from 3.11 to 3.13 was found. Install one, or name it: PYTHON=/path/to/python $0"
}

# An environment whose Python or pip does not start was interrupted while being made, or its Python is gone.
make_environment() {
    if "$venv/bin/python" -m pip --version >/dev/null 2>&1 && suits "$venv/bin/python"; then
        return
    fi
    local python
    python=$(find_python)
    say "Making $venv with $("$python" --version 2>&1)"
    "$python" -m venv --clear "$venv" ||
        fail "$python cannot make virtual environments. On Debian or Ubuntu: apt-get install python3-venv"
}

# pip writes RECORD last: a package without it was cut off half-way and would pass for installed.
drop_half_installed() {
    local info
    for info in "$venv"/lib/python*/site-packages/*.dist-info; do
        if [ -d "$info" ] && [ ! -e "$info/RECORD" ]; then
            say "Removing the half-installed $(basename "$info" .dist-info)"
            rm -rf "$info"
        fi
    done
}

# Two pips in one environment break each other's packages. The lock of a process that is gone counts for nothing.
only_installation_here() {
    local other
    mkdir -p "$(dirname "$venv")"
    if [ -f "$lock" ] && other=$(cat "$lock") && ! kill -0 "$other" 2>/dev/null; then
        rm -f "$lock"
    fi
    if ! (set -o noclobber && echo $$ >"$lock") 2>/dev/null; then
        fail "Process $(cat "$lock") is installing into $venv already: wait for it. If that is another program, delete $lock."
    fi
    trap 'rm -f "$lock"' EXIT
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# pip install, less its hundreds of lines about what it looks at; downloads, errors and the summary stay.
install() {
    pip install "$@" | awk '/^ *(Collecting|Processing|Requirement already|Using cached|Looking in|Attempting|Found existing|Uninstalling)/ { next } { print; fflush() }'
}

# True if the index answers in time and has the pinned version.
index_has() {
    "$venv/bin/python" - "$torch_index" "$1" "$reach_seconds" <<'PYTHON'
import subprocess
import sys

index, version, seconds = sys.argv[1:]
command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--timeout", "8", "--retries", "0"]
command += ["index", "versions", "torch", "--index-url", index]
try:
    done = subprocess.run(command, capture_output=True, text=True, timeout=float(seconds))
except subprocess.TimeoutExpired:
    sys.exit(1)
versions = done.stdout.replace(",", " ").split()
sys.exit(done.returncode != 0 or not any(one.partition("+")[0] == version for one in versions))
PYTHON
}

install_torch() {
    local pin version
    pin=$(grep '^torch==' constraints.txt)
    version=${pin#torch==}
    if "$venv/bin/python" -c "import torch, sys; sys.exit(torch.__version__.partition('+')[0] != '$version')" \
        >/dev/null 2>&1; then
        return
    fi
    if [ "$(uname -s)" = Linux ] && ! has_gpu && [ -n "$torch_index" ]; then
        say "No NVIDIA GPU: looking for PyTorch's CPU build at $torch_index (at most $reach_seconds s)"
        # without its dependencies: those come from the default index, with everything else
        if index_has "$version" && install --retries 1 --no-deps --index-url "$torch_index" "$pin"; then
            return
        fi
        say "Not available there; taking PyTorch from the default index (this can be a download of several GB)"
    fi
    install -c constraints.txt "$pin"
}

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && [ -x "$venv/bin/python" ]; then
    exit 0
fi

if [ "$(uname -s)" = Darwin ] && [ "$(uname -m)" = x86_64 ]; then
    fail "PyTorch has no current build for Intel Macs. Use Linux or a Mac with Apple silicon."
fi

only_installation_here
trap 'say "Stopped. The same command continues." >&2; exit 130' INT
say "Installing into $venv: about 1.8 GB on disk, usually 2 to 6 minutes. Ctrl-C is safe; run again to continue."
make_environment
rm -f "$stamp"
drop_half_installed
install_torch
# DeepSpeed compiles its operators when they are first used, not now
export DS_BUILD_OPS=0
install -c constraints.txt -e '.[dev]'
printf '%s\n' "$want" >"$stamp.partial"
mv "$stamp.partial" "$stamp"
say "Installed."
