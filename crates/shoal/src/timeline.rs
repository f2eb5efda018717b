//! A picture of a step: what each device does when, as SVG.

use std::fmt::Write;

use shoal_plan::{Instruction, Lane, Op, Program};
use shoal_sim::{Simulated, Span};

/// Devices shown; a picture of more is no picture.
const MOST_DEVICES: usize = 64;

const WIDTH: f64 = 1200.0;
const LEFT: f64 = 150.0;
const TOP: f64 = 46.0;
/// Of a device's compute lane, and of what moves below it.
const COMPUTE_HEIGHT: f64 = 14.0;
const MOVES_HEIGHT: f64 = 6.0;
const ROW_HEIGHT: f64 = 26.0;
/// Gaps narrower than this are not drawn: a step may have a million instructions.
const NARROWEST: f64 = 0.4;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Forward,
    Recompute,
    Backward,
    Update,
    Activations,
    State,
}

impl Kind {
    const ALL: [Kind; 6] =
        [Kind::Forward, Kind::Recompute, Kind::Backward, Kind::Update, Kind::Activations, Kind::State];

    fn of(instruction: &Instruction) -> Option<Kind> {
        Some(match instruction.op {
            Op::Begin { .. } | Op::Forward { .. } | Op::Predict { .. } => Kind::Forward,
            Op::Recompute { .. } => Kind::Recompute,
            Op::BeginBackward { .. } | Op::Backward { .. } => Kind::Backward,
            Op::Update { .. } => Kind::Update,
            Op::Send { .. } | Op::Receive { .. } | Op::Offload { .. } | Op::Restore { .. } => {
                Kind::Activations
            }
            Op::Gather { .. } | Op::Reduce { .. } | Op::Exchange { .. } => Kind::State,
            Op::Load { .. } | Op::CountTargets | Op::Release { .. } | Op::SumLoss | Op::GradientNorm => {
                return None;
            }
        })
    }

    fn name(self) -> &'static str {
        match self {
            Kind::Forward => "forward",
            Kind::Recompute => "recomputation",
            Kind::Backward => "backward",
            Kind::Update => "update",
            Kind::Activations => "activations move",
            Kind::State => "parameters and gradients move",
        }
    }

    fn colour(self) -> &'static str {
        match self {
            Kind::Forward => "#4878a8",
            Kind::Recompute => "#9cc4e4",
            Kind::Backward => "#e8853a",
            Kind::Update => "#5a9e4b",
            Kind::Activations => "#8c8c8c",
            Kind::State => "#a56aa5",
        }
    }
}

/// A bar that is still growing.
struct Bar {
    kind: Kind,
    from: f64,
    to: f64,
}

/// The step of these programs, whose devices have these names.
pub fn svg(programs: &[Program], simulated: &Simulated, names: &[String]) -> String {
    let shown = programs.len().min(MOST_DEVICES);
    let height = TOP + shown as f64 * ROW_HEIGHT + 34.0;
    let scale = (WIDTH - LEFT - 20.0) / simulated.seconds.max(f64::MIN_POSITIVE);
    let mut out = String::new();
    let mut line = |text: String| out.push_str(&(text + "\n"));
    line(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"11\">"
    ));
    line(format!("<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>"));
    let mut x = LEFT;
    for kind in Kind::ALL {
        line(format!("<rect x=\"{x}\" y=\"14\" width=\"11\" height=\"11\" fill=\"{}\"/>", kind.colour()));
        line(format!("<text x=\"{}\" y=\"24\" fill=\"#333333\">{}</text>", x + 15.0, kind.name()));
        x += 30.0 + 6.4 * kind.name().len() as f64;
    }
    for (row, (program, spans)) in programs.iter().zip(&simulated.spans).take(shown).enumerate() {
        let y = TOP + row as f64 * ROW_HEIGHT;
        let name = escaped(&names[program.device]);
        line(format!("<text x=\"8\" y=\"{}\" fill=\"#333333\">{name}</text>", y + 12.0));
        line(format!(
            "<rect x=\"{LEFT}\" y=\"{y}\" width=\"{}\" height=\"{COMPUTE_HEIGHT}\" fill=\"#f2f2f2\"/>",
            WIDTH - LEFT - 20.0
        ));
        line(bars(program, spans, scale, y, true));
        line(bars(program, spans, scale, y + COMPUTE_HEIGHT + 1.0, false));
    }
    line(axis(simulated.seconds, scale, TOP + shown as f64 * ROW_HEIGHT));
    if shown < programs.len() {
        let text = format!("{} more devices are not shown", programs.len() - shown);
        line(format!("<text x=\"8\" y=\"{}\" fill=\"#333333\">{text}</text>", height - 6.0));
    }
    line("</svg>".into());
    out
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// One lane's instructions as bars; those of a kind that touch are one.
fn bars(program: &Program, spans: &[Span], scale: f64, y: f64, computing: bool) -> String {
    let mut all: Vec<(f64, f64, Kind)> = program
        .instructions
        .iter()
        .zip(spans)
        .filter(|(instruction, _)| matches!(instruction.lane, Lane::Compute | Lane::Host) == computing)
        .filter_map(|(instruction, span)| Some((span.start, span.end, Kind::of(instruction)?)))
        .collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut out = String::new();
    let mut growing: Option<Bar> = None;
    for (start, end, kind) in all {
        let (from, to) = (LEFT + start * scale, LEFT + end * scale);
        match &mut growing {
            Some(bar) if bar.kind == kind && from <= bar.to + NARROWEST => bar.to = bar.to.max(to),
            _ => {
                out.push_str(&drawn(growing.take(), y, computing));
                growing = Some(Bar { kind, from, to });
            }
        }
    }
    out + &drawn(growing, y, computing)
}

fn drawn(bar: Option<Bar>, y: f64, computing: bool) -> String {
    let Some(Bar { kind, from, to }) = bar else { return String::new() };
    let height = if computing { COMPUTE_HEIGHT } else { MOVES_HEIGHT };
    let width = (to - from).max(NARROWEST);
    format!(
        "<rect x=\"{from:.1}\" y=\"{y:.0}\" width=\"{width:.1}\" height=\"{height}\" fill=\"{}\"/>",
        kind.colour()
    )
}

/// Some round times below the rows.
fn axis(seconds: f64, scale: f64, y: f64) -> String {
    let rough = seconds / 8.0;
    let unit = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|n| n * unit).find(|step| *step >= rough);
    let step = step.unwrap_or(rough).max(f64::MIN_POSITIVE);
    let mut out = String::new();
    let mut tick = 0.0;
    while tick <= seconds {
        let x = LEFT + tick * scale;
        let _ = write!(
            out,
            "<line x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{y}\" stroke=\"#dddddd\"/><text x=\"{x:.1}\" y=\"{}\" fill=\"#333333\" text-anchor=\"middle\">{}</text>",
            y + 14.0,
            time_text(tick)
        );
        tick += step;
    }
    out
}

/// A time in the unit that reads best.
pub fn time_text(seconds: f64) -> String {
    match seconds {
        0.0 => "0".into(),
        s if s < 1e-3 => format!("{:.3} ms", s * 1e3),
        s if s < 1.0 => format!("{:.1} ms", s * 1e3),
        s if s < 100.0 => format!("{s:.2} s"),
        s => format!("{s:.0} s"),
    }
}
