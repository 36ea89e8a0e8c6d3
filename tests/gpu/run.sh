#!/usr/bin/env bash
# What one GPU can show, on a bare machine: CUDA 13, torch, pytest, g++, no network. See README.md beside this.
#   tests/gpu/run.sh [--wheels DIR] [--out DIR] [--part 1|2|3] [--build DIR] [--seconds N] [--only GROUP,GROUP]
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
tree="$(cd "$here/../.." && pwd)"
wheels="" out="$PWD/gpu-report" part="" build="" seconds="" tests=(tests/gpu)

usage() {
    sed -n '2,3s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit "$1"
}

while [ $# -gt 0 ]; do
    case "$1" in
        --wheels) wheels="$(realpath "${2:?--wheels needs a directory}")"; shift 2 ;;
        --out) out="$(realpath -m "${2:?--out needs a directory}")"; shift 2 ;;
        --part)
            part="${2:?--part needs a number}"
            [[ "$part" =~ ^[123]$ ]] || { echo "no part $part" >&2; usage 2; }
            shift 2
            ;;
        --build) build="$(realpath -m "${2:?--build needs a directory}")"; shift 2 ;;
        --seconds) seconds="${2:?--seconds needs a number}"; shift 2 ;;
        --only)
            tests=()
            IFS=, read -ra names <<< "${2:?--only needs names}"
            for name in "${names[@]}"; do
                [ -f "$here/test_$name.py" ] || { echo "no group $name" >&2; usage 2; }
                tests+=("tests/gpu/test_$name.py")
            done
            shift 2
            ;;
        -h | --help) usage 0 ;;
        *) echo "unknown argument: $1" >&2; usage 2 ;;
    esac
done

python="${PYTHON:-python3}"
if [ -z "$build" ]; then
    build="$(mktemp -d -t gc-gpu-XXXXXX)"
    trap 'rm -rf "$build"' EXIT
fi
mkdir -p "$build/site" "$build/cores" "$out"

# Work in a copy: nothing that is built may be left in the tree.
rm -rf "$build/tree"
mkdir "$build/tree"
for each in coordinator device_comm shm_broadcast tests setup.py; do
    cp -R "$tree/$each" "$build/tree/"
done
find "$build/tree" \( -name '*.so' -o -name '__pycache__' \) -prune -exec rm -rf {} +
cd "$build/tree"
export PYTHONPATH="$build/tree:$build/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
seconds="${seconds:-$("$python" -m tests.gpu.steps $part)}"

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
        --target "$build/site" "$package"
done

# The cores of an earlier part are good if they were built from the same sources.
sources="$(find coordinator device_comm shm_broadcast setup.py -type f \( -name '*.cpp' -o -name '*.hpp' -o -name '*.h' \
    -o -name setup.py \) -print0 | sort -z | xargs -0 cat | sha256sum | cut -c1-16)"
if [ -f "$build/cores/$sources.tar" ]; then
    tar -xf "$build/cores/$sources.tar"
else
    echo "building the native cores ..."
fi
# The first import of torch reads gigabytes from a cold disk. It must not take the time of the first test.
timeout 150 "$python" -c 'import torch; torch.cuda.is_available() and torch.zeros(1, device="cuda")' &
warm_up=$!
if [ ! -f "$build/cores/$sources.tar" ]; then
    timeout 150 "$python" setup.py -q build_ext --inplace --parallel "$(nproc)"
    find . -name '*.so' -print0 | tar -cf "$build/cores/$sources.tar.part" --null -T -
    mv "$build/cores/$sources.tar.part" "$build/cores/$sources.tar"
fi
wait "$warm_up" || echo "torch cannot be imported, or its first use of the GPU failed: the tests will tell" >&2
# pytest needs its settings. The build goes without them: they ask for newer tools than a machine may have.
cp "$tree/pyproject.toml" .

left=$((seconds - SECONDS))
status=0
# Plugins of the machine stay out: their warnings would be errors.
PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 timeout --kill-after=5 "$((left + 60))" \
    "$python" -m pytest -v -p no:cacheprovider --require-gpu --gpu-seconds "$left" --gpu-report "$out" \
    ${part:+--gpu-part "$part"} "${tests[@]}" || status=$?
echo "done in $SECONDS s; the report: $out/gpu-report.md"
exit "$status"
