//! A pipeline beside data parallel over links of 1 Gbit/s that the system shapes: two network namespaces joined by a pair of
//! virtual cards with `tbf`, a worker in each, and a model whose gradients dwarf its activations. What is measured stands
//! beside the arithmetic: what must cross, by the rate, and what is computed, measured in the same minutes.

use std::fs;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::{cargo, root};

const BITS_PER_S: f64 = 1e9;
/// What of a full frame is payload: 1,500 bytes less the headers of IP and TCP with its timestamps, of 1,514 that count.
const PAYLOAD_SHARE: f64 = 1448.0 / 1514.0;
const ADDRESSES: [&str; 2] = ["10.199.77.1", "10.199.77.2"];
const REPEATS: usize = 3;
/// At the beginning of a run memory is touched for the first time and connections grow.
const WARM_UP_STEPS: usize = 2;

const WIDTH: usize = 1024;
const BLOCKS: usize = 4;
const VOCABULARY: usize = 256;
const SEQUENCE: usize = 16;
const BATCH: usize = 2;

/// Bytes of the gradients that both workers of data parallel have.
fn gradient_bytes() -> usize {
    4 * (BLOCKS * (12 * WIDTH * WIDTH + 13 * WIDTH) + 2 * WIDTH + SEQUENCE * WIDTH + tied_elements())
}

/// The token embedding is the output matrix too, and so on both stages of a pipeline.
fn tied_elements() -> usize {
    VOCABULARY * WIDTH
}

/// Bytes that a stage sends the other in a step: activations or their gradients, and its share of the tied gradient.
fn stage_bytes() -> usize {
    4 * (BATCH * SEQUENCE * WIDTH + tied_elements())
}

fn config() -> String {
    format!(
        "{{\"model_type\": \"gpt2\", \"vocab_size\": {VOCABULARY}, \"n_embd\": {WIDTH}, \"n_layer\": {BLOCKS}, \
         \"n_head\": 8, \"n_positions\": {SEQUENCE}, \"resid_pdrop\": 0.0, \"embd_pdrop\": 0.0, \"attn_pdrop\": 0.0}}"
    )
}

fn job() -> String {
    format!(
        "name = \"namespaces\"\n[model]\nfrom = \"model\"\ninit = \"random\"\n[data]\ntrain = \"corpus.txt\"\n\
         sequence = {SEQUENCE}\n[train]\nglobal_batch = {BATCH}\nsteps = 8\n\
         optimizer = {{ kind = \"adamw\", lr = 1e-3, clip_norm = 1.0 }}\n[plan]\nthreads = 1\n\
         [checkpoint]\nevery = \"1000 steps\"\n"
    )
}

fn fleet(nodes: usize, network: &str) -> String {
    let node = |number: usize| {
        format!(
            "[[node]]\nname = \"n{number}\"\nhost_memory = \"4 GiB\"\nnetwork = \"{network}\"\nlatency = \"10 us\"\n\
             devices = [{{ kind = \"cpu\", memory = \"3 GiB\" }}]\n"
        )
    };
    (0..nodes).map(node).collect()
}

/// Two namespaces and the pair of cards between them. A process of their own removes them when this one has ended, however
/// it does: it waits for the end of a pipe.
struct Namespaces {
    names: [String; 2],
    remover: Child,
}

impl Namespaces {
    fn new() -> Result<Namespaces, String> {
        let names = ["a", "b"].map(|side| format!("shoal-{}-{side}", std::process::id()));
        let [left, right] = &names;
        run(&["ip", "netns", "add", left])
            .map_err(|error| format!("{error}\nhint: namespaces need root, and ip and tc of iproute2"))?;
        let remover = Command::new("sh")
            .args(["-c", "cat; ip netns del \"$1\"; ip netns del \"$2\"", "remover", left, right])
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            // What a terminal sends to end this process is not for it.
            .process_group(0)
            .spawn()
            .map_err(|error| format!("sh: {error}"))?;
        let made = Namespaces { names, remover };
        run(&["ip", "netns", "add", &made.names[1]])?;
        run(&["ip", "link", "add", "shoal", "netns", &made.names[0], "type", "veth"]
            .into_iter()
            .chain(["peer", "name", "shoal", "netns", &made.names[1]])
            .collect::<Vec<_>>())?;
        for (name, address) in made.names.iter().zip(ADDRESSES) {
            run(&["ip", "-n", name, "address", "add", &format!("{address}/24"), "dev", "shoal"])?;
            run(&["ip", "-n", name, "link", "set", "shoal", "up"])?;
            run(&["ip", "-n", name, "link", "set", "lo", "up"])?;
        }
        Ok(made)
    }

    /// Holds both directions to the rate, or to none.
    fn shape(&self, shaped: bool) -> Result<(), String> {
        for name in &self.names {
            let device = ["dev", "shoal", "root"];
            match shaped {
                true => {
                    let rate = format!("{BITS_PER_S}bit");
                    let limits = ["tbf", "rate", &rate, "burst", "256kb", "latency", "50ms"];
                    run(&[&["tc", "-n", name, "qdisc", "replace"], &device[..], &limits].concat())?;
                }
                false => run(&[&["tc", "-n", name, "qdisc", "delete"], &device[..]].concat())?,
            }
        }
        Ok(())
    }

    /// What tells a lab to use them.
    fn options(&self) -> Vec<String> {
        let place =
            |(name, address): (&String, &str)| ["--namespace".to_owned(), format!("{name}={address}")];
        self.names.iter().zip(ADDRESSES).flat_map(place).collect()
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        drop(self.remover.stdin.take());
        // If it cannot be waited for, it still removes them.
        let _ = self.remover.wait();
    }
}

fn run(words: &[&str]) -> Result<(), String> {
    let output = Command::new(words[0]).args(&words[1..]).output();
    match output {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            Err(format!("{}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr).trim_end()))
        }
        Err(error) => Err(format!("{}: {error}", words[0])),
    }
}

fn shoal(folder: &Path, words: &[&str]) -> Result<(), String> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or(root().join("target"), Into::into);
    let output = Command::new(target.join("release/shoal")).args(words).current_dir(folder).output();
    let output = output.map_err(|error| format!("shoal: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("shoal {}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr))),
    }
}

/// Seconds of the steps of one run, the first ones left out.
fn steps(folder: &Path, words: &[&str]) -> Result<Vec<f64>, String> {
    let run = folder.join("runs/namespaces");
    // What an earlier time left would be resumed.
    let _ = fs::remove_dir_all(&run);
    shoal(folder, &[&["lab"], words, &["--unshaped", "--json"]].concat())?;
    let path = run.join("metrics.jsonl");
    let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let seconds: Vec<f64> = text
        .lines()
        .skip(WARM_UP_STEPS)
        .filter_map(|line| crate::lab::number(line, "step_ms"))
        .map(|milliseconds| milliseconds / 1e3)
        .collect();
    if seconds.is_empty() { Err(format!("{}: no steps", path.display())) } else { Ok(seconds) }
}

/// The table by which both devices compute every layer for half of the samples and have all of the state, for the devices,
/// layers and tensors of another: no shape that is planned is held to that.
fn data_parallel_table(table: &str) -> Option<String> {
    let (before, _) = table.split_once("\"order\"")?;
    let values = |key: &str| -> Vec<String> {
        let start = format!("\"{key}\": ");
        let value = |line: &str| Some(line.trim().strip_prefix(&start)?.trim_end_matches(',').to_owned());
        table.lines().filter_map(value).collect()
    };
    let both = |entry: &dyn Fn(usize) -> String| format!("[{}, {}]", entry(0), entry(1));
    let half = |device: usize| {
        let (start, end) = (device * BATCH / 2, (device + 1) * BATCH / 2);
        format!("{{\"device\": {device}, \"micro_batches\": [[{start}, {end}]], \"activations\": \"keep\"}}")
    };
    let layer = |name: String| format!("{{\"layer\": {name}, \"compute\": {}}}", both(&half));
    let tensor = |(name, elements): (String, String)| {
        let copies = both(&|device| format!("{{\"device\": {device}, \"residence\": \"resident\"}}"));
        let slice = |device| format!("{{\"holder\": {{\"device\": {device}}}, \"slice\": [0, {elements}]}}");
        let held = both(&slice);
        format!(
            "{{\"tensor\": {name}, \"elements\": {elements}, \"compute_copies\": {copies}, \"gradient\": {held}, \
             \"optimizer\": {held}}}"
        )
    };
    let layers: Vec<String> = values("layer").into_iter().map(layer).collect();
    let tensors: Vec<String> = values("tensor").into_iter().zip(values("elements")).map(tensor).collect();
    Some(format!(
        "{before}\"order\": \"layer_first\", \"layers\": [{}], \"tensors\": [{}]}}",
        layers.join(", "),
        tensors.join(", ")
    ))
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

pub fn bench() -> Result<(), String> {
    let namespaces = Namespaces::new()?;
    cargo(&["build", "--release", "--package", "shoal"])?;
    let folder = root().join("target/namespaces");
    let said = |error: std::io::Error| format!("{}: {error}", folder.display());
    fs::create_dir_all(folder.join("model")).map_err(said)?;
    let corpus: String =
        (0..4000).map(|line| format!("{line}: the tide and the {} boats\n", line * 7)).collect();
    let files = [
        ("model/config.json", config()),
        ("job.toml", job()),
        ("corpus.txt", corpus),
        ("two.toml", fleet(2, "1 Gbit/s")),
        ("one.toml", fleet(1, "1 Gbit/s")),
    ];
    for (name, text) in files {
        fs::write(folder.join(name), text).map_err(said)?;
    }
    let plan = ["plan", "job.toml", "--fleet", "two.toml", "--shape", "pipeline", "--survive", "0"];
    shoal(&folder, &[&plan[..], &["--table", "pipeline.json"]].concat())?;
    let pipeline = fs::read_to_string(folder.join("pipeline.json")).map_err(said)?;
    let parallel =
        data_parallel_table(&pipeline).ok_or("pipeline.json is no table as `shoal plan` writes it")?;
    fs::write(folder.join("data-parallel.json"), parallel).map_err(said)?;
    let places = namespaces.options();
    let placed = |table: &'static str| -> Vec<&str> {
        ["two.toml", "job.toml", "--table", table]
            .into_iter()
            .chain(places.iter().map(String::as_str))
            .collect()
    };
    let half = format!("train.global_batch={}", BATCH / 2);
    let [mut pipeline, mut data_parallel, mut stages, mut alone] = [(); 4].map(|()| Vec::new());
    for repeat in 0..REPEATS {
        eprint!("\r{repeat} of {REPEATS} repeats");
        let _ = std::io::stderr().flush();
        namespaces.shape(true)?;
        data_parallel.extend(steps(&folder, &placed("data-parallel.json"))?);
        pipeline.extend(steps(&folder, &placed("pipeline.json"))?);
        namespaces.shape(false)?;
        stages.extend(steps(&folder, &placed("pipeline.json"))?);
        alone.extend(steps(&folder, &["one.toml", "job.toml", "--set", &half])?);
    }
    eprintln!("\r");
    let [pipeline, data_parallel, stages, alone] =
        [pipeline, data_parallel, stages, alone].map(|mut seconds| median(&mut seconds));
    tell(pipeline, data_parallel, stages, alone);
    Ok(())
}

fn tell(pipeline: f64, data_parallel: f64, stages: f64, alone: f64) {
    let bytes_per_s = BITS_PER_S / 8.0 * PAYLOAD_SHARE;
    let crossing = |bytes: usize| bytes as f64 / bytes_per_s;
    let (gradients, activations) = (crossing(gradient_bytes()), crossing(stage_bytes()));
    let (predicted_parallel, predicted_pipeline) = (gradients + alone, activations + stages);
    println!("two namespaces, 1 Gbit/s each way: {:.1} MB/s of payload", bytes_per_s / 1e6);
    println!(
        "GPT-2 of width {WIDTH}, {BLOCKS} blocks, {BATCH} samples of {SEQUENCE} tokens; medians of {REPEATS} runs"
    );
    let row = |what: &str, bytes: usize, cross: f64, compute: f64, predicted: f64, measured: f64| {
        println!(
            "{what:14} {:>8.2} MB {cross:>8.3} s {compute:>8.3} s {predicted:>8.3} s {measured:>8.3} s {:>+7.1} %",
            bytes as f64 / 1e6,
            100.0 * (predicted / measured - 1.0)
        );
    };
    println!(
        "{:14} {:>11} {:>10} {:>10} {:>10} {:>10} {:>9}",
        "", "each sends", "crosses", "computed", "together", "measured", "off"
    );
    row("data parallel", gradient_bytes(), gradients, alone, predicted_parallel, data_parallel);
    row("pipeline", stage_bytes(), activations, stages, predicted_pipeline, pipeline);
    let (predicted, measured) = (predicted_parallel / predicted_pipeline, data_parallel / pipeline);
    println!(
        "the pipeline is {measured:.2} times as fast, {predicted:.2} by the arithmetic ({:+.1} %)",
        100.0 * (predicted / measured - 1.0)
    );
}
