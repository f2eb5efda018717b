#!/bin/sh
# One GPU as a fleet, beside what it is to be measured by, as docs/performance.md has it: every figure of a part comes from one
# run of this, and each part takes less than ten minutes.
#
#     sh fleet.sh quarters|uneven|larger [FOLDER]
#
# Profiles, tables, traces and what was said stay in FOLDER (./fleet-run); summary.txt there has the figures.
here="$(cd "$(dirname "$0")" && pwd)"
shoal="${SHOAL_BINARY:-$here/shoal}"
part="$1"
folder="${2:-fleet-run}"
precision="${SHOAL_PRECISION:-bf16}"
mkdir -p "$folder" && cd "$folder" || exit 1
cp "$here"/examples/*.toml . || exit 1
seq 1 1500000 > corpus.txt
began="$(date +%s)"

say() { echo "$*" | tee -a summary.txt; }
# Names what follows, and says when it began.
heading() { say "== $* (after $(($(date +%s) - began)) s)"; }
# The lines of a log that have figures; all of its end where there are none.
figures() {
    found="$(grep -E 'tok/s|a step took|ratio|predicted to take|memory (stayed|passed)|step predicted' "$1")"
    if [ -n "$found" ]; then say "$found"; else say "$1 has no figures:"; tail -n 12 "$1" | tee -a summary.txt; fi
}

start_mps() {
    CUDA_MPS_PIPE_DIRECTORY="$(mktemp -d)"
    CUDA_MPS_LOG_DIRECTORY="$CUDA_MPS_PIPE_DIRECTORY"
    export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    nvidia-cuda-mps-control -d || exit 1
    trap 'echo quit | nvidia-cuda-mps-control' EXIT
}

# Does a task under each of these percentages at the same time. Who has ended goes on with something of the kind until all
# have: nobody is measured beside fewer.
at_once() {
    task="$1"
    rm -f enough ended.*
    number=0
    for percent in $2; do
        (
            export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="$percent"
            "$task" "$number" "$percent" > "$task.$number.log" 2>&1 || echo "$task on $percent % failed" >> "$task.$number.log"
            touch "ended.$number"
            while [ ! -e enough ]; do keep_busy "$number" > /dev/null 2>&1 || sleep 1; done
        ) &
        number=$((number + 1))
    done
    while [ "$(ls ended.* 2> /dev/null | wc -l)" -lt "$number" ]; do sleep 0.2; done
    touch enough
    wait
}
keep_busy() {
    "$shoal" profile "$model" --precision "$precision" --blocks 2 --samples 4 --rounds 50 --out "busy.$1.json"
}
profile() {
    "$shoal" profile "$model" --precision "$precision" --blocks 4 --samples "$samples" --out "profile.$1.json"
}
# Profiles of all parts, measured at the same time: parts of a kind must agree, or the first of them counts.
profile_parts() {
    heading "profiles of $1 %, all at once"
    at_once profile "$1"
    merged=""
    for each in profile.?.json; do merged="$merged --merge $each"; done
    # shellcheck disable=SC2086
    "$shoal" profile "$model" --only-merge $merged --out profile.json > merge.log 2>&1 ||
        { tail -n 3 merge.log; cp profile.0.json profile.json; }
}

# Plans: name, profile, options of the search.
plan() {
    name="$1"; by="$2"; shift 2
    # shellcheck disable=SC2086
    "$shoal" plan "$job" --fleet "$fleet" $changes --lab --survive 0 --profile "$by" --table "table.$name.json" "$@" \
        > "plan.$name.log" 2>&1 || { say "no plan for $name:"; tail -n 3 "plan.$name.log" | tee -a summary.txt; return 1; }
}
# Trains by a plan: name, profile, steps, options of the lab.
train() {
    name="$1"; by="$2"; steps="$3"; shift 3
    heading "$name, $steps steps"
    # shellcheck disable=SC2086
    timeout 180 "$shoal" lab "$fleet" "$job" $changes --plain --survive 0 --profile "$by" --table "table.$name.json" --unsaved \
        --set "train.steps=$steps" --set "checkpoint.to=runs/$name" --record "trace.$name.json" "$@" > "lab.$name.log" 2>&1
    figures "lab.$name.log"
    rm -rf "runs/$name"
    # shellcheck disable=SC2086
    [ -e "trace.$name.json" ] && "$shoal" simulate "$job" --fleet "$fleet" $changes --lab --table "table.$name.json" \
        --profile "$by" --against "trace.$name.json" --correct "corrected.$name.json" > "simulate.$name.log" 2>&1
}
# The profile as a run corrected it, or as it was.
corrected() { if [ -e "corrected.$1.json" ]; then echo "corrected.$1.json"; else echo "$2"; fi; }

quarters() {
    model=gpt2-1.5b; job=gpt2-1.5b.toml; fleet=h200-shares.toml; samples=1,2,3,4,6,8
    changes="--set train.precision=$precision"
    heading "the whole GPU"
    "$shoal" bench "$model" --batch 64 --precision "$precision" --seconds 3 --rounds 2 > whole.log 2>&1
    figures whole.log
    start_mps
    profile_parts "25 25 25 25"
    plan searched profile.json --shape pipeline --effort 0 && train searched profile.json 8
    by="$(corrected searched profile.json)"
    plan improved "$by" --shape pipeline --effort 30 && train improved "$by" 12
    by="$(corrected improved "$by")"
    plan again "$by" --shape pipeline --effort 30 && train again "$by" 12
    by="$(corrected again "$by")"
    plan data-parallel "$by" --shape data-parallel --effort 0 && train data-parallel "$by" 5
}

apart() { "$shoal" bench "$model" --batch 32 --memory 28GiB --precision "$precision" --seconds 6 --rounds 3; }
uneven() {
    model=gpt2-774m; job=gpt2-1.5b.toml; fleet=h200-uneven.toml; samples=1,2,3,4,6,8,12,16,24,32
    changes="--set model.preset=gpt2-774m --set train.global_batch=256 --set train.precision=$precision"
    start_mps
    heading "each part by itself, all at once"
    at_once apart "40 30 20 10"
    for each in apart.?.log; do figures "$each"; done
    profile_parts "40 30 20 10"
    plan first profile.json --effort 0 && train first profile.json 6 --unshaped
    by="$(corrected first profile.json)"
    plan auto "$by" --effort 40 && train auto "$by" 8 --unshaped
    by="$(corrected auto "$by")"
    plan again "$by" --effort 40 && train again "$by" 8 --unshaped
    by="$(corrected again "$by")"
    plan sharded "$by" --shape sharded --effort 10 && train sharded "$by" 6 --unshaped
    plan even "$by" --shape even --effort 0 && train even "$by" 5 --unshaped
}

larger() {
    for batch in 8 32; do
        heading "6.25 billion parameters in 16 GiB, $batch samples"
        "$shoal" bench gpt2:4096,30,32,50257 --memory 16GiB --batch "$batch" --precision "$precision" --seconds 0.7 --rounds 2 \
            --peer python3 > "larger.$batch.log" 2>&1
        figures "larger.$batch.log"
    done
}

case "$part" in
quarters | uneven | larger) "$part" ;;
*) sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
heading "done"
