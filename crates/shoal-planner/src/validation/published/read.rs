//! The table as it was published: a line a run, a column a thing that was stated about it. Cells may be empty.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::validation::error::Error;

pub struct Table {
    path: PathBuf,
    columns: HashMap<String, usize>,
    /// With the number of the line that each begins at.
    lines: Vec<(usize, Vec<String>)>,
}

impl Table {
    pub fn read(path: &Path) -> Result<Table, Error> {
        let text = std::fs::read_to_string(path).map_err(|cause| Error::Io { path: path.into(), cause })?;
        Table::parse(path, &text)
    }

    pub fn parse(path: &Path, text: &str) -> Result<Table, Error> {
        let mut lines = cells(text).map_err(|line| {
            Error::key(path, format!("line {line}"), "has a quotation mark that nothing closes")
        })?;
        if lines.is_empty() {
            return Err(Error::key(path, "line 1", "is to name the columns"));
        }
        let columns: HashMap<String, usize> =
            lines.remove(0).1.into_iter().enumerate().map(|(place, name)| (name, place)).collect();
        if let Some((line, cells)) = lines.iter().find(|(_, cells)| cells.len() != columns.len()) {
            let what = format!("has {} cells, and there are {} columns", cells.len(), columns.len());
            return Err(Error::key(path, format!("line {line}"), what));
        }
        Ok(Table { path: path.into(), columns, lines })
    }

    pub fn runs(&self) -> impl Iterator<Item = Run<'_>> {
        self.lines.iter().map(|(line, cells)| Run { table: self, line: *line, cells })
    }
}

/// Comma-separated values with quotation marks as RFC 4180 has them: a page of code, which is less than a dependency.
/// The line of an open quotation where one is left.
fn cells(text: &str) -> Result<Vec<(usize, Vec<String>)>, usize> {
    let (mut lines, mut row, mut cell) = (Vec::new(), Vec::new(), String::new());
    let (mut line, mut begins, mut quoted) = (1, 1, None);
    let mut rest = text.chars().peekable();
    while let Some(next) = rest.next() {
        match next {
            '"' if quoted.is_some() && rest.peek() == Some(&'"') => {
                rest.next();
                cell.push('"');
            }
            '"' => quoted = if quoted.is_some() { None } else { Some(line) },
            ',' if quoted.is_none() => row.push(std::mem::take(&mut cell)),
            '\n' if quoted.is_none() => {
                row.push(std::mem::take(&mut cell));
                lines.push((begins, std::mem::take(&mut row)));
                begins = line + 1;
            }
            '\r' if quoted.is_none() => {}
            _ => cell.push(next),
        }
        line += usize::from(next == '\n');
    }
    if let Some(line) = quoted {
        return Err(line);
    }
    if !row.is_empty() || !cell.is_empty() {
        row.push(cell);
        lines.push((begins, row));
    }
    Ok(lines)
}

/// A line of the table.
#[derive(Clone, Copy)]
pub struct Run<'a> {
    table: &'a Table,
    line: usize,
    cells: &'a [String],
}

impl<'a> Run<'a> {
    /// What stands in a column; nothing where the cell is empty or says that it does not apply.
    pub fn text(&self, column: &'static str) -> Result<Option<&'a str>, Error> {
        let Some(place) = self.table.columns.get(column) else {
            return Err(Error::key(&self.table.path, format!("column {column}"), "is missing"));
        };
        let cell = self.cells[*place].trim();
        Ok((!cell.is_empty() && cell != "n/a").then_some(cell))
    }

    pub fn number<T: FromStr>(&self, column: &'static str) -> Result<Option<T>, Error> {
        let Some(text) = self.text(column)? else { return Ok(None) };
        text.parse().map(Some).map_err(|_| self.wrong(column, format!("is {text}")))
    }

    pub fn wrong(&self, column: &str, what: impl Into<String>) -> Error {
        Error::key(&self.table.path, format!("line {}, {column}", self.line), what)
    }
}
