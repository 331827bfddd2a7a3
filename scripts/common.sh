# Shared by the scripts beside it; sourced, not run. Sets `root` and `venv`, goes to the project's folder.
# shellcheck shell=bash disable=SC2034

set -euo pipefail
# pip answers Ctrl-C by failing, not by dying of it: without this the script would go on after it.
trap 'exit 130' INT

# with CDPATH set, cd prints where it went
root=$(unset CDPATH && cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${DEEPSPEC_VENV:-$root/.venv}
cd "$root"

say() { printf '%s\n' "$*"; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# Threads that wait for each other by sleeping: with other programs running the difference is large.
runtime_settings() {
    export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
    export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
    export PYTHONUNBUFFERED=1
    if ! has_gpu; then
        export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu}
    fi
}
