//! The demo's picture: the loss over the steps beside one device's, and the steps over the seconds, with what happened to
//! the fleet; and a small curve of characters for the terminal.

use std::fmt::Write;

use super::course::Course;
use crate::timeline::{escaped, round_step};

const WIDTH: f64 = 900.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 24.0;
const PANEL: f64 = 230.0;
/// Of the first panel's frame, and from the end of one to the next: axis, its name, the next one's title and marks.
const TOP: f64 = 104.0;
const BETWEEN: f64 = 110.0;
const BELOW: f64 = 52.0;
/// Marks' words stand above their panel, in two rows, so that neighbours do not meet.
const MARK_ROW: f64 = 14.0;

const FLEET: &str = "#1f5fa8";
const ALONE: &str = "#c4c4c4";
const KILL: &str = "#c23b22";
const JOIN: &str = "#3a8a3a";

/// A moment worth showing.
struct Mark {
    x: f64,
    colour: &'static str,
    words: String,
}

struct Panel {
    top: f64,
    x_max: f64,
    y_max: f64,
    names: [&'static str; 2],
}

impl Panel {
    fn x(&self, x: f64) -> f64 {
        LEFT + x / self.x_max.max(f64::MIN_POSITIVE) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, y: f64) -> f64 {
        self.top + PANEL * (1.0 - y / self.y_max.max(f64::MIN_POSITIVE))
    }

    /// Lines at round numbers, and what the axes are.
    fn frame(&self) -> String {
        let (mut out, bottom) = (String::new(), self.top + PANEL);
        for x in ticks(self.x_max, 10.0) {
            let (at, text) = (self.x(x), number(x));
            let _ = writeln!(
                out,
                "<line x1=\"{at:.1}\" y1=\"{0}\" x2=\"{at:.1}\" y2=\"{bottom}\" stroke=\"#e8e8e8\"/><text x=\"{at:.1}\" y=\"{1}\" text-anchor=\"middle\">{text}</text>",
                self.top,
                bottom + 16.0
            );
        }
        for y in ticks(self.y_max, 5.0) {
            let (at, text) = (self.y(y), number(y));
            let _ = writeln!(
                out,
                "<line x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{0}\" y2=\"{at:.1}\" stroke=\"#e8e8e8\"/><text x=\"{1}\" y=\"{2:.1}\" text-anchor=\"end\">{text}</text>",
                WIDTH - RIGHT,
                LEFT - 6.0,
                at + 4.0
            );
        }
        let [x_name, y_name] = self.names;
        let (middle, side) = ((LEFT + WIDTH - RIGHT) / 2.0, self.top + PANEL / 2.0);
        let _ = writeln!(
            out,
            "<text x=\"{middle:.1}\" y=\"{0}\" text-anchor=\"middle\">{x_name}</text><text x=\"16\" y=\"{side}\" text-anchor=\"middle\" transform=\"rotate(-90 16 {side})\">{y_name}</text>",
            bottom + 36.0
        );
        out
    }

    fn line(&self, points: &[(f64, f64)], colour: &str, width: f64) -> String {
        let place = |(x, y): &(f64, f64)| format!("{:.1},{:.1}", self.x(*x), self.y(*y));
        let places: Vec<String> = points.iter().map(place).collect();
        format!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\" stroke-linejoin=\"round\"/>\n",
            places.join(" ")
        )
    }

    fn marks(&self, marks: &[Mark]) -> String {
        let mut out = String::new();
        for (row, Mark { x, colour, words }) in marks.iter().enumerate() {
            let (at, top) = (self.x(*x), self.top - 4.0 - MARK_ROW * (row % 2) as f64);
            let _ = writeln!(
                out,
                "<line x1=\"{at:.1}\" y1=\"{top}\" x2=\"{at:.1}\" y2=\"{0}\" stroke=\"{colour}\" stroke-dasharray=\"4 3\"/><text x=\"{1:.1}\" y=\"{2}\" fill=\"{colour}\">{3}</text>",
                self.top + PANEL,
                at + 4.0,
                top + 2.0,
                escaped(words)
            );
        }
        out
    }
}

fn ticks(max: f64, count: f64) -> impl Iterator<Item = f64> {
    let step = round_step(max / count);
    (0..).map(move |tick| f64::from(tick) * step).take_while(move |tick| *tick <= max * 1.0001)
}

fn number(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}

/// What happened, at its step and at its second.
fn marks(course: &Course, began_ms: u64) -> (Vec<Mark>, Vec<Mark>) {
    let (mut by_step, mut by_second) = (Vec::new(), Vec::new());
    let second = |at_ms: u64| at_ms.saturating_sub(began_ms) as f64 / 1e3;
    if let Some(killed) = &course.killed {
        let words = format!("{} is killed", killed.worker);
        by_step.push(Mark { x: killed.step as f64, colour: KILL, words: words.clone() });
        by_second.push(Mark { x: second(killed.at_ms), colour: KILL, words });
    }
    if let Some(joined) = &course.joined {
        let words = format!("{} is started", joined.worker);
        by_second.push(Mark { x: second(joined.at_ms), colour: JOIN, words });
        if let Some(plan) = course.account.next(joined.at_ms, &joined.worker, true) {
            let words = format!("{} has work", joined.worker);
            by_step.push(Mark { x: plan.after_step as f64, colour: JOIN, words: words.clone() });
            by_second.push(Mark { x: second(plan.at_ms), colour: JOIN, words });
        }
    }
    (by_step, by_second)
}

/// With a sentence on how the two curves compare.
pub fn svg(course: &Course, alone: &[(u64, f64)], note: &str) -> String {
    let points = |losses: &[(u64, f64)]| -> Vec<(f64, f64)> {
        losses.iter().map(|(step, loss)| (*step as f64, *loss)).collect()
    };
    let (fleet, alone) = (points(&course.losses), points(alone));
    let steps = fleet.iter().map(|point| point.0).fold(1.0, f64::max);
    let highest = fleet.iter().chain(&alone).map(|point| point.1).fold(0.0, f64::max);
    let began_ms = course.account.plans.first().map_or(0, |plan| plan.at_ms);
    let second = |at_ms: u64| at_ms.saturating_sub(began_ms) as f64 / 1e3;
    let counted: Vec<(f64, f64)> =
        course.account.steps.iter().map(|(at_ms, step)| (second(*at_ms), *step as f64)).collect();
    let seconds = counted.iter().map(|point| point.0).fold(0.0, f64::max);
    let loss = Panel { top: TOP, x_max: steps, y_max: highest, names: ["step", "loss"] };
    let (top, names) = (TOP + PANEL + BETWEEN, ["seconds since the first plan was in force", "steps done"]);
    let time = Panel { top, x_max: seconds, y_max: steps, names };
    let height = time.top + PANEL + BELOW;
    let (by_step, by_second) = marks(course, began_ms);

    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\" fill=\"#333333\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n<text x=\"{LEFT}\" y=\"26\" font-size=\"16\">shoal demo: a fleet that loses a worker and gets another</text>\n"
    );
    out += &legend();
    let _ = writeln!(out, "<text x=\"{LEFT}\" y=\"68\" fill=\"#666666\">{}</text>", escaped(note));
    out += &(loss.frame() + &loss.line(&alone, ALONE, 5.0) + &loss.line(&fleet, FLEET, 1.5));
    out += &loss.marks(&by_step);
    out += &(pause(course, began_ms, &time) + &time.frame() + &time.line(&counted, FLEET, 2.0));
    out += &time.marks(&by_second);
    out + "</svg>\n"
}

fn legend() -> String {
    let entry = |x: f64, colour: &str, width: f64, words: &str| {
        format!(
            "<line x1=\"{x}\" y1=\"44\" x2=\"{0}\" y2=\"44\" stroke=\"{colour}\" stroke-width=\"{width}\"/><text x=\"{1}\" y=\"48\">{words}</text>\n",
            x + 26.0,
            x + 32.0
        )
    };
    entry(LEFT, FLEET, 2.0, "on the fleet") + &entry(LEFT + 130.0, ALONE, 5.0, "on one device, undisturbed")
}

/// From the kill to the next step, shaded.
fn pause(course: &Course, began_ms: u64, panel: &Panel) -> String {
    let Some(killed) = &course.killed else { return String::new() };
    let Some(recovery) = course.account.recovery(killed.at_ms, &killed.worker) else { return String::new() };
    let from = killed.at_ms.saturating_sub(began_ms) as f64 / 1e3;
    let (left, right) = (panel.x(from), panel.x(from + recovery.seconds));
    format!(
        "<rect x=\"{left:.1}\" y=\"{}\" width=\"{:.1}\" height=\"{PANEL}\" fill=\"{KILL}\" fill-opacity=\"0.12\"/><text x=\"{:.1}\" y=\"{:.1}\" fill=\"{KILL}\">{:.1} s</text>\n",
        panel.top,
        right - left,
        right + 4.0,
        panel.top + PANEL - 8.0,
        recovery.seconds
    )
}

const ROWS: usize = 9;
const COLUMNS: usize = 64;

/// The fleet's losses as characters, a column the mean of its steps, with what happened below.
pub fn text(course: &Course) -> String {
    let count = course.losses.len().max(1);
    let column = |step: u64| (step.saturating_sub(1) as usize * COLUMNS / count).min(COLUMNS - 1);
    let (mut sums, mut counts) = ([0.0; COLUMNS], [0_u32; COLUMNS]);
    for (step, loss) in &course.losses {
        sums[column(*step)] += loss;
        counts[column(*step)] += 1;
    }
    let mean = |column: usize| (counts[column] > 0).then(|| sums[column] / f64::from(counts[column]));
    let highest = (0..COLUMNS).filter_map(mean).fold(f64::MIN_POSITIVE, f64::max);
    let row_of = |loss: f64| ((1.0 - loss / highest) * (ROWS - 1) as f64).round() as usize;
    let mut out = String::new();
    for row in 0..ROWS {
        let dot = |column| if mean(column).map(row_of) == Some(row) { '*' } else { ' ' };
        let level = highest * (ROWS - 1 - row) as f64 / (ROWS - 1) as f64;
        let dots: String = (0..COLUMNS).map(dot).collect();
        out += &format!("{level:>6.2} |{}\n", dots.trim_end());
    }
    out += &format!("{:>6} +{}\n", "loss", "-".repeat(COLUMNS));
    for mark in marks(course, 0).0 {
        out += &format!("{:8}{}^ step {}: {}\n", "", " ".repeat(column(mark.x as u64)), mark.x, mark.words);
    }
    out
}
