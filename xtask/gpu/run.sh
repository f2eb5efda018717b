#!/bin/sh
# Runs the GPU tests of this bundle and prints a summary. Arguments go to every test binary.
cd "$(dirname "$0")" || exit 1
export SHOAL_GOLDENS="$PWD/golden" SHOAL_BINARY="$PWD/shoal"
failed=""
run() {
    name="$1"; shift
    echo "== $name"
    "$@" || failed="$failed $name"
}
run doctor ./shoal doctor
run kernels ./kernels-cuda --nocapture "$@"
run units ./kernels-unit cuda --nocapture
run goldens ./goldens on_a_gpu --nocapture
run budgets ./budgets gpu --nocapture
run tables ./tables gpu --nocapture
run jobs ./jobs --nocapture
for precision in fp32 tf32 bf16 fp16; do
    run "verify $precision" ./shoal verify --device cuda --precision $precision golden/*
done
# On a part of the GPU the library must be kept from algorithms that leave outputs unwritten.
if command -v nvidia-cuda-mps-control > /dev/null && nvidia-cuda-mps-control -d; then
    for percent in 20 30 40 60; do
        run "products on $percent %" env CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$percent ./kernels-unit cuda::matrix
    done
    echo quit | nvidia-cuda-mps-control
fi
if [ -z "$failed" ]; then echo "== all passed"; else echo "== FAILED:$failed"; exit 1; fi
