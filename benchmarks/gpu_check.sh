#!/usr/bin/env bash
# All speed measurements and the tests that want a GPU, on one GPU, within ten minutes, the most telling ones first.
#
#   benchmarks/gpu_check.sh                       python3 is the Python with jax (and torch, for the comparison)
#   PYTHON=.venv/bin/python TORCH_PYTHON=/path/to/python benchmarks/gpu_check.sh
#   BUDGET=1500 benchmarks/gpu_check.sh           seconds for everything; what is left over at the end is not run
#   ONLY='fp8|peers' benchmarks/gpu_check.sh      parts whose names match, for what the first time left out
#   COMMIT=1a2b3c4 benchmarks/gpu_check.sh        what results say, on a copy of the tree without its history
#   TINY=1 benchmarks/gpu_check.sh                toy sizes on CPU, to try this script; so without a GPU anyway
#
# Each part has a time limit of its own, so that a slow one does not eat the rest. Results are written after each part, so
# that an end by force leaves what there is: gpu_check.json with every part's figures, exit code and seconds, and
# gpu_check.log, into the folder $OUT, or benchmarks/results where that is not set. Ends with 1 if a part failed.
# Python packages beyond those of the machine can lie anywhere on PYTHONPATH.
set -uo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
cd "$root"
python="${PYTHON:-python3}"
torch_python="${TORCH_PYTHON:-$python}"
out="${OUT:-$root/benchmarks/results}"
budget="${BUDGET:-570}"
only="${ONLY:-.}"
begun=$SECONDS
parts="$(mktemp -d)"
trap 'rm -rf "$parts"' EXIT
mkdir -p "$out"
# Of chosen parts the results go beside those that are there.
kept="{}"
[ "$only" != . ] && [ -s "$out/gpu_check.json" ] && kept="$(cat "$out/gpu_check.json")"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec > >(tee "$out/gpu_check.log") 2>&1

tiny="${TINY:-0}"
if ! nvidia-smi -L 2>/dev/null | grep GPU >/dev/null; then
    tiny=1
fi

# One file of all parts there are so far.
merge() {
    "$python" - "$parts" "$out/gpu_check.json" "$kept" <<'PY'
import json, sys
from pathlib import Path

folder, merged = Path(sys.argv[1]), json.loads(sys.argv[3])
for end in sorted(folder.glob("*.end")):
    number, name = end.stem.split("-", 1)
    code, seconds, limit = end.read_text().split()
    merged[name] = {"code": int(code), "seconds": int(seconds), "limit": int(limit)}
    figures = folder / f"{name}.json"
    try:
        merged[name]["outcome"] = json.loads(figures.read_text())
    except FileNotFoundError:
        pass
    except ValueError:
        merged[name]["outcome"] = "cut off while it was written"
Path(sys.argv[2]).write_text(json.dumps(merged, indent=1) + "\n")
PY
}

number=100
failed=()
left_out=()
# part NAME LIMIT COMMAND...: with @ for the part's JSON file
part() {
    local name="$1" limit="$2" left=$((budget - (SECONDS - begun)))
    shift 2
    [[ "$name" =~ $only ]] || return 0
    number=$((number + 1))
    if [ "$left" -lt 20 ]; then
        left_out+=("$name")
        return
    fi
    [ "$limit" -gt "$left" ] && limit="$left"
    printf '\n######## %s (at most %s s, %s s left)\n' "$name" "$limit" "$left"
    local start=$SECONDS code=0
    # An interrupt lets pytest say what failed and peers.py end the other trainer; what takes no notice is killed.
    timeout --signal=INT --kill-after=10 "$limit" "${@//@/$parts/$name.json}" || code=$?
    echo "$code $((SECONDS - start)) $limit" >"$parts/$number-$name.end"
    if [ "$code" -ne 0 ]; then
        failed+=("$name ($code)")
        echo "######## $name failed with $code"
    fi
    merge
}

mfu() { # NAME LIMIT CONFIG [SETTING...]
    local name="$1" limit="$2" config="$3"
    shift 3
    part "mfu_$name" "$limit" "$python" benchmarks/mfu.py --config="$config" --steps="$steps" --json=@ "$@"
}

kernels() { # PART LIMIT
    part "kernels_$1" "$2" "$python" benchmarks/kernels.py --parts="$1" --seconds="$seconds" --json=@
}

peers() { # NAME LIMIT CONFIG [SETTING...]
    local name="$1" limit="$2" config="$3"
    shift 3
    part "peers_$name" "$limit" "$python" benchmarks/peers.py --config="$config" --steps="$steps" --json=@ \
        --torch-python="$torch_python" --torch-seconds=$((limit / 4)) "$@"
}

tests() { # LIMIT
    # That file alone: others there import what a machine without the data loader has not.
    part tests "$1" "$python" -m pytest -v -p no:cacheprovider tests/kernels/test_attention_backends.py -k on_a_gpu
}

versions='import jax, sys; d = jax.devices()[0]; print(sys.version.split()[0], jax.__version__, d.device_kind, d.platform)'
if [ "$tiny" = 1 ]; then
    steps=4 seconds=0.02
    export JAX_PLATFORMS=cpu
    part device 60 "$python" -c "$versions"
    mfu llama 120 bench.py:debug
    tests 180
    kernels attention 120
    mfu gpt 120 bench.py:debug_gpt
    peers llama 240 bench.py:debug --devices=cpu
    kernels matmul 120
    kernels loss 120
    kernels norm 120
else
    # A step takes about two seconds, and six are beside those that are timed.
    steps=6 seconds=0.2
    export JAX_PLATFORMS=cuda,cpu
    long=(--model.sequence_length=8192)
    nvidia-smi --query-gpu=name,memory.total,driver_version,clocks.max.sm,power.limit --format=csv
    part device 60 "$python" -c "$versions"
    mfu llama_3b_4096 150 bench.py:llama_3b
    tests 150
    kernels attention 120
    mfu gpt_1_3b_2048 120 bench.py:gpt_1_3b
    mfu llama_8b_18_layers_8192 120 bench.py:llama_8b_18_layers
    peers llama_1b_4096 240 bench.py:llama_1b
    kernels matmul 60
    kernels loss 80
    mfu llama_3b_8192 120 bench.py:llama_3b "${long[@]}" --batch.micro_size=2 --batch.global_size=8
    mfu llama_3b_4096_fp8 150 bench.py:llama_3b --precision.fp8=Fp8
    kernels norm 60
    mfu llama_1b_4096_recompute_none 120 bench.py:llama_1b --model.recompute=none
    mfu gpt_1_3b_8192 120 bench.py:gpt_1_3b "${long[@]}" --batch.micro_size=4 --batch.global_size=16
    mfu llama_1b_2048 120 bench.py:llama_1b --model.sequence_length=2048 --batch.micro_size=16 --batch.global_size=64
    mfu llama_1b_8192 120 bench.py:llama_1b "${long[@]}" --batch.micro_size=4 --batch.global_size=16
    peers gpt_1_3b_2048 240 bench.py:gpt_1_3b
    peers llama_3b_4096 280 bench.py:llama_3b
fi

printf '\n######## %s s; results in %s\n' "$((SECONDS - begun))" "$out/gpu_check.json"
[ ${#left_out[@]} -gt 0 ] && echo "not run, the time was over: ${left_out[*]}"
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
echo "all parts that ran succeeded"
