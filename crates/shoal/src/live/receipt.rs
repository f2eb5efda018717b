//! A job's receipt as people read it: where the device-seconds and the money went, in the words of `shoal simulate
//! --trace`, and what a step took beside what its plans said.

use shoal_service::receipt::{PartView, ReceiptView};

use crate::show::{percent, table};

/// With a line for each part.
pub fn text(receipt: &ReceiptView) -> String {
    let ReceiptView { job, name, steps, .. } = receipt;
    let mut out = format!("receipt of job {job} ({name}): {}\n", whole(receipt));
    out += &parts(receipt);
    if let (Some(took), Some(predicted)) = (receipt.step_ms, receipt.predicted_step_ms) {
        out += &format!("  a step took {took:.1} ms, predicted {predicted:.1} ms (mean of {steps})\n");
    }
    out
}

/// All jobs' together; nothing to add up where there is just one.
pub fn total(receipts: &[ReceiptView]) -> Option<ReceiptView> {
    let (first, rest) = receipts.split_first().filter(|(_, rest)| !rest.is_empty())?;
    let mut total = ReceiptView { step_ms: None, predicted_step_ms: None, ..first.clone() };
    for receipt in rest {
        total.device_seconds += receipt.device_seconds;
        total.dollars += receipt.dollars;
        total.steps += receipt.steps;
        for (sum, part) in total.parts.iter_mut().zip(&receipt.parts) {
            sum.device_seconds += part.device_seconds;
            sum.dollars += part.dollars;
        }
    }
    let whole = total.device_seconds.max(f64::MIN_POSITIVE);
    total.parts.iter_mut().for_each(|part| part.share = part.device_seconds / whole);
    Some(total)
}

pub fn total_text(total: &ReceiptView) -> String {
    format!("all jobs: {}\n{}", whole(total), parts(total))
}

fn whole(receipt: &ReceiptView) -> String {
    let seconds = format!("{:.1} device-seconds", receipt.device_seconds);
    match receipt.dollars > 0.0 {
        true => format!("{seconds}, {}", dollars(receipt.dollars)),
        false => format!("{seconds}; workers without a price (`shoal join --price`)"),
    }
}

fn parts(receipt: &ReceiptView) -> String {
    let priced = receipt.dollars > 0.0;
    let row = |part: &PartView| {
        let (seconds, share) = (format!("{:>14.1}", part.device_seconds), percent(part.share));
        let mut row = vec![format!("  {}", part.part), seconds, format!("{share:>7}")];
        row.extend(priced.then(|| dollars(part.dollars)));
        row
    };
    let head = ["  where it went", "device-seconds", "  share", "dollars"];
    table(&head[..if priced { 4 } else { 3 }], receipt.parts.iter().map(row))
}

/// Small sums with the digits that tell them from nothing.
fn dollars(amount: f64) -> String {
    match amount {
        a if a >= 1.0 || a == 0.0 => format!("${a:.2}"),
        a => format!("${a:.6}"),
    }
}
