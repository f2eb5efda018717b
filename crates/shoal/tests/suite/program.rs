//! Programs as files: any order the dependencies allow trains to the same bits, and everything else is
//! refused before a step is taken, by the name of the instruction that is wrong.

use std::collections::BTreeSet;
use std::fs;

use serde_json::{Value, json};

use crate::common::{Folder, JOB, Outcome, assert_same_files, checkpoint_of, column, draw, metrics};

const STEPS: u64 = 3;

/// Three micro-batches of two, with dropout: an order must not show in what is drawn either.
fn folder() -> Folder {
    let job = JOB
        .replace("preset = \"gpt2-tiny\"", "preset = \"gpt2-tiny\"\ndropout = 0.1")
        .replace("global_batch = 4", "global_batch = 6")
        .replace("steps = 4", &format!("steps = {STEPS}"));
    Folder::with_job(&job)
}

const MICRO_BATCH: &str = "plan.micro_batch=2";

/// The compiled program, with more settings.
fn planned(folder: &Folder, settings: &[&str]) -> Value {
    let mut arguments = vec!["plan", "job.toml", "--program", "compiled.json", "--set", MICRO_BATCH];
    arguments.extend(settings.iter().flat_map(|setting| ["--set", setting]));
    folder.shoal(&arguments).succeeds();
    serde_json::from_str(&fs::read_to_string(folder.join("compiled.json")).unwrap()).unwrap()
}

/// Trains with a program in a run folder of its own.
fn train(folder: &Folder, program: &Value, run: &str) -> Outcome {
    folder.write("program.json", program.to_string());
    let to = format!("checkpoint.to={run}");
    folder.shoal(&["train", "job.toml", "--program", "program.json", "--set", MICRO_BATCH, "--set", &to])
}

fn instructions(program: &mut Value) -> &mut Vec<Value> {
    program["instructions"].as_array_mut().unwrap()
}

fn id(instruction: &Value) -> u64 {
    instruction["id"].as_u64().unwrap()
}

fn after(instruction: &Value) -> Vec<u64> {
    instruction["after"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
}

/// The place of the first instruction of a kind.
fn first(program: &Value, op: &str) -> usize {
    let all = program["instructions"].as_array().unwrap();
    all.iter().position(|instruction| instruction["op"] == op).unwrap_or_else(|| panic!("no {op}"))
}

/// A random order that keeps every `after`.
fn shuffled(program: &Value, seed: u64) -> Value {
    let mut program = program.clone();
    let mut waiting = std::mem::take(instructions(&mut program));
    let mut done = BTreeSet::new();
    let mut order = Vec::new();
    while !waiting.is_empty() {
        let free: Vec<usize> = (0..waiting.len())
            .filter(|index| after(&waiting[*index]).iter().all(|id| done.contains(id)))
            .collect();
        let next = waiting.remove(free[draw(seed, order.len() as u64, free.len())]);
        done.insert(id(&next));
        order.push(next);
    }
    *instructions(&mut program) = order;
    program
}

#[test]
fn any_order_the_dependencies_allow_gives_the_same_bits() {
    let folder = folder();
    for activations in ["plan.activations=keep", "plan.activations=recompute"] {
        let compiled = planned(&folder, &[activations]);
        let straight = format!("straight-{activations}");
        train(&folder, &compiled, &straight).succeeds();
        let expected = metrics(&folder.join(&straight));
        assert_eq!(expected.len() as u64, STEPS);
        let mut orders = BTreeSet::from([compiled.to_string()]);
        for seed in 1..=4 {
            let reordered = shuffled(&compiled, seed);
            assert!(orders.insert(reordered.to_string()), "seed {seed} gives an order already tried");
            let run = format!("{seed}-{activations}");
            train(&folder, &reordered, &run).succeeds();
            let found = metrics(&folder.join(&run));
            for name in ["loss", "grad_norm"] {
                assert_eq!(
                    column(&found, name),
                    column(&expected, name),
                    "seed {seed}, {activations}: {name}"
                );
            }
            assert_same_files(
                &checkpoint_of(&folder.join(&run), STEPS),
                &checkpoint_of(&folder.join(&straight), STEPS),
            );
        }
    }
}

#[test]
fn an_instruction_before_one_it_must_follow_is_refused_by_name() {
    let folder = folder();
    let compiled = planned(&folder, &[]);
    let count = compiled["instructions"].as_array().unwrap().len();
    let mut tried = 0;
    for seed in 0..10 {
        let mut program = compiled.clone();
        let all = instructions(&mut program);
        let moved = draw(seed, 1, count);
        let needs = after(&all[moved]);
        if needs.is_empty() {
            continue;
        }
        let needed = needs[draw(seed, 2, needs.len())];
        let instruction = all.remove(moved);
        let name = format!("instruction {} (", id(&instruction));
        let place = all.iter().position(|other| id(other) == needed).unwrap();
        all.insert(place, instruction);
        train(&folder, &program, "run").fails(&["program.json", &name], "after");
        tried += 1;
    }
    assert!(tried >= 5, "only {tried} of the draws had something to follow");
    assert!(!folder.join("run").exists(), "a refused program leaves nothing behind");
}

#[test]
fn gradients_added_in_another_order_are_refused_even_where_no_dependency_is_stated() {
    let folder = folder();
    // Layer by layer, the backwards of one layer follow each other.
    let mut program = planned(&folder, &["plan.order=layer_first"]);
    for instruction in instructions(&mut program) {
        instruction["after"] = json!([]);
    }
    // The order alone is sound, so what is refused below is the exchange.
    train(&folder, &program, "sound").succeeds();
    let all = instructions(&mut program);
    let (left, right) = (0..all.len() - 1)
        .map(|place| (place, place + 1))
        .find(|(left, right)| {
            let backward = |place: usize| all[place]["op"] == "backward";
            backward(*left) && backward(*right) && all[*left]["layer"] == all[*right]["layer"]
        })
        .expect("two backwards of one layer in a row");
    let name = format!("instruction {} (", id(&all[right]));
    all.swap(left, right);
    train(&folder, &program, "run").fails(&[&name, "out of turn"], "after");
}

#[test]
fn a_missing_instruction_is_noticed_whatever_it_does() {
    let folder = folder();
    let compiled = planned(&folder, &["plan.activations=recompute"]);
    let kinds =
        ["load", "count_targets", "forward", "recompute", "backward", "sum_loss", "gradient_norm", "update"];
    for op in kinds {
        let mut program = compiled.clone();
        let gone = first(&program, op);
        let gone = instructions(&mut program).remove(gone);
        train(&folder, &program, "run").fails(&["program.json", "refused"], "");
        // The same without a trace of it in what the others must follow.
        for instruction in instructions(&mut program) {
            let left: Vec<u64> = after(instruction).into_iter().filter(|other| *other != id(&gone)).collect();
            instruction["after"] = json!(left);
        }
        train(&folder, &program, "run").fails(&["program.json", "refused"], "");
    }
}

#[test]
fn an_instruction_done_twice_is_refused() {
    let folder = folder();
    let compiled = planned(&folder, &["plan.activations=recompute"]);
    let kinds =
        ["load", "count_targets", "forward", "recompute", "backward", "sum_loss", "gradient_norm", "update"];
    for op in kinds {
        let mut program = compiled.clone();
        let place = first(&program, op);
        let mut twin = program["instructions"][place].clone();
        instructions(&mut program).insert(place + 1, twin.clone());
        let same_id = format!("the id {}", id(&twin));
        train(&folder, &program, "run").fails(&["program.json", "two instructions", &same_id], "");
        twin["id"] = json!(4_000_000);
        instructions(&mut program)[place + 1] = twin;
        train(&folder, &program, "run").fails(&["program.json", "instruction"], "");
    }
}

#[test]
fn what_the_model_or_the_format_does_not_have_is_refused() {
    let folder = folder();
    let compiled = planned(&folder, &[]);
    let (load, forward, backward) =
        (first(&compiled, "load"), first(&compiled, "forward"), first(&compiled, "backward"));
    let update = first(&compiled, "update");
    let cases: [(usize, &str, Value, &[&str]); 16] = [
        (forward, "op", json!("sideways"), &["not a program", "sideways"]),
        (forward, "lane", json!("fast"), &["not a program", "fast"]),
        (forward, "keep", json!("some"), &["not a program", "some"]),
        (forward, "keep", json!("nothing"), &["instruction"]),
        (forward, "layer", json!(99), &["instruction", "forward of layer 99"]),
        (forward, "layer", json!(1), &["instruction"]),
        (forward, "layer", json!(-1), &["not a program"]),
        (backward, "layer", json!(0), &["instruction", "backward of layer 0"]),
        (backward, "layer", json!(99), &["instruction", "backward of layer 99"]),
        (update, "tensor", json!(10_000), &["instruction", "update of tensor 10000"]),
        (update, "tensor", json!(1), &["instruction", "update of tensor 1"]),
        (load, "samples", json!([0, 3]), &["refused"]),
        (load, "samples", json!([2, 0]), &["refused"]),
        (load, "samples", json!([0, 0]), &["refused"]),
        (load, "samples", json!([0, u64::MAX]), &["refused"]),
        (load, "after", json!([0]), &["instruction 0 ("]),
    ];
    for (place, key, value, parts) in cases {
        let mut program = compiled.clone();
        program["instructions"][place][key] = value;
        train(&folder, &program, "run").fails(parts, "");
    }
    for (key, value, parts) in [
        ("format", json!(99), "format 99"),
        ("purpose", json!("evaluate"), "Evaluate"),
        ("device", json!(1), "device"),
        ("instructions", json!([]), "refused"),
        ("instructions", json!({}), "not a program"),
        ("extra", json!(1), "not a program"),
    ] {
        let mut program = compiled.clone();
        program[key] = value;
        train(&folder, &program, "run").fails(&["program.json", parts], "");
    }
}

#[test]
fn the_program_of_another_job_is_refused() {
    let folder = folder();
    for other in
        ["train.global_batch=4", "model.preset=llama-tiny", "model.preset=gpt2-mini", "train.global_batch=8"]
    {
        let program = planned(&folder, &[other]);
        train(&folder, &program, "run").fails(&["program.json", "refused"], "");
    }
}

#[test]
fn what_is_no_program_at_all_is_an_error_that_says_how_to_write_one() {
    let folder = folder();
    for (name, content) in [
        ("prose.json", "put the layers in order"),
        ("torn.json", "{\"format\": 1, \"purpose\": \"train\", \"instr"),
        ("empty.json", ""),
        ("list.json", "[]"),
    ] {
        folder.write(name, content);
        let outcome = folder.shoal(&["train", "job.toml", "--program", name]);
        outcome.fails(&[name, "not a program"], "shoal plan JOB.toml --program FILE");
    }
    folder.shoal(&["train", "job.toml", "--program", "nowhere.json"]).fails(&["nowhere.json"], "path");
}
