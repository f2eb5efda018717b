//! One table of a fleet file: its keys are checked when it is opened, its values as they are asked for. Serde could
//! refuse both, but a misspelt key deserves the nearest one's name, and a value its full path.

use toml::{Table, Value};

use crate::error::{Error, Result};
use crate::link::Link;
use crate::units;

pub(super) struct Section<'a> {
    file: &'a str,
    /// From the top of the file, such as `node[0].disk`.
    path: String,
    table: &'a Table,
}

/// Keys of a link that is written out.
const LINK_KEYS: &[&str] = &["bandwidth", "latency", "by_size"];

impl<'a> Section<'a> {
    pub fn open(file: &'a str, path: String, table: &'a Table, known: &[&str]) -> Result<Section<'a>> {
        let section = Section { file, path, table };
        let Some(key) = table.keys().find(|key| !known.contains(&key.as_str())) else {
            return Ok(section);
        };
        let nearest = known
            .iter()
            .map(|name| (strsim::jaro_winkler(key, name), name))
            .filter(|(likeness, _)| *likeness > 0.75)
            .max_by(|a, b| a.0.total_cmp(&b.0));
        let hint = match nearest {
            Some((_, name)) => format!("did you mean {}?", section.key(name)),
            None => format!("keys here are {}", known.join(", ")),
        };
        Err(Error::UnknownKey { file: file.to_owned(), key: section.key(key), hint })
    }

    /// The full path of a key.
    fn key(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    pub fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    /// An error about one of its keys.
    pub fn bad(&self, key: &str, what: impl Into<String>, hint: impl Into<String>) -> Error {
        let key = if key.is_empty() { self.path.clone() } else { self.key(key) };
        Error::Value { file: self.file.to_owned(), key, what: what.into(), hint: hint.into() }
    }

    fn other_type(&self, key: &str, value: &Value, hint: &str) -> Error {
        self.bad(key, format!("is a {}", value.type_str()), hint)
    }

    /// Text that is read by one of [`units`]' functions.
    fn read<T>(
        &self,
        key: &str,
        parse: impl Fn(&str) -> std::result::Result<T, String>,
        hint: &str,
    ) -> Result<Option<T>> {
        let Some(text) = self.text(key, hint)? else { return Ok(None) };
        parse(text).map(Some).map_err(|what| self.bad(key, what, hint))
    }

    pub fn text(&self, key: &str, hint: &str) -> Result<Option<&'a str>> {
        match self.table.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.other_type(key, other, hint)),
        }
    }

    pub fn bytes(&self, key: &str) -> Result<Option<u64>> {
        self.read(key, units::bytes, units::SIZE_HINT)
    }

    pub fn rate(&self, key: &str) -> Result<Option<f64>> {
        self.read(key, units::bytes_per_second, units::RATE_HINT)
    }

    pub fn seconds(&self, key: &str) -> Result<Option<f64>> {
        self.read(key, units::seconds, units::TIME_HINT)
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.table.get(key) {
            None => Ok(None),
            Some(Value::Boolean(flag)) => Ok(Some(*flag)),
            Some(other) => Err(self.other_type(key, other, "set it to true or false")),
        }
    }

    /// How many of something there are; one where nothing is said.
    pub fn count(&self, key: &str) -> Result<usize> {
        const MOST: i64 = 100_000;
        match self.table.get(key) {
            None => Ok(1),
            Some(Value::Integer(count @ 1..=MOST)) => Ok(*count as usize),
            Some(Value::Integer(count)) => {
                Err(self.bad(key, format!("is {count}"), format!("set it to a number from 1 to {MOST}")))
            }
            Some(other) => Err(self.other_type(key, other, "set it to a whole number")),
        }
    }

    /// A part of a whole, in whole hundredths.
    pub fn percent(&self, key: &str) -> Result<Option<u32>> {
        let hint = "set it to a part of one in hundredths, such as 0.25";
        let part = match self.table.get(key) {
            None => return Ok(None),
            Some(Value::Float(part)) => *part,
            Some(Value::Integer(part)) => *part as f64,
            Some(other) => return Err(self.other_type(key, other, hint)),
        };
        let percent = (100.0 * part).round();
        match (1.0..=100.0).contains(&percent) && (100.0 * part - percent).abs() < 1e-6 {
            true => Ok(Some(percent as u32)),
            false => Err(self.bad(key, format!("is {part}"), hint)),
        }
    }

    /// Dollars an hour.
    pub fn dollars(&self, key: &str) -> Result<Option<f64>> {
        let hint = "set it to dollars an hour, such as 2.5";
        let dollars = match self.table.get(key) {
            None => return Ok(None),
            Some(Value::Float(dollars)) => *dollars,
            Some(Value::Integer(dollars)) => *dollars as f64,
            Some(other) => return Err(self.other_type(key, other, hint)),
        };
        match dollars >= 0.0 && dollars.is_finite() {
            true => Ok(Some(dollars)),
            false => Err(self.bad(key, format!("is {dollars}"), hint)),
        }
    }

    /// `"10 Gbit/s"`, or `{ bandwidth = …, latency = …, by_size = { "64 KiB" = "1 GB/s" } }`.
    pub fn link(&self, key: &str, latency_seconds: f64) -> Result<Option<Link>> {
        match self.table.get(key) {
            None => Ok(None),
            Some(Value::String(_)) => {
                Ok(self.rate(key)?.map(|bandwidth| Link::new(bandwidth, latency_seconds)))
            }
            Some(Value::Table(table)) => {
                let inner = Section::open(self.file, self.key(key), table, LINK_KEYS)?;
                inner.as_link(latency_seconds).map(Some)
            }
            Some(other) => Err(self.other_type(key, other, units::RATE_HINT)),
        }
    }

    /// The link that the section's own keys say.
    pub fn as_link(&self, latency_seconds: f64) -> Result<Link> {
        let mut by_size = Vec::new();
        if let Some(sizes) = self.table("by_size")? {
            for size in sizes.keys() {
                let inner = Section { file: self.file, path: self.key("by_size"), table: sizes };
                let bytes = units::bytes(size).map_err(|what| inner.bad(size, what, units::SIZE_HINT))?;
                by_size.extend(inner.rate(size)?.map(|rate| (bytes, rate)));
            }
            by_size.sort_by_key(|(bytes, _)| *bytes);
        }
        if let Some(pair) = by_size.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            let what = format!("has the size of {} bytes twice", pair[0].0);
            return Err(self.bad("by_size", what, "keep one of them"));
        }
        let (stated, latency) = (self.rate("bandwidth")?, self.seconds("latency")?);
        if by_size.is_empty() {
            let bandwidth = stated.ok_or_else(|| self.bad("", "has no bandwidth", units::RATE_HINT))?;
            return Ok(Link::new(bandwidth, latency.unwrap_or(latency_seconds)));
        }
        let mut link = Link::measured(by_size);
        link.bytes_per_second = stated.unwrap_or(link.bytes_per_second);
        link.seconds_latency = latency.unwrap_or(link.seconds_latency);
        Ok(link)
    }

    fn table(&self, key: &str) -> Result<Option<&'a Table>> {
        match self.table.get(key) {
            None => Ok(None),
            Some(Value::Table(table)) => Ok(Some(table)),
            Some(other) => {
                Err(self.other_type(key, other, &format!("write {key} = {{ … }}, with its keys inside")))
            }
        }
    }

    pub fn section(&self, key: &str, known: &[&str]) -> Result<Option<Section<'a>>> {
        let table = self.table(key)?;
        table.map(|table| Section::open(self.file, self.key(key), table, known)).transpose()
    }

    /// A list of tables.
    pub fn sections(&self, key: &str, known: &[&str]) -> Result<Vec<Section<'a>>> {
        let hint = format!("write a list of tables for {key}; docs/fleet.md has an example");
        let list = match self.table.get(key) {
            None => return Ok(Vec::new()),
            Some(Value::Array(list)) => list,
            Some(other) => return Err(self.other_type(key, other, &hint)),
        };
        let entry = |(index, value): (usize, &'a Value)| {
            let path = format!("{}[{index}]", self.key(key));
            match value {
                Value::Table(table) => Section::open(self.file, path, table, known),
                other => Err(self.other_type(&format!("{key}[{index}]"), other, &hint)),
            }
        };
        list.iter().enumerate().map(entry).collect()
    }

    /// The two names of a pair.
    pub fn pair(&self, key: &str) -> Result<[&'a str; 2]> {
        let names = self.table.get(key).and_then(Value::as_array).map(Vec::as_slice);
        match names {
            Some([Value::String(a), Value::String(b)]) => Ok([a, b]),
            _ => {
                let hint = "name two zones or two nodes, such as between = [\"east\", \"west\"]";
                Err(self.bad(key, "does not name two", hint))
            }
        }
    }
}
