//! Machines that come and go: spot traces, as clouds and researchers publish them.

use std::collections::BTreeSet;
use std::path::Path;

use crate::error::{Error, Result};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TraceEvent {
    /// A machine of this name comes.
    Add(String),
    /// It goes, without notice.
    Remove(String),
}

/// Events in order of their time, in seconds from the beginning.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    pub events: Vec<(f64, TraceEvent)>,
    /// How long it is: to its last event, or beyond.
    pub seconds: f64,
}

impl Trace {
    pub fn read(path: &Path) -> Result<Trace> {
        let text = std::fs::read_to_string(path).map_err(|cause| Error::Io { path: path.into(), cause })?;
        Trace::parse(&text, &path.display().to_string())
    }

    /// `milliseconds,add|remove,node` a line, or `seconds,count`: then machines get numbers for names, and those that
    /// came last leave first. Errors give the name.
    pub fn parse(text: &str, name: &str) -> Result<Trace> {
        let mut reader = Reader::default();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let fields: Vec<&str> = line.split(',').map(str::trim).collect();
            // Tables often begin with the names of their columns.
            if reader.is_at_start && fields[0].parse::<f64>().is_err() && fields.len() > 1 {
                reader.is_at_start = false;
                continue;
            }
            reader.is_at_start = false;
            reader.line(&fields).map_err(|what| {
                let what = format!("`{line}`: {what}");
                Error::TraceLine { file: name.to_owned(), line: index + 1, what }
            })?;
        }
        match reader.kind {
            Some(_) => Ok(Trace { events: reader.events, seconds: reader.seconds }),
            None => Err(Error::EmptyTrace { file: name.to_owned() }),
        }
    }

    /// So many machines that nobody takes away, for so long.
    pub fn steady(machines: usize, seconds: f64) -> Trace {
        let name = |machine: usize| (0.0, TraceEvent::Add(machine.to_string()));
        Trace { events: (1..=machines).map(name).collect(), seconds }
    }

    /// The same, so many times faster.
    pub fn faster(mut self, times: f64) -> Trace {
        self.events.iter_mut().for_each(|(seconds, _)| *seconds /= times);
        self.seconds /= times;
        self
    }

    /// A piece of it, from there on and at most so long. Who is there then comes at once.
    pub fn piece(&self, from: f64, length: f64) -> Trace {
        let (before, after): (Vec<_>, Vec<_>) = self.events.iter().partition(|(at, _)| *at <= from);
        let mut there: Vec<&String> = Vec::new();
        for (_, event) in before {
            match event {
                TraceEvent::Add(name) => there.push(name),
                TraceEvent::Remove(name) => there.retain(|other| *other != name),
            }
        }
        let seconds = (self.seconds - from).clamp(0.0, length);
        let at_once = there.into_iter().map(|name| (0.0, TraceEvent::Add(name.clone())));
        let later = after.into_iter().map(|(at, event)| (at - from, event.clone()));
        let events = at_once.chain(later.filter(|(at, _)| *at <= seconds)).collect();
        Trace { events, seconds }
    }

    /// When the number of machines changed, and to what. Events of one moment count as one.
    pub fn counts(&self) -> Vec<(f64, usize)> {
        let (mut counts, mut count): (Vec<(f64, usize)>, usize) = (Vec::new(), 0);
        for (seconds, event) in &self.events {
            match event {
                TraceEvent::Add(_) => count += 1,
                TraceEvent::Remove(_) => count = count.saturating_sub(1),
            }
            match counts.last_mut() {
                Some(last) if last.0 == *seconds => last.1 = count,
                _ => counts.push((*seconds, count)),
            }
        }
        counts
    }

    /// Machines that are there at a time, its own events included.
    pub fn count_at(&self, seconds: f64) -> usize {
        let counts = self.counts();
        let after = counts.partition_point(|(when, _)| *when <= seconds);
        after.checked_sub(1).map_or(0, |place| counts[place].1)
    }

    /// Machines on average.
    pub fn mean_count(&self) -> f64 {
        let counts = self.counts();
        let ends = counts.iter().skip(1).map(|(at, _)| *at).chain([self.seconds]);
        let machine_seconds: f64 =
            counts.iter().zip(ends).map(|((at, count), end)| *count as f64 * (end - at)).sum();
        match self.seconds {
            0.0 => counts.last().map_or(0.0, |(_, count)| *count as f64),
            seconds => machine_seconds / seconds,
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum LineKind {
    Event,
    Count,
}

struct Reader {
    is_at_start: bool,
    /// What the lines so far were: a file has one kind.
    kind: Option<LineKind>,
    events: Vec<(f64, TraceEvent)>,
    seconds: f64,
    /// Who is there: by name, or in order of arrival.
    present: BTreeSet<String>,
    numbered: Vec<usize>,
    arrivals: usize,
}

impl Default for Reader {
    fn default() -> Reader {
        Reader {
            is_at_start: true,
            kind: None,
            events: Vec::new(),
            seconds: 0.0,
            present: BTreeSet::new(),
            numbered: Vec::new(),
            arrivals: 0,
        }
    }
}

impl Reader {
    fn line(&mut self, fields: &[&str]) -> std::result::Result<(), String> {
        let (kind, scale) = match fields.len() {
            2 => (LineKind::Count, 1.0),
            3 => (LineKind::Event, 1e-3),
            count => return Err(format!("it has {count} fields")),
        };
        if self.kind.is_some_and(|known| known != kind) {
            return Err("the lines before are of the other kind".into());
        }
        self.kind = Some(kind);
        let time: f64 = fields[0].parse().map_err(|_| format!("\"{}\" is no time", fields[0]))?;
        let seconds = time * scale;
        if !(seconds.is_finite() && seconds >= self.seconds) {
            return Err("its time lies before that of the line before".into());
        }
        self.seconds = seconds;
        match fields {
            [_, what, node] => self.event(what, node),
            _ => {
                /// More are a slip, and would be as many events.
                const MOST: usize = 1_000_000;
                let count = fields[1].parse().ok().filter(|count| *count <= MOST);
                self.count(count.ok_or_else(|| format!("\"{}\" is no number of machines", fields[1]))?);
                Ok(())
            }
        }
    }

    fn event(&mut self, what: &str, node: &str) -> std::result::Result<(), String> {
        let event = match what {
            "add" if self.present.insert(node.to_owned()) => TraceEvent::Add(node.to_owned()),
            "add" => return Err(format!("{node} is there already")),
            "remove" if self.present.remove(node) => TraceEvent::Remove(node.to_owned()),
            "remove" => return Err(format!("{node} is not there")),
            other => return Err(format!("\"{other}\" is neither add nor remove")),
        };
        self.events.push((self.seconds, event));
        Ok(())
    }

    fn count(&mut self, count: usize) {
        let name = |number: usize| format!("node{number}");
        while self.numbered.len() < count {
            self.arrivals += 1;
            self.numbered.push(self.arrivals);
            self.events.push((self.seconds, TraceEvent::Add(name(self.arrivals))));
        }
        for number in self.numbered.split_off(count).into_iter().rev() {
            self.events.push((self.seconds, TraceEvent::Remove(name(number))));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMED: &str = "0,add,node1\n0,add,node2\n60000,remove,node1\n\n180000,add,node3\n";

    #[test]
    fn named_machines_come_and_go() {
        let trace = Trace::parse(NAMED, "spot.csv").unwrap();
        assert_eq!(trace.events[2], (60.0, TraceEvent::Remove("node1".into())));
        assert_eq!(trace.counts(), [(0.0, 2), (60.0, 1), (180.0, 2)]);
        assert_eq!([0.0, 59.9, 60.0, 1e9].map(|seconds| trace.count_at(seconds)), [2, 2, 1, 2]);
        assert_eq!(trace.seconds, 180.0);
        assert!((trace.mean_count() - 240.0 / 180.0).abs() < 1e-12);
    }

    #[test]
    fn a_piece_begins_with_those_who_are_there() {
        let trace = Trace::parse(NAMED, "spot.csv").unwrap();
        let piece = trace.piece(60.0, 60.0).faster(2.0);
        assert_eq!((piece.events, piece.seconds), (vec![(0.0, TraceEvent::Add("node2".into()))], 30.0));
        let rest = trace.piece(60.0, 1e9);
        assert_eq!((rest.counts(), rest.seconds), (vec![(0.0, 1), (120.0, 2)], 120.0));
        assert!((rest.mean_count() - 1.0).abs() < 1e-12);
        assert_eq!(trace.piece(0.0, 1e9), trace);
    }

    #[test]
    fn counts_become_machines_of_which_the_last_leave_first() {
        let trace = Trace::parse("time,count\n# a comment\n10,2\n20.5,1\n30,3\n", "plain.csv").unwrap();
        assert_eq!(trace.counts(), [(10.0, 2), (20.5, 1), (30.0, 3)]);
        assert_eq!(trace.count_at(9.0), 0);
        let named = |event: &str| trace.events.iter().any(|(_, found)| format!("{found:?}") == event);
        assert!(named("Remove(\"node2\")") && named("Add(\"node4\")") && !named("Remove(\"node1\")"));
    }

    #[test]
    fn a_bad_line_is_named_by_its_number() {
        let cases = [
            ("0,add,a\n5,add,a\n", 2, "already"),
            ("0,add,a\n5,remove,b\n", 2, "not there"),
            ("5,add,a\n\n4,add,b\n", 3, "before"),
            ("0,add,a\n1,move,a\n", 2, "neither"),
            ("0,add,a\nsoon,add,b\n", 2, "no time"),
            ("0,3\n1,add,b\n", 2, "other kind"),
            ("0,3\n1,-2\n", 2, "no number"),
            ("0,3,4,5\n", 1, "4 fields"),
        ];
        for (text, line, what) in cases {
            let error = Trace::parse(text, "spot.csv").unwrap_err();
            let message = error.to_string();
            assert!(message.contains(&format!("spot.csv, line {line}")), "{message}");
            assert!(message.contains(what), "{message}");
            assert!(error.hint().is_some());
        }
        assert!(matches!(Trace::parse("\n# nothing\n", "empty.csv"), Err(Error::EmptyTrace { .. })));
    }
}
