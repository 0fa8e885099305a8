#!/usr/bin/env bash
# Measure torchtitan and our tuned path in one call on the same machine.
#
#     bash scripts/beside_torchtitan.sh CHECKOUT [one] [four]
#
# CHECKOUT: torchtitan v0.2.2 with its packages (tyro, torchdata) installed beside ours. Without
# further words both parts are done, one GPU and four. Records: results/local/beside-torchtitan and
# results/local/beside-torchtitan-fsdp, torchtitan's in their folders peer/. Who waits longest for
# GPUs gets them first, so that the two are mixed.
set -u
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { echo "beside_torchtitan: name the checkout of torchtitan" >&2; exit 2; }
[ -e .make/python ] || { echo "beside_torchtitan: run make setup first" >&2; exit 2; }
checkout=$1; shift
parts=${*:-one four}
for part in $parts; do
    case $part in
    one | four) ;;
    *) echo "beside_torchtitan: '$part' is no part; say one or four" >&2; exit 2 ;;
    esac
done
python=$(cat .make/python)
failed=0

ours() {
    "$python" -m fp8study.cli reproduce "$1" --no-report
}

# Each series keeps its own data: two that write one corpus would read half of it.
peer() {
    study=$1 name=$2; shift 2
    "$python" scripts/peer_torchtitan.py --checkout "$checkout" \
        --output "results/local/$study/peer/$name" "$@"
}

# Wait for what was started in the background, and remember whether any of it failed.
finish() {
    for job in $(jobs -p); do wait "$job" || failed=1; done
}

for part in $parts; do
    case $part in
    one)
        study=beside-torchtitan
        for precision in bf16 fp8_tensorwise; do
            peer $study "8b-$precision" --model 8b --precision $precision --steps 25 &
            peer $study "1b-$precision" --model 1b --batch 1 8 --precision $precision \
                --steps 25 &
        done
        ours $study &
        finish ;;
    four)
        study=beside-torchtitan-fsdp
        peer $study 8b --model 8b --gpus 4 --batch 2 --precision bf16 fp8_tensorwise \
            --warmup-steps 5 --steps 15 &
        ours $study &
        finish ;;
    esac
done
exit $failed
