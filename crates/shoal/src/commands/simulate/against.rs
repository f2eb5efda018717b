//! A real step beside the simulated one, instruction by instruction. What matters of an instruction is how much later it
//! ended than foreseen beyond what it was already late by when it could start: that is its own doing, the rest is others'.

use std::collections::{HashMap, HashSet};

use serde_json::json;
use shoal_engine::Traced;
use shoal_fleet::{Corrected, Correction, Costs, Seen};
use shoal_model::Chain;
use shoal_plan::{Lane, Meetings, Op, Plan, Program, Samples};
use shoal_sim::Simulated;

use crate::commands::trial::median;
use crate::error::{CliError, Result};
use crate::fleet_plan::OnFleet;
use crate::in_a_box::trace::Trace;
use crate::timeline::time_text;

/// Instructions that are named.
const NAMED: usize = 10;

/// An instruction's end, foreseen and seen.
struct Compared<'a> {
    device: &'a str,
    instruction: String,
    predicted: f64,
    measured: f64,
    /// Seconds later than foreseen that are its own doing.
    added: f64,
}

pub struct Comparison<'a> {
    predicted: f64,
    measured: f64,
    steps: usize,
    worst: Vec<Compared<'a>>,
}

impl<'a> Comparison<'a> {
    pub fn new(
        trace: &Trace,
        plan: &'a Plan,
        programs: &[Program],
        meetings: &Meetings,
        simulated: &Simulated,
    ) -> Result<Comparison<'a>> {
        if trace.plan != plan.id() || trace.steps.iter().any(|step| step.len() != programs.len()) {
            let what = format!("the trace is of plan {}, this one is {}", trace.plan, plan.id());
            return Err(CliError::said(
                what,
                "name the table that ran with --table, and the fleet it ran on",
            ));
        }
        let steps: Vec<Ends> =
            trace.steps.iter().map(|step| Ends::new(step, programs, trace.stretch)).collect();
        let typical = |program: usize, place: usize| {
            let mut ends: Vec<f64> = steps.iter().filter_map(|step| step.of[program][place]).collect();
            (!ends.is_empty()).then(|| median(&mut ends))
        };
        let mut late: Vec<Vec<Option<f64>>> = Vec::new();
        for (program, spans) in simulated.spans.iter().enumerate() {
            let late_by =
                |(place, span): (usize, &shoal_sim::Span)| Some(typical(program, place)? - span.end);
            late.push(spans.iter().enumerate().map(late_by).collect());
        }
        let mut worst = Vec::new();
        for (number, program) in programs.iter().enumerate() {
            let place_of: HashMap<u32, usize> =
                program.instructions.iter().enumerate().map(|(place, next)| (next.id, place)).collect();
            // What these came after was in the step before.
            let left_behind = program.left_behind();
            // Lanes do one after the other as they start, which is not always the order of the list.
            let spans = &simulated.spans[number];
            let mut order: Vec<usize> = (0..program.instructions.len()).collect();
            order.sort_by(|a, b| spans[*a].start.total_cmp(&spans[*b].start));
            let mut on_lane = HashMap::new();
            for place in order {
                let instruction = &program.instructions[place];
                let after = if left_behind.contains(&place) { &[][..] } else { &instruction.after };
                let before = after.iter().filter_map(|id| late[number][*place_of.get(id)?]);
                let previous = on_lane.insert(instruction.lane, place).and_then(|place| late[number][place]);
                // A movement cannot end before its partners could start it.
                let partners = meetings.of((number, place)).into_iter().flat_map(|meeting| {
                    let members = meetings.all[meeting]
                        .members
                        .iter()
                        .filter(move |member| **member != (number, place));
                    members.flat_map(|(other, place)| {
                        programs[*other].instructions[*place].after.iter().map(move |id| (*other, *id))
                    })
                });
                let partners = partners.filter_map(|(other, id)| {
                    let place = programs[other].instructions.iter().position(|next| next.id == id)?;
                    late[other][place]
                });
                let already = before.chain(previous).chain(partners).fold(0.0, f64::max);
                let Some(own) = late[number][place] else { continue };
                let predicted = simulated.spans[number][place].end;
                worst.push(Compared {
                    device: &plan.devices[program.device].name,
                    instruction: instruction.op.to_string(),
                    predicted,
                    measured: predicted + own,
                    added: own - already,
                });
            }
        }
        worst.sort_by(|a, b| b.added.abs().total_cmp(&a.added.abs()));
        worst.truncate(NAMED);
        // Where one step's end is the next one's beginning, however late others' ends are; alone, until its last end.
        let mut lengths: Vec<f64> =
            steps.windows(2).map(|pair| (pair[1].first - pair[0].first) / trace.stretch).collect();
        if lengths.is_empty() {
            lengths.extend(steps.iter().map(|step| step.length));
        }
        Ok(Comparison {
            predicted: simulated.seconds,
            measured: median(&mut lengths),
            steps: steps.len(),
            worst,
        })
    }

    pub fn json(&self) -> serde_json::Value {
        let worst = self.worst.iter().map(|compared| {
            json!({
                "device": compared.device, "instruction": compared.instruction, "added_seconds": compared.added,
                "predicted_end_seconds": compared.predicted, "measured_end_seconds": compared.measured,
            })
        });
        json!({
            "predicted_seconds": self.predicted, "measured_seconds": self.measured, "steps": self.steps,
            "worst": worst.collect::<Vec<_>>(),
        })
    }

    pub fn print(&self) {
        println!(
            "a step took {} (median of {}), predicted {} ({:+.1} %)",
            time_text(self.measured),
            self.steps,
            time_text(self.predicted),
            100.0 * (self.predicted / self.measured - 1.0)
        );
        println!("instructions that ended otherwise than foreseen by their own doing:");
        println!("{:>10} {:>10} {:>10}  device and instruction", "added", "ended at", "foreseen");
        for compared in &self.worst {
            let sign = if compared.added < 0.0 { "-" } else { "+" };
            println!(
                "{:>10} {:>10} {:>10}  {}: {}",
                format!("{sign}{}", time_text(compared.added.abs())),
                time_text(compared.measured),
                time_text(compared.predicted),
                compared.device,
                compared.instruction
            );
        }
    }
}

/// What layers took in a trace, beside what was expected of them.
pub fn seen(trace: &Trace, programs: &[Program], chain: &Chain, on: &OnFleet) -> Vec<Seen> {
    let mut seen = Vec::new();
    for step in &trace.steps {
        let computing: Vec<Computing> =
            programs.iter().zip(step).map(|(program, traced)| Computing::new(program, traced)).collect();
        for (program, traced) in programs.iter().zip(step) {
            let spans: HashMap<u32, (f64, f64)> =
                traced.iter().map(|traced| (traced.id, (traced.start, traced.end))).collect();
            let device = program.device;
            // What backwards put off is a part of them.
            let put_off: HashMap<(usize, Samples), u32> = program
                .instructions
                .iter()
                .filter_map(|instruction| match instruction.op {
                    Op::WeightGradients { layer, samples } => Some(((layer, samples), instruction.id)),
                    _ => None,
                })
                .collect();
            for instruction in &program.instructions {
                let (layer, is_backward, expected_seconds) = match instruction.op {
                    Op::Forward { layer, samples, .. } => {
                        (layer, false, on.costs.forward(layer, device, samples.count()))
                    }
                    Op::Backward { layer, samples, .. } => {
                        (layer, true, on.costs.backward(layer, device, samples.count()))
                    }
                    _ => continue,
                };
                let Some((start, end)) = spans.get(&instruction.id).copied() else { continue };
                let later = match instruction.op {
                    Op::Backward { layer, samples } => put_off.get(&(layer, samples)),
                    _ => None,
                };
                let later = later.and_then(|id| spans.get(id)).map_or(0.0, |(start, end)| end - start);
                seen.push(Seen {
                    kind: on.fleet.devices[device].kind.clone(),
                    layer: chain.layers[layer].name.clone(),
                    is_backward,
                    seconds: (end - start + later) / trace.stretch,
                    expected_seconds,
                    beside: beside(&computing, programs, device, (start, end), &on.costs),
                });
            }
        }
    }
    seen
}

/// When a device computed during a step: when each computation began, when it ended, and what all before it took.
struct Computing(Vec<(f64, f64, f64)>);

impl Computing {
    fn new(program: &Program, traced: &[Traced]) -> Computing {
        let computes = program.instructions.iter().filter(|next| next.lane == Lane::Compute);
        let computes: HashSet<u32> = computes.map(|next| next.id).collect();
        let mut spans: Vec<&Traced> = traced.iter().filter(|traced| computes.contains(&traced.id)).collect();
        spans.sort_by(|a, b| a.start.total_cmp(&b.start));
        let mut before = 0.0;
        let span = |traced: &&Traced| {
            let all_before = before;
            before += traced.end - traced.start;
            (traced.start, traced.end, all_before)
        };
        Computing(spans.iter().map(span).collect())
    }

    /// For how long by then.
    fn until(&self, moment: f64) -> f64 {
        let begun = self.0.partition_point(|(start, ..)| *start < moment);
        self.0[..begun].last().map_or(0.0, |(start, end, before)| before + moment.min(*end) - start)
    }
}

/// How much of the rest of its chip computed beside a device between two moments.
fn beside(
    computing: &[Computing],
    programs: &[Program],
    device: usize,
    (start, end): (f64, f64),
    costs: &Costs,
) -> Option<f64> {
    let chip = costs.seat(device)?.chip;
    let (mut all, mut busy) = (0.0, 0.0);
    for (program, computing) in programs.iter().zip(computing) {
        let seat = costs.seat(program.device).filter(|seat| seat.chip == chip && program.device != device);
        if let Some(seat) = seat {
            all += seat.part * (end - start);
            busy += seat.part * (computing.until(end) - computing.until(start));
        }
    }
    Some(if all > 0.0 { busy / all } else { 0.0 })
}

pub fn print_corrections(corrected: &Corrected) {
    println!("layers took so many times what was profiled:");
    println!("{:>10} {:>10}  device and layer", "forward", "backward");
    for Correction { kind, layer, forward, backward } in &corrected.layers {
        println!("{forward:>10.3} {backward:>10.3}  {kind}: {layer}");
    }
    for (kind, alone) in &corrected.alone {
        println!("{kind}: {alone:.3} of that while nobody else computes on its chip");
    }
}

/// When a step's instructions ended, in the fleet's own time from the step's beginning on.
struct Ends {
    /// By program and place.
    of: Vec<Vec<Option<f64>>>,
    /// When it began, by the machine's clock.
    first: f64,
    length: f64,
}

impl Ends {
    fn new(step: &[Vec<Traced>], programs: &[Program], stretch: f64) -> Ends {
        // Updates that wait in a line may be the step's before, or outlast this one.
        let own = programs.iter().zip(step).flat_map(|(program, traced)| {
            let in_line = program.instructions.iter().filter(|next| next.op.line().is_some());
            let in_line: HashSet<u32> = in_line.map(|next| next.id).collect();
            traced.iter().filter(move |traced| !in_line.contains(&traced.id))
        });
        let own: Vec<_> = own.collect();
        let first = own.iter().map(|traced| traced.start).fold(f64::INFINITY, f64::min);
        let last = own.iter().map(|traced| traced.end).fold(first, f64::max);
        let of = programs.iter().zip(step).map(|(program, traced)| {
            let ends: HashMap<u32, f64> = traced.iter().map(|traced| (traced.id, traced.end)).collect();
            let end = |id: &u32| ends.get(id).map(|end| (end - first) / stretch);
            program.instructions.iter().map(|next| end(&next.id)).collect()
        });
        Ends { of: of.collect(), first, length: (last - first) / stretch }
    }
}
