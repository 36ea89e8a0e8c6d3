#!/usr/bin/env bash
# What one GPU can show, on a bare machine: CUDA 13, torch, g++, no network. See README.md beside this.
#   tests/gpu/run.sh [--wheels DIR] [--out DIR] [--seconds 420] [--only STEP,STEP]
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
tree="$(cd "$here/../.." && pwd)"
wheels="" out="$PWD/gpu-report" seconds=420 only=""

usage() {
    sed -n '2,3s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit "$1"
}

while [ $# -gt 0 ]; do
    case "$1" in
        --wheels) wheels="${2:?--wheels needs a directory}"; shift 2 ;;
        --out) out="${2:?--out needs a directory}"; shift 2 ;;
        --seconds) seconds="${2:?--seconds needs a number}"; shift 2 ;;
        --only) only="${2:?--only needs names}"; shift 2 ;;
        -h | --help) usage 0 ;;
        *) echo "unknown argument: $1" >&2; usage 2 ;;
    esac
done

python="${PYTHON:-python3}"
begin=$SECONDS
work="$(mktemp -d -t gc-gpu-XXXXXX)"
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/site" "$work/tree" "$out"

# A copy: nothing that is built may be left in the tree. Without pyproject.toml, which asks for newer tools than a
# machine may have and says nothing that the native cores need.
for part in coordinator device_comm shm_broadcast tests setup.py; do
    cp -R "$tree/$part" "$work/tree/"
done
find "$work/tree" \( -name '*.so' -o -name '__pycache__' \) -prune -exec rm -rf {} +

export PYTHONPATH="$work/tree:$work/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
# The ranks of a step share the cores: torch's own threads would only get in their way.
export OMP_NUM_THREADS=1

for pair in zmq:pyzmq msgspec:msgspec; do
    module="${pair%%:*}" package="${pair##*:}"
    if "$python" -c "import $module" 2>/dev/null; then
        continue
    fi
    if [ -z "$wheels" ]; then
        echo "$package is missing: give a folder with its wheel as --wheels DIR" >&2
        exit 2
    fi
    "$python" -m pip install -q --disable-pip-version-check --no-index --no-deps --find-links "$wheels" \
        --target "$work/site" "$package"
done

echo "building the native cores ..."
(
    cd "$work/tree"
    timeout 150 "$python" setup.py -q build_ext --inplace --parallel 2
)
rm -rf "$work/tree/build"

# From outside of the tree: what is imported is the copy.
cd "$work"
left=$((seconds - (SECONDS - begin)))
arguments=(--out "$out" --seconds "$left")
if [ -n "$only" ]; then
    arguments+=(--only "$only")
fi
status=0
timeout --kill-after=5 "$((left + 30))" "$python" -m tests.gpu.main "${arguments[@]}" || status=$?
echo "done in $((SECONDS - begin)) s"
exit "$status"
