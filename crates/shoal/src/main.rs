//! The command line: thin, it validates and calls. stdout is data; stderr is progress and errors.

mod assemble;
mod commands;
mod error;
mod fleet_plan;
mod in_a_box;
mod job;
mod live;
mod machine;
mod model_folder;
mod preprocessor;
mod run_folder;
mod show;
mod spill;
mod spot;
mod timeline;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::commands::{
    bench, chaos, demo, doctor, events, export, generate, init, join, lab, logs, plan, profile, ps, receipt,
    simulate, token, train, up, validate, verify, wish, worker,
};

#[global_allocator]
static ALLOCATOR: shoal_kernels::Allocator = shoal_kernels::Allocator;

/// Trains large neural networks on the accelerators people can actually get.
#[derive(Parser)]
#[command(name = "shoal", version, about, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a small model here in under a minute and see what it learnt
    Demo(demo::Options),
    /// What this machine has, what works, what to fix
    Doctor(doctor::Options),
    /// Write a commented job file, with data, that runs as it is
    Init(init::Options),
    /// Train a job; the same command resumes it
    Train(train::Options),
    /// A controller: the fleet's jobs and workers, until it is stopped
    Up(up::Options),
    /// Have this machine work for a fleet
    Join(join::Options),
    /// What lets one more machine join
    Token(token::Options),
    /// The fleet's jobs and workers
    Ps(ps::Options),
    /// What a job's steps came to
    Logs(logs::Options),
    /// Where jobs' time and money went
    Receipt(receipt::Options),
    /// Stop a job at a step's end, and save it
    Pause(wish::Options),
    /// Let a paused or failed job go on
    Resume(wish::Options),
    /// End a job for good
    Cancel(wish::Options),
    /// What the controller has recorded
    Events(events::Options),
    /// A drill on a live run: kill, freeze, cut off and slow workers down, and score how the job takes it
    Chaos(chaos::Options),
    /// What ends a freeze that a drill began
    #[command(hide = true)]
    Thaw(live::drill::ThawOptions),
    /// The plan for a job: who computes what, who keeps what, how much memory
    Plan(plan::Options),
    /// A step of a plan on a virtual clock: how long, where the time goes, a picture
    Simulate(simulate::Options),
    /// Train a job on a fleet in a box: a process for each of its devices, on this machine
    Lab(lab::Options),
    /// One device of a lab
    #[command(hide = true)]
    Worker(worker::Options),
    /// The other side of a link that `shoal profile` measures
    #[command(hide = true)]
    Echo(profile::links::EchoOptions),
    /// Write a run's model as a Hugging Face folder
    Export(export::Options),
    /// Continue a prompt with a trained model
    Generate(generate::Options),
    /// How fast a model trains here, beside PyTorch where there is one
    Bench(bench::Options),
    /// How long each layer takes here, by samples, written as profile.json
    Profile(profile::Options),
    /// Other systems' published plans and measurements beside what our models say
    Validate(validate::Options),
    /// Compare with a reference implementation's logits, gradients and losses
    Verify(verify::Options),
}

impl Command {
    /// Whether it says something and ends, with nothing begun that must be ended in order.
    fn only_tells(&self) -> bool {
        use Command::{Doctor, Events, Generate, Logs, Plan, Ps, Receipt, Simulate, Validate};
        matches!(
            self,
            Doctor(_)
                | Events(_)
                | Generate(_)
                | Logs(_)
                | Plan(_)
                | Ps(_)
                | Receipt(_)
                | Simulate(_)
                | Validate(_)
        )
    }
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    if command.only_tells() {
        // Whoever reads may have read enough (`shoal plan … | head`): it ends there quietly.
        sigpipe::reset();
    }
    let result = match command {
        Command::Demo(options) => demo::run(options),
        Command::Doctor(options) => doctor::run(options),
        Command::Init(options) => init::run(options),
        Command::Train(options) => train::run(options),
        Command::Up(options) => up::run(options),
        Command::Join(options) => join::run(options),
        Command::Token(options) => token::run(options),
        Command::Ps(options) => ps::run(options),
        Command::Logs(options) => logs::run(options),
        Command::Receipt(options) => receipt::run(options),
        Command::Pause(options) => wish::run("pause", options),
        Command::Resume(options) => wish::run("resume", options),
        Command::Cancel(options) => wish::run("cancel", options),
        Command::Events(options) => events::run(options),
        Command::Chaos(options) => chaos::run(options),
        Command::Thaw(options) => live::drill::thaw(options),
        Command::Plan(options) => plan::run(options),
        Command::Simulate(options) => simulate::run(options),
        Command::Lab(options) => lab::run(options),
        Command::Worker(options) => worker::run(options),
        Command::Echo(options) => profile::links::echo(options),
        Command::Export(options) => export::run(options),
        Command::Generate(options) => generate::run(options),
        Command::Bench(options) => bench::run(options),
        Command::Profile(options) => profile::run(options),
        Command::Validate(options) => validate::run(options),
        Command::Verify(options) => verify::run(options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            if let Some(hint) = error.hint() {
                eprintln!("hint: {hint}");
            }
            ExitCode::FAILURE
        }
    }
}
