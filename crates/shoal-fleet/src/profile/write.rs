//! A profile as text: a layer a line, numbers of five digits, which is more than any measurement repeats.

use std::io::{self, Write};
use std::path::Path;

use serde::{Serialize, Serializer};
use serde_json::ser::{Formatter, Serializer as JsonSerializer};

use super::Profile;
use crate::error::{Error, Result};

pub(super) fn file(profile: &Profile, path: &Path) -> Result<()> {
    std::fs::write(path, text(profile)).map_err(|cause| Error::Io { path: path.into(), cause })
}

pub(super) fn text(profile: &Profile) -> String {
    let mut bytes = Vec::new();
    let written = profile.serialize(&mut JsonSerializer::with_formatter(&mut bytes, Lines::default()));
    written.expect("plain numbers and names can be written as JSON");
    bytes.push(b'\n');
    String::from_utf8(bytes).expect("JSON is UTF-8")
}

/// Objects in lists begin lines: devices, layers and links.
#[derive(Default)]
struct Lines {
    is_in_list: bool,
}

impl Formatter for Lines {
    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(if self.is_in_list { b"\n{" } else { b"{" })
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.is_in_list = false;
        writer.write_all(b": ")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.is_in_list = true;
        if first { Ok(()) } else { writer.write_all(b",") }
    }
}

fn five_digits(number: f64) -> f64 {
    format!("{number:.4e}").parse().unwrap_or(number)
}

pub(crate) fn rounded<S: Serializer>(number: &f64, to: S) -> std::result::Result<S::Ok, S::Error> {
    to.serialize_f64(five_digits(*number))
}

pub(crate) fn rounded_option<S: Serializer>(
    number: &Option<f64>,
    to: S,
) -> std::result::Result<S::Ok, S::Error> {
    number.map(five_digits).serialize(to)
}

pub(crate) fn rounded_each<S: Serializer>(numbers: &[f64], to: S) -> std::result::Result<S::Ok, S::Error> {
    to.collect_seq(numbers.iter().map(|number| five_digits(*number)))
}

pub(crate) fn rounded_pairs<S: Serializer>(
    pairs: &[(u64, f64)],
    to: S,
) -> std::result::Result<S::Ok, S::Error> {
    to.collect_seq(pairs.iter().map(|(size, rate)| (size, five_digits(*rate))))
}
