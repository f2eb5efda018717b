#!/bin/sh
# Runs compute-sanitizer over the kernel tests, some shapes for each operation (SHOAL_CUDA_CASES, 4 by default). A module
# of tests a process: the sanitizer slows each kernel a thousandfold, and they need not wait for each other.
cd "$(dirname "$0")" || exit 1
export SHOAL_CUDA_CASES="${SHOAL_CUDA_CASES:-4}"
logs="$(mktemp -d)"
# The cache of compiled kernels, made once.
SHOAL_CUDA_CASES=1 ./kernels-cuda norm:: > /dev/null 2>&1
check() {
    tool="$1"; name="$2"; shift 2
    if timeout 500 compute-sanitizer --tool "$tool" --error-exitcode 9 "$@" --test-threads 1 > "$logs/$name" 2>&1
    then echo "passed $(grep -c '^test .* ok' "$logs/$name") tests" >> "$logs/$name"
    else echo "FAILED" >> "$logs/$name"; fi
    echo "$tool $name: $(grep -a SUMMARY "$logs/$name") $(tail -n 1 "$logs/$name")"
}
for module in attention:: embedding:: images:: linear:: norm:: optimizer:: pixels:: pointwise::; do
    check racecheck "$module" ./kernels-cuda "$module" --skip large_convolutions --skip very_many &
done
# Products and convolutions are the libraries' own, and racecheck breaks cuBLASLt's nvjet kernels, which wide products in
# halves go to: one shape, which does not, shows our own.
( SHOAL_CUDA_CASES=1; check racecheck convolution:: ./kernels-cuda convolution:: --skip large_convolutions ) &
check racecheck flash ./kernels-unit cuda::flash &
check memcheck everything ./kernels-cuda --skip large_convolutions --skip very_many &
wait
if grep -q FAILED "$logs"/*; then echo "== FAILED: see $logs"; exit 1; else echo "== nothing found"; fi
