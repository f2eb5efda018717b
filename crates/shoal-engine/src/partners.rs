//! Whom a worker exchanges messages with in a plan: those that its fabric connects it with. With many workers that is far
//! fewer than all.

use std::collections::BTreeSet;

use shoal_net::collective;
use shoal_plan::{GradientWire, Layout, Op, Program};

/// By a program, and by what a plan's workers do together between two of its runs.
pub fn partners(layout: &Layout, program: &Program) -> BTreeSet<usize> {
    let me = program.device;
    let mut partners: BTreeSet<usize> = collective::partners(layout.members(), me).into_iter().collect();
    for instruction in &program.instructions {
        match instruction.op {
            Op::Send { to: other, .. } | Op::Receive { from: other, .. } => drop(partners.insert(other)),
            ref op => {
                let circles = circles(layout, op);
                partners.extend(circles.iter().flat_map(|members| collective::partners(members, me)));
                if let Op::Reduce { layer } = *op
                    && layout.gradient_wire(layer) == GradientWire::Bf16
                {
                    // What is rounded goes straight to where it is added up, not around and rounded again.
                    partners.extend(layout.reduce(layer).into_iter().flat_map(|group| &group.devices));
                    partners.remove(&me);
                }
            }
        }
    }
    partners
}

/// Those who do something together.
fn circles(layout: &Layout, op: &Op) -> Vec<Vec<usize>> {
    match *op {
        Op::Gather { layer, pass } => {
            layout.gather(layer, pass).map(|group| group.devices.clone()).into_iter().collect()
        }
        Op::Reduce { layer } => {
            let group = layout.reduce(layer).map(|group| group.devices.clone());
            let holders = layout.reduced_parts(layer).into_iter().map(|part| part.holders);
            group.into_iter().chain(holders).collect()
        }
        Op::HandOver { layer } => {
            layout.hand_over(layer).map(|group| group.devices.clone()).into_iter().collect()
        }
        Op::Exchange { layer, group, .. } => {
            layout.exchange(layer, group).map(|group| group.devices).into_iter().collect()
        }
        Op::CountTargets => {
            let last: BTreeSet<usize> = layout.computing(layout.chain.layers.len() - 1).collect();
            vec![last.into_iter().collect()]
        }
        Op::SumLoss | Op::GradientNorm => vec![layout.members().to_vec()],
        _ => Vec::new(),
    }
}
