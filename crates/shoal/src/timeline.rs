//! What each device does when during a step, drawn: an SVG, or a page around it that says what lies under the pointer.

use std::fmt::Write;
use std::path::Path;

use shoal_plan::{Instruction, Lane, Op, Program};
use shoal_sim::Span;

use crate::error::{CliError, Result};

/// Devices shown; more than a screenful shows nothing.
const MOST_DEVICES: usize = 64;

const WIDTH: f64 = 1200.0;
const RIGHT: f64 = 30.0;
const TOP: f64 = 62.0;
/// Room for a device's name: of a character, and at the most.
const CHARACTER: f64 = 6.6;
const NAME_CHARACTERS_MAX: usize = 28;
/// Of a device's compute lane, and of what moves below it.
const COMPUTE_HEIGHT: f64 = 14.0;
const MOVES_HEIGHT: f64 = 6.0;
const ROW_HEIGHT: f64 = 26.0;
/// Nothing is drawn narrower than this, gaps neither: a step may have a million instructions.
const NARROWEST: f64 = 0.4;
/// Instructions from this width on have a bar of their own, narrower ones of a kind that touch are one.
const OWN_BAR: f64 = 2.0;

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
            Op::BeginBackward { .. } | Op::Backward { .. } | Op::WeightGradients { .. } => Kind::Backward,
            Op::Update { .. } => Kind::Update,
            Op::Send { .. } | Op::Receive { .. } | Op::Offload { .. } | Op::Restore { .. } => {
                Kind::Activations
            }
            Op::Gather { .. } | Op::Reduce { .. } | Op::HandOver { .. } | Op::Exchange { .. } => Kind::State,
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

/// A step and what is to be drawn of it.
pub struct Timeline<'a> {
    pub title: String,
    pub programs: &'a [Program],
    /// When each program's instructions were at work.
    pub spans: &'a [Vec<Span>],
    pub seconds: f64,
    /// Of devices.
    pub names: Vec<&'a str>,
}

/// A file to draw into, and how.
pub struct Drawing<'a> {
    pub path: &'a Path,
    is_page: bool,
}

impl<'a> Drawing<'a> {
    /// By the name's ending.
    pub fn named(path: &'a Path) -> Result<Drawing<'a>> {
        let extension = path.extension().map(|extension| extension.to_ascii_lowercase());
        let is_page = match extension.as_ref().and_then(|extension| extension.to_str()) {
            Some("svg") => false,
            Some("html") => true,
            _ => {
                let what = format!("--timeline {}: neither .svg nor .html", path.display());
                return Err(CliError::said(what, "end the name in .svg for a drawing, in .html for a page"));
            }
        };
        Ok(Drawing { path, is_page })
    }

    pub fn write(&self, timeline: &Timeline) -> Result {
        let drawn = if self.is_page { timeline.html() } else { timeline.svg() };
        std::fs::write(self.path, drawn).map_err(CliError::at(self.path))
    }
}

/// A bar that is still growing.
struct Bar {
    kind: Kind,
    start: f64,
    end: f64,
    /// How many instructions, and the first of them.
    count: usize,
    first: String,
}

impl Timeline<'_> {
    /// Where time zero is.
    fn left(&self) -> f64 {
        let longest = self.names.iter().map(|name| name.chars().count().min(NAME_CHARACTERS_MAX)).max();
        24.0 + CHARACTER * longest.unwrap_or(0).max(6) as f64
    }

    /// Units of width a second.
    fn scale(&self) -> f64 {
        (WIDTH - self.left() - RIGHT) / self.seconds.max(f64::MIN_POSITIVE)
    }

    /// A page of its own: the drawing, and what lies under the pointer.
    fn html(&self) -> String {
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n{svg}<div id=\"tip\" hidden></div>\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n",
            title = escaped(&self.title),
            svg = self.svg(),
        )
    }

    fn svg(&self) -> String {
        let shown = self.programs.len().min(MOST_DEVICES);
        let (left, bottom) = (self.left(), TOP + shown as f64 * ROW_HEIGHT);
        let height = bottom + 40.0;
        let mut out = String::new();
        let mut line = |text: String| out.push_str(&(text + "\n"));
        line(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"11\" fill=\"#333333\">"
        ));
        line(format!("<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>"));
        line(format!("<text x=\"8\" y=\"20\" font-size=\"14\">{}</text>", escaped(&self.title)));
        line(legend(left));
        line(self.grid(bottom));
        for (row, (program, spans)) in self.programs.iter().zip(self.spans).take(shown).enumerate() {
            let y = TOP + row as f64 * ROW_HEIGHT;
            let name = self.names[program.device];
            let short: String = match name.chars().count() > NAME_CHARACTERS_MAX {
                true => name.chars().take(NAME_CHARACTERS_MAX - 1).chain(['…']).collect(),
                false => name.to_owned(),
            };
            line(format!("<text x=\"8\" y=\"{}\">{}</text>", y + 11.0, escaped(&short)));
            line(format!(
                "<rect x=\"{left:.1}\" y=\"{y}\" width=\"{:.1}\" height=\"{COMPUTE_HEIGHT}\" fill=\"#888888\" fill-opacity=\"0.1\"/>",
                WIDTH - left - RIGHT
            ));
            line(self.bars(program, spans, y, true));
            line(self.bars(program, spans, y + COMPUTE_HEIGHT + 1.0, false));
        }
        if shown < self.programs.len() {
            let text = format!("{} more devices are not shown", self.programs.len() - shown);
            line(format!("<text x=\"8\" y=\"{}\">{text}</text>", height - 6.0));
        }
        line("</svg>".into());
        out
    }

    /// One lane's instructions as bars.
    fn bars(&self, program: &Program, spans: &[Span], y: f64, computing: bool) -> String {
        let mut all: Vec<(Span, Kind, &Instruction)> = program
            .instructions
            .iter()
            .zip(spans)
            .filter(|(instruction, _)| (instruction.lane == Lane::Compute) == computing)
            .filter_map(|(instruction, span)| Some((*span, Kind::of(instruction)?, instruction)))
            .collect();
        all.sort_by(|a, b| a.0.start.total_cmp(&b.0.start));
        let scale = self.scale();
        let is_narrow = |start: f64, end: f64| (end - start) * scale < OWN_BAR;
        let mut out = String::new();
        let mut growing: Option<Bar> = None;
        for (Span { start, end }, kind, instruction) in all {
            match &mut growing {
                // A few narrow ones grow together until they can be seen.
                Some(bar)
                    if bar.kind == kind
                        && is_narrow(start, end)
                        && is_narrow(bar.start, bar.end)
                        && (start - bar.end) * scale <= NARROWEST =>
                {
                    bar.end = bar.end.max(end);
                    bar.count += 1;
                }
                _ => {
                    out.push_str(&self.drawn(growing.take(), program, y, computing));
                    growing = Some(Bar { kind, start, end, count: 1, first: instruction.to_string() });
                }
            }
        }
        out + &self.drawn(growing, program, y, computing)
    }

    fn drawn(&self, bar: Option<Bar>, program: &Program, y: f64, computing: bool) -> String {
        let Some(Bar { kind, start, end, count, first }) = bar else { return String::new() };
        let height = if computing { COMPUTE_HEIGHT } else { MOVES_HEIGHT };
        let (x, full) = (self.left() + start * self.scale(), (end - start) * self.scale());
        // A gap between neighbours of a kind, where there is room for one.
        let width = if full > OWN_BAR { full - NARROWEST } else { full.max(NARROWEST) };
        let more = if count > 1 { format!(" and {} more", count - 1) } else { String::new() };
        let said = format!(
            "{first}{more}, on {}, from {} to {}",
            self.names[program.device],
            time_text(start),
            time_text(end)
        );
        format!(
            "<rect x=\"{x:.1}\" y=\"{y:.0}\" width=\"{width:.1}\" height=\"{height}\" fill=\"{}\"><title>{}</title></rect>",
            kind.colour(),
            escaped(&said)
        )
    }

    /// Some round times, with lines under the rows.
    fn grid(&self, bottom: f64) -> String {
        let step = round_step(self.seconds / 8.0);
        let mut out = String::new();
        for tick in (0..).map(|tick| f64::from(tick) * step).take_while(|tick| *tick <= self.seconds) {
            let x = self.left() + tick * self.scale();
            let _ = write!(
                out,
                "<line x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{bottom}\" stroke=\"#dddddd\"/><text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
                bottom + 14.0,
                tick_text(tick, step)
            );
        }
        out
    }
}

/// What the colours mean.
fn legend(left: f64) -> String {
    let (mut out, mut x) = (String::new(), left);
    for kind in Kind::ALL {
        let _ = write!(
            out,
            "<rect x=\"{x:.1}\" y=\"36\" width=\"11\" height=\"11\" fill=\"{}\"/><text x=\"{:.1}\" y=\"46\">{}</text>",
            kind.colour(),
            x + 15.0,
            kind.name()
        );
        x += 32.0 + CHARACTER * kind.name().len() as f64;
    }
    out
}

/// With as many digits as tell it from its neighbours.
fn tick_text(seconds: f64, step: f64) -> String {
    let (unit, name) = match step {
        s if s < 1e-4 => (1e-6, "us"),
        s if s < 0.1 => (1e-3, "ms"),
        _ => (1.0, "s"),
    };
    let digits = usize::from(step / unit < 1.0);
    if seconds == 0.0 { "0".into() } else { format!("{:.digits$} {name}", seconds / unit) }
}

/// A round number not below this one: what lies between two lines of a grid.
pub fn round_step(rough: f64) -> f64 {
    let unit = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|n| n * unit).find(|step| *step >= rough);
    step.unwrap_or(rough).max(f64::MIN_POSITIVE)
}

pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

const STYLE: &str = "\
body { margin: 0; font-family: sans-serif; background: #ffffff; }
svg { width: 100%; height: auto; }
#tip { position: fixed; max-width: 40em; padding: 4px 8px; font-size: 13px; color: #ffffff; background: #333333; pointer-events: none; }
";

/// Titles become a box at the pointer, at once: browsers show theirs late and small.
const SCRIPT: &str = "\
const tip = document.getElementById('tip');
for (const title of document.querySelectorAll('rect > title')) {
  title.parentNode.dataset.said = title.textContent;
  title.remove();
}
document.addEventListener('mousemove', event => {
  const said = event.target.dataset ? event.target.dataset.said : undefined;
  tip.hidden = !said;
  if (!said) return;
  tip.textContent = said;
  tip.style.left = Math.max(0, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)) + 'px';
  tip.style.top = Math.max(0, Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8)) + 'px';
});
";

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
