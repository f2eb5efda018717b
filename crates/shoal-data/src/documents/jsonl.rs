//! `.jsonl`: one JSON object a line, the text in one of its fields.

use super::{BYTE_ORDER_MARK, Documents};
use crate::error::{Error, Result};
use crate::source::SourceFile;
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// Bytes of one line at most: a line is held in memory whole, and one longer than any book is no document
/// but a file that is not JSON Lines.
const LINE_BYTES_MAX: u64 = 256 << 20;

/// Reads `file` line by line. Blank lines, and documents that are null or empty, are passed over.
pub(super) fn read(file: &SourceFile, field: &str, documents: &mut dyn Documents) -> Result<()> {
    let path = &file.path;
    let opened = File::open(path).map_err(|cause| Error::io("open", path, cause))?;
    let mut reader = BufReader::with_capacity(crate::files::BLOCK_BYTES, opened);
    let mut bytes = Vec::new();
    let mut offset = 0;
    for line in 1.. {
        bytes.clear();
        let count = reader.by_ref().take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut bytes);
        let count = count.map_err(|cause| Error::io("read", path, cause))? as u64;
        if count == 0 {
            break;
        }
        if count > LINE_BYTES_MAX {
            return Err(Error::LineTooLong { path: path.clone(), line, bytes_max: LINE_BYTES_MAX });
        }
        let text = str::from_utf8(&bytes).map_err(|error| Error::NotUtf8 {
            path: path.clone(),
            offset: offset + error.valid_up_to() as u64,
        })?;
        let text = if line == 1 { text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text) } else { text };
        if !text.trim_ascii().is_empty()
            && let Some(document) = document(text, path, line, field)?
        {
            documents.text(&document)?;
            documents.end()?;
        }
        documents.advance(count);
        offset += count;
    }
    Ok(())
}

/// The text in `field` of the object that `text` is; nothing if the field is null.
fn document(text: &str, path: &Path, line: u64, field: &str) -> Result<Option<String>> {
    let bad_line = |message| Error::BadLine { path: path.into(), line, message };
    let value: Value = serde_json::from_str(text).map_err(|error| {
        // The library counts lines within the text it is given, which is always line 1.
        let whole = error.to_string();
        let place = format!(" at line {} column {}", error.line(), error.column());
        let message = whole.strip_suffix(&place).unwrap_or(&whole);
        bad_line(format!("{message} (column {})", error.column()))
    })?;
    let Value::Object(mut object) = value else {
        return Err(bad_line(format!("{}, not a JSON object", name(&value))));
    };
    match object.get_mut(field).map(Value::take) {
        Some(Value::String(text)) => Ok(Some(text)),
        Some(Value::Null) => Ok(None),
        Some(other) => {
            Err(Error::NotString { path: path.into(), line, field: field.into(), found: name(&other) })
        }
        None => {
            let has = object.keys().cloned().collect();
            Err(Error::NoField { path: path.into(), line, field: field.into(), has })
        }
    }
}

/// What a message calls a value.
fn name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
